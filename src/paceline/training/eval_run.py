"""Run a stand-alone evaluation of a checkpoint."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.core.dataset import Source
from paceline.core.errors import DataError, RecipeError
from paceline.core.health import find_problems, is_suspicious
from paceline.core.results import EvalReport
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.models.lora import merge_adapters
from paceline.models.validate import check_model
from paceline.parallel.build import build_strategy
from paceline.parallel.process_group import rendezvous
from paceline.recipe.plugins import plugins_of
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.sampler import Shuffle
from paceline.recipe.schema.train import Parallel
from paceline.training.checkpoint import load_model
from paceline.training.context import open_context
from paceline.training.datasets import discard_message, read_eval_data
from paceline.training.eval_model import load_weight_average
from paceline.training.eval_outputs import discard
from paceline.training.explain import ExplainMistakes, build_mistake_explainer
from paceline.training.result import evidence_from_report, read_best_evaluation


def evaluate(
    recipe: Recipe,
    world: World,
    checkpoint: Path,
    *,
    run_recipe: Recipe,
    print_line: Callable[[str], None],
    write_report: Callable[[EvalReport, Source, ExplainMistakes], None] = discard,
    calibrates: bool = False,
    lists_predictions: bool = False,
) -> EvalReport:
    """Evaluate the raw and averaged weights of `checkpoint` on the data of `recipe`, as one rank of `world`.

    `run_recipe` is the recipe of the checkpoint's run. If `recipe` has another dataset, classes are matched by name,
    and rank 0 prints a note by `print_line`. `write_report` gets the report, the open dataset and a
    function that explains mistakes. With `calibrates` the report of rank 0 has a calibration, and with
    `lists_predictions` the prediction for each image. Plugins of the model and the dataset are imported: the caller has
    checked the user's consent.
    """
    # An evaluation takes no training samples, and imports no code for them.
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"sampler": Shuffle()})})
    read = partial(read_eval_data, recipe, run_recipe, checkpoint, print_line if world.is_main else discard_message)
    with rendezvous(world, recipe.parallel) as store, contextlib.ExitStack() as exit_stack:
        for plugin in plugins_of(recipe):
            if plugin.path in ("model", "data.source"):  # the evaluator loads those of metrics
                plugin.load()
        context = exit_stack.enter_context(
            open_context(recipe, store, read, train_ranks=1, trained=RunDir(checkpoint.parent.parent))
        )
        if not context.plan.val_images:
            raise DataError("data.source: there are no validation images to evaluate on (name some by data.source.*)")
        if lists_predictions and context.is_multi_label:
            raise RecipeError("--predictions: needs one class per image, and these have several (leave it out)")
        check_model(recipe.model, context.plan)
        # The plan is for one rank: the training batch size may not divide over the ranks that evaluate.
        if recipe.data.eval_batch_size == "auto":
            eval_batch = -(-context.plan.eval_batch // world.world_size)
            context = replace(context, plan=replace(context.plan, eval_batch=eval_batch))
        precision = context.create_precision()
        model = context.create_model(precision, is_new=False)
        merge = partial(merge_adapters, recipe.model.lora)
        load_model(checkpoint, model, convert=merge)
        # The weights are whole, whichever strategy trained them.
        strategy = build_strategy(Parallel(), world, context.device)
        average = load_weight_average(recipe.train, recipe.optim, model, precision, checkpoint, merge)
        report = context.create_evaluator(
            precision, strategy, average, calibrates=calibrates, lists_predictions=lists_predictions
        )(model)
        assert report is not None, "a stand-alone evaluation is never preempted"
        evidence = evidence_from_report(report)
        # Another dataset has no training images and no best evaluation.
        if recipe.data.source == run_recipe.data.source:
            best, best_step = read_best_evaluation(checkpoint)
            if is_suspicious(replace(evidence, best=best, best_step=best_step)):
                check = context.check_batch_norm(precision, strategy, average, model)
                evidence = replace(evidence, batch_norm=check)
        report = report.model_copy(update={"health": find_problems(evidence)})
        if world.is_main:
            explain = build_mistake_explainer(context, model, precision, average)
            write_report(report, context.datasets.val, explain)
        return report

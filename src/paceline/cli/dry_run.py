"""`paceline train --dry-run`: check everything and print the plan."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

from paceline.core.host import rank_cores
from paceline.core.run_dir import RunDir
from paceline.core.units import count, duration
from paceline.core.world import World
from paceline.data.files import printable
from paceline.data.loaders.choose import choose_loader
from paceline.data.loaders.sampler import build_sampler, count_samples
from paceline.data.sources.build import build_datasets
from paceline.data.staging.inventory import build_inventory
from paceline.parallel.device import choose_device
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.plan import Plan, resolve_batch, small_batch_warning, smallest_batch, worker_timeout_warning
from paceline.recipe.plugins import check_plugins
from paceline.training.logging.build import require_sinks
from paceline.training.precision import build_precision, check_trained_model
from paceline.training.preflight import try_components
from paceline.training.resume import check_rundir, keep_batch


def dry_run(
    loaded: LoadedRecipe,
    world: World,
    ranks: int,
    *,
    as_json: bool,
    resumed: RunDir | None = None,
    weights_note: str = "",
) -> int:
    """Print the plan of a run, and return the exit code; `weights_note`: why the preprocessing is not known yet."""
    if not world.is_main:
        return 0
    recipe = loaded.recipe
    changes: list[str] = []
    if resumed is not None and not loaded.is_from_command_line(
        "data.rank_batch_size"
    ):  # as the run itself: its batch stays
        recipe, changes = keep_batch(recipe, resumed, ranks)
    recipe = resolve_batch(recipe, ranks)
    if resumed is not None:
        changes = [*changes, *check_rundir(resumed, recipe, resume=True)]
    requested, recipe = recipe, smallest_batch(recipe, ranks)
    if recipe != requested:
        changes = [*changes, "the run measures data.batch_size or train.accumulate, and this plan has the smallest"]
    # The plan is that of the ranks that would be started.
    if world.launcher == "single":
        world = replace(world, world_size=ranks, local_world_size=ranks)
    check_plugins(recipe)
    require_sinks(recipe.log)
    device = choose_device(recipe.parallel, world)
    datasets = build_datasets(recipe.data.source, may_download=False, skip_bad=recipe.data.on_bad_image == "skip")
    if recipe.data.stage != "off":
        build_inventory(
            recipe.data.source, skip_bad=recipe.data.on_bad_image == "skip"
        )  # raises for data that cannot be staged
    train = datasets.train.info
    num_samples = count_samples(recipe.data, train.num_images)
    plan = Plan.derive(recipe, ranks, train, datasets.val.info, num_samples)
    build_sampler(recipe.data, datasets.train, plan.steps)  # raises for weights that cannot be read or used
    known = check_trained_model(recipe.model, recipe.train, plan, device)
    build_precision(recipe.train.precision, device)  # raises for a precision that the device does not support
    tried = try_components(recipe, plan, datasets.train)
    cores = rank_cores(world)
    choice = choose_loader(recipe.data, datasets.train, device=device.type, cores=cores, free_bytes=math.inf)
    timeout_note = worker_timeout_warning(recipe.data, recipe.parallel, choice.workers)
    small_batch_note = small_batch_warning(loaded.recipe.data, ranks, device.type)
    notes = filter(
        None,
        [
            small_batch_note,
            *known,
            choice.note,
            timeout_note,
            *tried,
            *changes,
        ],
    )
    known_notes = plan.notes
    if weights_note:  # in place of the plan's note on images, which has the recipe's own values
        known_notes = (*(each for each in plan.notes if not each.startswith("model.weights: ")), weights_note)
    plan = replace(plan, notes=(*known_notes, *notes))
    devices = _describe_devices(world, device.type, cores)
    if as_json:
        values = {"hash": requested.hash, "recipe": requested.to_dict(), "plan": plan.to_dict(), "devices": devices}
        print(json.dumps(values, indent=2))
        return 0
    for name, value in _plan_rows(replace(loaded, recipe=requested), plan, devices):
        print(f"{name}: {printable(value)}")
    return 0


def _plan_rows(loaded: LoadedRecipe, plan: Plan, devices: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of the plan by name."""
    yield "recipe", f"{loaded.name} {loaded.recipe.hash} (paceline recipes shows every field; --json has all of this)"
    yield "model", loaded.recipe.model.name
    val = f"{plan.val_images:,}" if plan.val_images else "no"
    split = f"{plan.train_images:,} training and {val} validation images"
    yield "data", f"{loaded.recipe.data.source.name}, {split}, {plan.num_classes} classes, {plan.image_size} px"
    at_once = f", {plan.micro_batch} at once" if plan.micro_batch != plan.rank_batch else ""
    yield "batch", f"{plan.batch_size} images per step, {plan.rank_batch} per rank{at_once}"
    epochs = count(round(plan.total_steps / plan.steps_per_epoch, 2), "epoch")
    dropped = (
        f"; the last {count(plan.dropped_images, 'image')} of each epoch are dropped" if plan.dropped_images else ""
    )
    yield "steps", f"{plan.total_steps:,} ({epochs} of {count(plan.steps_per_epoch, 'step')}{dropped})"
    yield "evaluation", _interval_text(plan.eval_every)
    seconds_between = f"every {duration(plan.checkpoint_every_s)} of training" if plan.checkpoint_every_s else ""
    yield "checkpoints", seconds_between or _interval_text(plan.checkpoint_every)
    yield "learning rate", plan.lr_sentence
    for note in plan.notes:
        yield "note", note
    yield "devices", devices


def _describe_devices(world: World, device_type: str, cores: int) -> str:
    """Return the number and kind of ranks, the cores of each, and the launcher unless it is paceline's own."""
    ranks = count(world.world_size, "GPU rank" if device_type == "cuda" else "CPU rank")
    each = " each" if world.world_size > 1 else ""
    launcher = f", started by {world.launcher}" if world.launcher in ("torchrun", "slurm") else ""
    return f"{ranks} with {count(cores, 'core')}{each}{launcher}"


def _interval_text(steps: int) -> str:
    return f"every {count(steps, 'step')}" if steps else "off"

"""`paceline.train` for scripts and notebooks: train in this process as one rank, or in processes of its own."""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from paceline.cli.ranks import enter_world, ranks_to_start
from paceline.cli.train import TrainRequest, choose_rundir, find_run_to_resume, run_rank
from paceline.core.errors import CheckpointError, PacelineError, RecipeError
from paceline.core.results import RunResult
from paceline.models.weights_recipe import with_run_defaults, with_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import LoadedRecipe, Patch, load_any
from paceline.recipe.plan import divide_batch, smallest_batch
from paceline.recipe.plugins import path_of
from paceline.recipe.schema import Recipe

Component = str | Callable[..., Any] | None
_ARGUMENT_NAMES: Final = {
    r"^--resume:": "resume:",
    r"write paceline train RUN --resume\b": "give the run in place of the recipe",
    r"(?<![\w/-])--resume\b": "resume=True",
    r"(?<![\w/-])--run-dir\b": "run_dir",
    r"(?<![\w/-])--ranks\b": "ranks",
}
"""Options of `paceline train` in messages, and the arguments to name instead."""


def train(
    recipe: str | Path | Recipe | Mapping[str, Any],
    overrides: tuple[str, ...],
    model: Component,
    source: Component,
    run_dir: str | Path | None,
    *,
    ranks: int | str | None = None,
    resume: bool,
    trust_code: bool = False,
) -> RunResult:
    """Train as one rank of the world that the environment describes; return the result, equal on every rank.

    With `ranks`, start that many processes instead.
    """
    from paceline.cli.tables import print_run_dir
    from paceline.core.interrupts import Interrupts

    started_s = time.perf_counter()
    with translate_option_names():
        folder = None if run_dir is None else Path(run_dir)
        patch = _build_patch(overrides, model, source)
        name, loaded = _load_recipe(recipe, patch, folder, resume=resume)
        require_consent(loaded, trust_code=trust_code)
        world = enter_world()
        if world.launcher == "local":
            raise RecipeError(
                "train: was called while a rank imports this script (put the call below if __name__ == '__main__':)"
            )
        num_ranks = 1 if ranks is None else ranks_to_start(str(ranks), world, loaded.recipe.parallel)
        is_launcher = num_ranks > 1 and world.launcher == "single"
        if is_launcher:
            divide_batch(smallest_batch(loaded.recipe, num_ranks), num_ranks)
        rundir = choose_rundir(name, loaded, folder, world, resume=resume)
        try:
            if is_launcher:
                from paceline.cli.python_ranks import train_on_ranks

                given = name if isinstance(recipe, str | Path) else recipe
                parts = patch.assignments[: len(patch.assignments) - len(overrides)]
                assignments = [*(f"{path}={value}" for path, value in parts), *overrides]
                return train_on_ranks(num_ranks, given, assignments, loaded, rundir, resume=resume)
            with Interrupts() as interrupts:
                request = TrainRequest(started_s, ("python", *sys.argv), sys.stdout, resume)
                result = run_rank(loaded, world, rundir, interrupts, request)
        finally:
            if folder is None:
                rundir.release()
    if result.status == "failed":
        from paceline.training.resume import describe_unsaved_weights

        raise CheckpointError(describe_unsaved_weights(rundir, result))
    if world.is_main:
        with contextlib.suppress(OSError, UnicodeError):  # the console may be full or gone
            print_run_dir(rundir)
    return result


@contextmanager
def translate_option_names() -> Iterator[None]:
    """Replace names of command-line options by names of arguments in errors."""
    try:
        yield
    except PacelineError as error:
        message = str(error)
        for option, argument in _ARGUMENT_NAMES.items():
            message = re.sub(option, argument, message)
        error.args = (message,)
        raise


def _build_patch(overrides: tuple[str, ...], model: Component, source: Component) -> Patch:
    parts = (("model.name", "model", model), ("data.source.name", "source", source))
    invalid = next((word for word in overrides if not isinstance(word, str)), None)
    if invalid is not None:
        raise RecipeError(f'overrides: {invalid!r} is not a string (write "KEY=VALUE", such as "optim.lr=0.4")')
    chosen = tuple((path, path_of(component, field)) for path, field, component in parts if component is not None)
    return Patch((*chosen, *Patch.parse(list(overrides)).assignments))


def _load_recipe(
    recipe: str | Path | Recipe | Mapping[str, Any], patch: Patch, run_dir: Path | None, *, resume: bool
) -> tuple[str, LoadedRecipe]:
    if isinstance(recipe, str | Path):
        name = find_run_to_resume(str(recipe), run_dir) if resume else str(recipe)
        loaded = load_any(name, patch)
    elif resume and run_dir is None:
        raise RecipeError("resume: needs the run to resume (give its run_dir)")
    else:
        name, loaded = "script", load_any(recipe, patch)
    if resume:
        loaded = with_run_defaults(loaded, (run_dir or Path(name)).expanduser())
    return name, with_weights_defaults(loaded)

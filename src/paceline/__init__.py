"""Train image classifiers in PyTorch, from one CPU core to a Slurm cluster, and see where every second goes."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.results import RunResult
    from paceline.recipe.schema import Recipe

    __version__: str
else:

    def __getattr__(name):
        if name == "__version__":
            from importlib import metadata  # not at the top: most imports need no version

            try:
                return metadata.version("paceline")
            except metadata.PackageNotFoundError:  # PYTHONPATH names a checkout that is not installed
                return "0+unknown"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(
    recipe: "str | Path | Recipe | Mapping[str, Any]" = "digits",
    *overrides: str,
    model: str | Callable[..., Any] | None = None,
    source: str | Callable[..., Any] | None = None,
    run_dir: str | Path | None = None,
    ranks: int | str | None = None,
    resume: bool = False,
    trust_code: bool = False,
) -> "RunResult":
    """Train a classifier, evaluate it, write a run directory, and return the result.

    `recipe` is a preset's name, a YAML file, a run directory, a mapping of plain values (which may contain `extends`),
    or a `paceline.recipe.schema.Recipe`. `overrides` are `"KEY=VALUE"` strings, as on the command line.

    `model` is a class or function, called as `model(num_classes=..., in_channels=..., **model.args)`. It returns a
    `torch.nn.Module` that maps normalized float images [N, C, H, W] to logits [N, num_classes]. `source` is called as
    `source(split="train", **data.source.args)`, and with "val". Both must be defined at the top level of a module, a
    script or a notebook, because the recipe names them by import path. See `docs/how-to/extend.md`.

    Set `trust_code` to import code that a recipe file or a run directory names; do so only if you trust its author.
    Code that the arguments name, in a mapping or a `Recipe` too, needs no consent.

    `run_dir` is the directory to write (default: `runs/RECIPE-TIME`), which the result repeats as `run_dir`. With
    `resume`, training continues from its newest checkpoint.

    `ranks` is the number of processes to start on this machine, as `paceline train --ranks` does, or `auto` for one per
    GPU. They import `model` and `source` themselves, so these must be in a module, or in a script that calls `train`
    below `if __name__ == "__main__":`. An interrupt stops them with a checkpoint. Without `ranks`, this process is one
    rank: a script that torchrun or srun starts several times trains in all of them, and each gets the same result.

    Raise `paceline.core.errors.PacelineError` for errors that a user can fix, and for what a started rank failed by.
    """
    # Not an import statement: modules all over the package import `__version__` from here, which would be a cycle.
    work: Callable[..., RunResult] = import_module("paceline.cli.python_api").train
    return work(recipe, overrides, model, source, run_dir, ranks=ranks, resume=resume, trust_code=trust_code)

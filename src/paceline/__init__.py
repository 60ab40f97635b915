"""Train image classifiers in synchronous data parallel, and account for every second it took."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.results import RunResult
    from paceline.recipe.schema import Recipe

    __version__: str
else:

    def __getattr__(name):
        # The version alone, when somebody asks: a checkout has to ask git, and an installed package its metadata.
        if name == "__version__":
            return import_module("paceline.core.version").version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(
    recipe: "str | Path | Recipe | Mapping[str, Any]" = "digits",
    *overrides: str,
    model: str | Callable[..., Any] | None = None,
    source: str | Callable[..., Any] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    own_code: bool = False,
) -> "RunResult":
    """Train a classifier, evaluate it, and leave a run directory; return its result.

    `recipe` is a preset's name, a YAML file, a run directory, a mapping of plain values (which may say `extends`), or a
    `paceline.recipe.schema.Recipe`; `overrides` are `"KEY=VALUE"` words over it, as on the command line.

    `model` is a class or function that is called as `model(num_classes=..., in_channels=..., **model.args)` and returns
    a `torch.nn.Module` from float images [N, C, H, W], normalised, to logits [N, num_classes]. `source` is one that is
    called as `source(split="train", **data.source.args)`, and with "val". Both must stand at the top of a module, a
    script or a notebook: the recipe names them by import path. See `docs/how-to/extend.md`.

    Code that a recipe file or a run directory names is imported only with `own_code`: set it where you trust whoever
    wrote the file. What the arguments name needs no such leave, a mapping or a `Recipe` included.

    `run_dir` is where the run is written, `runs/RECIPE-TIME` unless given; the result has it as `run_dir` too. With
    `resume` it goes on from its newest checkpoint. One process is one rank: a script that torchrun or srun starts
    several times trains in all of them, and each gets the same result. Raise `paceline.core.errors.PacelineError` for
    what a user can mend.
    """
    # Not an import statement, as all over the package `__version__` is read from here: that would be a circle.
    work: Callable[..., RunResult] = import_module("paceline.cli.script").train
    return work(recipe, overrides, model, source, run_dir, resume=resume, own_code=own_code)


class _Package(ModuleType):
    """The package `paceline.train`, which has the verb's name: called, it is the verb."""

    __signature__ = inspect.signature(train)

    def __call__(self, *args: Any, **options: Any) -> "RunResult":
        return _train(*args, **options)

    __call__.__doc__ = train.__doc__


# The first import of a module in the package `train` binds its name here, in place of the function: so both are one.
_train = train
import_module("paceline.train").__class__ = _Package

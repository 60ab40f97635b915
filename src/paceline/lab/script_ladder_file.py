"""Read ladders of training scripts: YAML files of arguments, variables and patches that are applied cumulatively."""

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from paceline.core.errors import RecipeError, suggest_similar
from paceline.lab.ladder_file import LADDERS, SUFFIXES, BaseRung, check_names_unique, read_ladder_file
from paceline.recipe.schema.base import Auto, Section

BASE: Final = "as given"
"""Name of the command as it is, below the first rung."""
SCRIPT_LADDERS: Final = LADDERS / "script"
Value = bool | int | float | str | None


def _check_option(name: str) -> str:
    if not name.strip("-") or "=" in name or any(each.isspace() for each in name):
        raise ValueError(f"{name!r} is not an option (write --NAME, or NAME for arguments such as NAME=VALUE)")
    return name


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"{name!r} is not the name of a variable (write NAME: VALUE)")
    return name


class ScriptPatch(Section):
    """Changes that are made inside the script's processes; unset ones leave the script as it is."""

    workers: NonNegativeInt | Auto | None = None
    """`num_workers` of each DataLoader; `auto`: the cores of the host over its ranks, from 2 to 8."""
    pin_memory: bool | None = None
    """`pin_memory` of each DataLoader."""
    persistent_workers: bool | None = None
    """`persistent_workers` of each DataLoader with workers."""
    prefetch_factor: PositiveInt | None = None
    """`prefetch_factor` of each DataLoader with workers."""
    native_jpegs: Literal[True] | None = None
    """`paceline.interop.patch_pillow()`: paceline's native core decodes resized crops of JPEGs."""
    channels_last: Literal[True] | None = None
    """The layout of weights with four dimensions."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """Run the model's forward under `torch.autocast`; its outputs are float32. With float16, gradients are scaled."""
    compile: Literal[True] | None = None
    """Compile the model, after the first step."""
    fused_optimizer: bool | None = None
    """`fused` of optimizers that have it."""
    foreach_optimizer: bool | None = None
    """`foreach` of optimizers that have it."""
    ddp_bucket_mb: PositiveFloat | None = None
    """`bucket_cap_mb` of DistributedDataParallel."""
    gradient_as_bucket_view: bool | None = None
    """`gradient_as_bucket_view` of DistributedDataParallel."""
    static_graph: bool | None = None
    """`static_graph` of DistributedDataParallel."""
    cudnn_benchmark: bool | None = None
    """`torch.backends.cudnn.benchmark`."""
    threads: PositiveInt | None = None
    """Compute threads per rank."""

    @property
    def values(self) -> dict[str, Any]:
        """The patches that are set."""
        return {name: value for name, value in self if value is not None}


class ScriptRung(BaseRung):
    """One rung of a ladder of a training script."""

    args: dict[Annotated[str, AfterValidator(_check_option)], Value] = Field(default_factory=dict)
    """Arguments by option: a value replaces that of the option, or is added; true adds a flag, false removes one, null
    removes an option and its value."""
    env: dict[Annotated[str, AfterValidator(_check_variable)], str | int | float | None] = Field(default_factory=dict)
    """Environment variables; null removes one."""
    patch: ScriptPatch = ScriptPatch()
    """Changes inside the script's processes."""

    @property
    def num_changes(self) -> int:
        """Number of arguments, variables and patches."""
        return len(self.args) + len(self.env) + len(self.patch.values)

    @model_validator(mode="after")
    def _check_changes(self) -> Self:
        if not self.num_changes:
            raise ValueError("changes nothing (set args, env or patch)")
        return self


class ScriptLadder(Section):
    """Content of a ladder file; the command as it is comes below the first rung."""

    steps: PositiveInt = 30
    """Measured steps per run."""
    warmup_steps: NonNegativeInt = 10
    """Warm-up steps before them."""
    repeats: PositiveInt = 3
    """Pairs of runs per rung."""
    rungs: tuple[ScriptRung, ...] = Field(min_length=1)
    """Rungs from the first up."""

    @model_validator(mode="after")
    def _check_names_unique(self) -> Self:
        check_names_unique(self.rungs)
        if any(rung.name == BASE for rung in self.rungs):
            raise ValueError(f"rungs: {BASE!r} is the name of the command without changes (rename the rung)")
        return self


def load_script_ladder(name: str) -> tuple[ScriptLadder, str]:
    """Load a shipped ladder of scripts, or a file; return its summary too.

    Raise `RecipeError` as `file:line: field: message`.
    """
    shipped = sorted(path.stem for path in SCRIPT_LADDERS.glob("*.yaml"))
    path = SCRIPT_LADDERS / f"{name}.yaml" if name in shipped else Path(name).expanduser()
    if path.suffix not in SUFFIXES:
        hint = suggest_similar(name, shipped)
        raise RecipeError(f"--script: {name} is not a ladder{hint} (use {', '.join(shipped)}, or a .yaml file)")
    if not path.is_file():
        raise RecipeError(f"--script: {path} does not exist (name a ladder file, or {', '.join(shipped)})")
    return read_ladder_file(path, ScriptLadder)


def format_value(value: Value) -> str:
    """Return a value as a word of a command line."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def describe_rung(rung: ScriptRung) -> tuple[str, ...]:
    """Return what a rung changes: arguments and variables as in a command, those that it removes as in its file."""
    args = [each for name, value in rung.args.items() for each in _describe_argument(name, value)]
    env = [f"{name}={'null' if value is None else value}" for name, value in rung.env.items()]
    return (*args, *env, *(f"{name}={format_value(value)}" for name, value in rung.patch.values.items()))


def _describe_argument(name: str, value: Value) -> tuple[str, ...]:
    if value is True and name.startswith("-"):
        return (name,)
    if value is None or isinstance(value, bool) or not name.startswith("-"):
        return (f"{name}={'null' if value is None else format_value(value)}",)
    return name, str(value)

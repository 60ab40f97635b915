"""Read and write ladders: YAML files of settings that are applied cumulatively."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.stages import STAGES
from paceline.lab.patches import flatten_patch
from paceline.recipe.consent import require_consent_to_settings
from paceline.recipe.errors import validate_document
from paceline.recipe.load import Patch
from paceline.recipe.schema.base import Section
from paceline.recipe.yaml import read_yaml_file, to_yaml_text

LADDERS: Final = Path(str(resources.files("paceline.lab") / "ladders"))
SUFFIXES: Final = (".yaml", ".yml")
FileT = TypeVar("FileT", bound=Section)
RungData = Literal["none", "source", "pack", "pack-256", "lmdb"]


def _check_stage(name: str) -> str:
    if name not in STAGES:
        raise ValueError(f"{name!r} is not a stage{suggest_similar(name, STAGES)} (use some of {', '.join(STAGES)})")
    return name


class BaseRung(Section):
    """One rung: what is changed on top of the last rung kept."""

    name: str = Field(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][ -~]*$")
    """Name in tables."""
    explains: str = ""
    """The change and why it may help, in a sentence."""
    on: Literal["any", "cuda", "cpu", "ranks"] = "any"
    """Hardware it needs: a GPU, no GPU, or several ranks; it is left out elsewhere."""
    keep: Literal["if-faster", "always"] = "if-faster"
    """Keep it if it is faster, or always."""
    parity: Literal["same", "free"] = "same"
    """`same` requires it to train like the rung below; `free` is for deliberate changes and is not checked."""


class Rung(BaseRung):
    """One rung of a ladder over a recipe."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Settings of a recipe by dotted path."""
    batch_factor: PositiveInt | None = None
    """Images per step over all ranks, as a multiple of the recipe's on one rank; unset: as below."""
    expects: tuple[Annotated[str, AfterValidator(_check_stage)], ...] = ()
    """Stages of a step that it should shrink."""
    ranks: PositiveInt | None = None
    """Number of ranks, also for the rungs above until another sets it; unset: as requested."""
    data: RungData = "none"
    """Data prepared from the recipe's source, for this rung and those above; `source` returns to the source itself."""
    cache: Literal["warm", "cold"] = "warm"
    """`warm` reads its files into the page cache before each run, `cold` evicts them."""

    @model_validator(mode="after")
    def _check_learning_rate(self) -> Self:
        # A ladder measures at a small constant learning rate, so its losses could not show the effect of another.
        paths = (path for path, _ in self.patch.assignments)
        path = next((path for path in paths if path == "optim.lr" or path.startswith("schedule.")), "")
        if path and self.parity == "same":
            raise ValueError(
                f"set: {path} trains differently from the rung below (leave it out, or add `parity: free`)"
            )
        return self

    @property
    def patch(self) -> Patch:
        """The settings as a patch."""
        return flatten_patch(Patch(tuple(self.set.items())))


def check_names_unique(rungs: Sequence[BaseRung]) -> None:
    """Raise `ValueError` if two rungs have one name."""
    names = [rung.name for rung in rungs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"rungs: two are called {twice!r} (rename one)")


class _LadderFile(Section):
    """Content of a ladder file; each rung has `repeats` pairs of runs."""

    recipe: str
    """Preset, recipe file or run directory that the rungs vary."""
    steps: PositiveInt = 50
    """Measured steps per run."""
    warmup_steps: NonNegativeInt | None = None
    """Warm-up steps before them; unset: the recipe's."""
    repeats: PositiveInt = 3
    """Pairs of runs per rung."""
    rungs: tuple[Rung, ...] = Field(min_length=1)
    """Rungs from the first up."""
    then: Literal["stop", "auto"] = "stop"
    """After the last rung: stop, or add rungs for the best one's bottleneck while that helps."""

    @model_validator(mode="after")
    def _check_names_unique(self) -> Self:
        check_names_unique(self.rungs)
        return self


class Ladder(_LadderFile):
    """A ladder file, with the name and summary of the ladder."""

    name: str
    summary: str = ""

    @property
    def is_open_ended(self) -> bool:
        """Whether rungs are added above the last one."""
        return self.then == "auto"


def require_consent_to_rungs(ladder: Ladder, source: str, *, trust_code: bool) -> None:
    """Raise `RecipeError` for plugin code that a rung names, unless `trust_code` allows it."""
    for rung in ladder.rungs:
        require_consent_to_settings(rung.patch.values(), f"{source}: rung {rung.name!r}", trust_code=trust_code)


def list_ladders() -> list[str]:
    """Return the names of the shipped ladders, sorted."""
    return sorted(path.stem for path in LADDERS.glob("*.yaml"))


def load_ladder(name: str) -> Ladder:
    """Load a shipped ladder, or a file. Raise `RecipeError` as `file:line: field: message`."""
    path = _find_ladder(name)
    read, summary = read_ladder_file(path, _LadderFile)
    return Ladder(**{**dict(read), "recipe": _resolve_recipe(read.recipe, path)}, name=path.stem, summary=summary)


def read_ladder_file(path: Path, model: type[FileT]) -> tuple[FileT, str]:
    """Return the content of a file, and its summary. Raise `RecipeError` as `file:line: field: message`."""
    return validate_document(read_yaml_file(path), path, model), _read_summary(path)


def dump_ladder(ladder: Ladder) -> str:
    """Return a ladder as YAML, from which `load_ladder` reads an equal one."""
    summary = f"# {ladder.summary}\n" if ladder.summary else ""
    return summary + to_yaml_text(ladder.model_dump(mode="json", exclude={"name", "summary"}))


def _find_ladder(name: str) -> Path:
    if name in list_ladders():
        return LADDERS / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix not in SUFFIXES:
        known = ", ".join(list_ladders())
        hint = suggest_similar(name, list_ladders()) or " (the ladder comes before the recipe)"
        raise RecipeError(f"{name!r}: is not a ladder{hint}: use one of {known}, or a .yaml file")
    if not path.is_file():
        raise RecipeError(f"{path}: no such ladder file (see `paceline ladder --list`)")
    return path


def _read_summary(path: Path) -> str:
    # The first line of a ladder is its summary in `--list`, as a comment.
    with path.open(encoding="utf-8") as file:
        first = file.readline().strip()
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _resolve_recipe(name: str, path: Path) -> str:
    beside = path.parent / Path(name).expanduser()
    return str(beside) if beside.suffix in SUFFIXES else name

"""What a run writes down, how often, and whom it tells beside its own files."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, field_validator

from paceline.recipe.schema.named import NAMED, OR_ITS_NAME
from paceline.recipe.schema.own import ByName, PluginSection
from paceline.recipe.schema.section import CadenceDuration, Section, Switch

_REFUSED: Final = "/\\#?%:"
"""What the name of a project of W&B's may not have (https://docs.wandb.ai/ref/python/init), so that one fits all."""


def _checked_title(title: str) -> str:
    if not title.isprintable() or not 0 < len(title) <= 128 or set(title) & set(_REFUSED):
        raise ValueError(f"{title!r} is no name: 1 to 128 characters but {' '.join(_REFUSED)} (write another)")
    return title


Title = Annotated[str, AfterValidator(_checked_title)]


class Wandb(Section):
    """Tell Weights & Biases."""

    name: Literal["wandb"] = "wandb"
    project: Title = "paceline"
    """What the run is filed under."""
    entity: Title = "auto"
    """Whose project it is: a user's or a team's; `auto`: the user's own."""
    mode: Literal["auto", "offline", "online"] = "auto"
    """`auto`: what WANDB_MODE says; else online for who is logged in (WANDB_API_KEY or `wandb login`), offline for
    anyone else. Offline, nothing leaves the run directory before `wandb sync` is told to."""


class Mlflow(Section):
    """Tell MLflow: the server or store in MLFLOW_TRACKING_URI, or files in the run directory."""

    name: Literal["mlflow"] = "mlflow"
    experiment: Title = "paceline"
    """What the run is filed under."""


class Trackio(Section):
    """Tell trackio, which keeps a database for each project on this machine."""

    name: Literal["trackio"] = "trackio"
    project: Title = "paceline"
    """What the run is filed under."""


class OwnSink(PluginSection):
    """A sink of your own: `NAME(run_dir=..., **args)` makes what is told
    ([the contract](../how-to/extend.md#a-sink-of-your-own))."""


SinkSection = Annotated[
    Annotated[Wandb | Mlflow | Trackio | OwnSink, ByName()],
    NAMED,
    OR_ITS_NAME,
]


class Log(Section):
    """What is written down, and how often."""

    every: CadenceDuration = "10st"
    """Steps between records of loss and throughput."""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """Write TensorBoard events; `auto` does when it is installed."""
    sinks: tuple[SinkSection, ...] = ()
    """Trackers of experiments that are told of the run too, beside its own files."""
    samples: bool = False
    """Each rank writes the samples of every step, with a checksum of their pixels as the loader hands them over: with
    all augmentation where that is done on the host."""
    worst: int = Field(16, ge=0, le=100)
    """Misclassified validation images that are kept as thumbnails, those of the highest loss; 0: none."""
    report: Switch = "on"
    """Write `report.html` at the end."""

    @field_validator("sinks")
    @classmethod
    def _are_different(cls, sinks: tuple[SinkSection, ...]) -> tuple[SinkSection, ...]:
        for position, section in enumerate(sinks):
            if any(each.name == section.name for each in sinks[:position]):
                raise ValueError(f"{section.name} is named twice (name it once)")
        return sinks

"""What a ladder came to: settings laid one over the other, and what each of them bought."""

from typing import Any, Literal

from pydantic import Field

from paceline.core.interval import Interval
from paceline.core.value import MeasuredFloat, ResultModel


class ParityResult(ResultModel):
    """Whether a rung trains as the rung below does, on the same samples in the same order.

    `loss` and `loss_below` are means over the counted steps, `gap` the relative difference (loss / loss below - 1) over
    pairs of runs. `verdict` is `same` where all of the gap's interval lies within `tolerance` of none, `differs` where
    none of it does, and `open` where the runs do not tell; `why` says it in a sentence.
    """

    loss: MeasuredFloat
    loss_below: MeasuredFloat
    gap: Interval
    tolerance: MeasuredFloat
    verdict: Literal["same", "differs", "open"]
    why: str


class RungResult(ResultModel):
    """A rung: what it changes, and what that bought.

    `patch` are the KEY=VALUE words that it lays over the rung below it, which is the last one that was kept. `expects`
    are the stages that it was to shrink; `shrank` says of each by how much, in device seconds of a step (below, here).
    `over_below` and `over_first` are ratios of images/s, the latter the product of those in between; None for the
    first rung and where nothing was measured. `stages` are device seconds of a step, which may overlap.
    `epoch_s` are the seconds of an epoch of the training set at this speed, without evaluations, and `steps_s` those of
    the steps that counted, as many as the ladder says: None in results that were written before they were there.
    `startup_s` is from the start of the process to the first step, `compile_s` of it compiling, `prepare_s` what was
    spent once on data. Memory is rank 0's, in bytes. `runs` are folders below the experiment's, `ranks` on how many
    each ran. `status` is `failed` where it could not be run (`why` says it), and `left_out` where it does not fit this
    machine or recipe. `starved` says in how many of the runs other processes held the cores, "" where in none: it is no
    gain then, whatever was measured.
    """

    name: str
    explains: str
    patch: tuple[str, ...]
    status: Literal["kept", "dropped", "failed", "left_out"]
    why: str
    below: str = ""
    expects: tuple[str, ...] = ()
    shrank: dict[str, tuple[MeasuredFloat, MeasuredFloat]] = Field(default_factory=dict)
    images_per_s: Interval | None = None
    spread: tuple[MeasuredFloat, MeasuredFloat] | None = None
    over_below: Interval | None = None
    over_first: Interval | None = None
    stages: dict[str, MeasuredFloat] = Field(default_factory=dict)
    step_s: MeasuredFloat | None = None
    epoch_s: MeasuredFloat | None = None
    steps_s: MeasuredFloat | None = None
    startup_s: MeasuredFloat | None = None
    compile_s: MeasuredFloat | None = None
    prepare_s: MeasuredFloat = 0.0
    host_bytes: int | None = None
    device_bytes: int | None = None
    parity: ParityResult | None = None
    verdict: dict[str, str] = Field(default_factory=dict)
    starved: str = ""
    runs: tuple[str, ...] = ()
    ranks: int | None = None


class LadderResult(ResultModel):
    """A ladder that was climbed: its rungs from the first up, and what they were measured on.

    `best` is the name of the last rung that was kept and `best_patch` all that it lays over the recipe; `stopped` says
    why the ladder `auto` looked no further, "" for others.
    """

    kind: Literal["ladder"] = "ladder"
    schema_version: int = 1
    ladder: str
    summary: str
    recipe: str
    recipe_hash: str
    ranks: int
    steps: int
    warmup_steps: int
    repeats: int
    batch_size: int
    rungs: tuple[RungResult, ...]
    best: str
    best_patch: tuple[str, ...]
    stopped: str = ""
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]

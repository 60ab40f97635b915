"""Print a ladder: a table and bars of images/s for people, `experiment.json` for programs."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence

from paceline.cli.show import bottleneck_line, print_rows
from paceline.cli.tables import print_table
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.experiments.ladder import LadderResult, RungResult
from paceline.core.stages import display_name
from paceline.core.units import count, milliseconds, seconds, size
from paceline.data.sources.places import printable
from paceline.lab.rungs import Ladder, Rung
from paceline.lab.times import format_speedup
from paceline.report.experiments.take import build_next_commands

_BAR_WIDTH = 40
"""Length of the longest bar, in characters."""
_MIN_STAGE_SHARE = 0.01
"""Share of a step from which a stage gets a column."""


def show_ladder(result: LadderResult, folder: ExperimentDir, *, as_json: bool) -> None:
    """Print the result of a ladder."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    title = f"ladder {result.ladder}: {result.recipe}, {count(result.ranks, 'rank')}, batch {result.batch_size:,}"
    has_ranks = any(rung.ranks not in (None, result.ranks) for rung in result.rungs)
    headings = ("rung", *(["ranks"] if has_ranks else []), "images/s", "over the rung below", "over first", "")
    print_table(title, headings, (_rung_row(rung, has_ranks=has_ranks) for rung in result.rungs), text_columns=("",))
    measured = [rung for rung in result.rungs if rung.images_per_s is not None]
    _print_steps(measured)
    _print_times(result, measured)
    print("\n".join(["images/s", *_bar_lines(measured)]))
    print_rows([*_reason_rows(result.rungs), *_summary_rows(result, folder)], "summary")
    for why, command in build_next_commands(folder.path, result):
        print(f"{why}\n  {printable(shlex.join(command))}")


def show_ladders(ladders: Sequence[Ladder], *, as_json: bool) -> None:
    """Print the name and summary of each ladder."""
    if as_json:
        print(json.dumps({ladder.name: ladder.summary for ladder in ladders}, indent=2))
        return
    width = max(len(ladder.name) for ladder in ladders)
    for ladder in ladders:
        print(f"{ladder.name:{width}}  {ladder.summary}")


def show_rungs(ladder: Ladder, *, as_json: bool) -> None:
    """Print the rungs of a ladder."""
    if as_json:
        rungs = [rung.model_dump(mode="json") for rung in ladder.rungs]
        facts = {"ladder": ladder.name, "summary": ladder.summary, "recipe": ladder.recipe}
        print(json.dumps({**facts, "steps": ladder.steps, "repeats": ladder.repeats, "rungs": rungs}, indent=2))
        return
    rows = [(rung.name, " ".join(_rung_settings(rung)), rung.explains) for rung in ladder.rungs]
    print_rows(rows, f"{ladder.name}, over {ladder.recipe}: {ladder.summary}")


def _rung_settings(rung: Rung) -> Iterator[str]:
    yield from (f"{key}={value}" for key, value in rung.set.items())
    if rung.batch_factor is not None:
        yield f"batch x{rung.batch_factor}"


def _rung_row(rung: RungResult, *, has_ranks: bool) -> tuple[str, ...]:
    speed = "" if rung.images_per_s is None else f"{rung.images_per_s.value:,.0f}"
    first = "" if rung.over_first is None else f"{rung.over_first.value:.2f}x"
    ranks = [str(rung.ranks or "")] if has_ranks else []
    below = "" if rung.over_below is None else format_speedup(rung.over_below)
    return (
        rung.name,
        *ranks,
        speed,
        below,
        first,
        rung.status.replace("_", " ") + (", CPU-starved" if rung.starved else ""),
    )


def _print_steps(rungs: Sequence[RungResult]) -> None:
    """Print the stages of a step per rung, without stages that never matter."""
    names = dict.fromkeys(name for rung in rungs for name in rung.stages)
    shown = [
        name
        for name in names
        if any(rung.stages.get(name, 0.0) > _MIN_STAGE_SHARE * (rung.step_s or 0) for rung in rungs)
    ]
    rows = [
        (rung.name, _milliseconds(rung.step_s or 0.0), *(_milliseconds(rung.stages.get(name, 0.0)) for name in shown))
        for rung in rungs
    ]
    # One word per line: the names of the stages would leave no room for those of the rungs.
    headings = (display_name(name).replace(" ", "\n") for name in shown)
    print_table("time per step, in device ms", ("rung", "step", *headings), rows)


def _milliseconds(value_s: float) -> str:
    return f"{1000 * value_s:,.2f}"


def _print_times(result: LadderResult, rungs: Sequence[RungResult]) -> None:
    """Print times of an epoch, of the counted steps and before the first step, and memory."""
    columns = {
        "an epoch": [_format_or_blank(rung.epoch_s, seconds) for rung in rungs],
        count(result.steps, "step"): [_format_or_blank(rung.steps_s, seconds) for rung in rungs],
        "start-up": [_format_or_blank(rung.startup_s, seconds) for rung in rungs],
        "compiling": [_format_or_blank(rung.compile_s or None, seconds) for rung in rungs],
        "memory": [_format_or_blank(rung.host_bytes, size) for rung in rungs],
        "of the GPU": [_format_or_blank(rung.device_bytes, size) for rung in rungs],
    }
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    print_table("time and memory", ("rung", *shown), zip((rung.name for rung in rungs), *shown.values(), strict=True))


def _format_or_blank(value: float | None, format_value: Callable[[float], str]) -> str:
    return "" if value is None else format_value(value)


def _bar_lines(rungs: Sequence[RungResult]) -> Iterator[str]:
    """Yield one line per rung: a bar as long as its speed, lighter if the rung was dropped."""
    most = max((rung.images_per_s.value for rung in rungs if rung.images_per_s is not None), default=1.0)
    width = max((len(rung.name) for rung in rungs), default=0)
    for rung in rungs:
        assert rung.images_per_s is not None
        speed = rung.images_per_s.value
        mark = "█" if rung.status == "kept" else "░"
        dropped = "" if rung.status == "kept" else f" ({rung.status.replace('_', ' ')})"
        yield f"  {rung.name:{width}} {mark * max(1, round(_BAR_WIDTH * speed / most))} {speed:,.0f}{dropped}"


def _reason_rows(rungs: Sequence[RungResult]) -> Iterator[tuple[str, str]]:
    for rung in rungs:
        made = f"; preparing its data took {seconds(rung.prepare_s)}" if rung.prepare_s else ""
        trains = f"; {rung.parity.why}" if rung.parity is not None and rung.parity.why not in rung.why else ""
        shrank = "".join(f"; {_stage_change(name, *ms)}" for name, ms in rung.shrank.items())
        yield rung.name, f"{rung.status.replace('_', ' ')}: {rung.why}{shrank}{trains}{made}"


def _stage_change(stage: str, below_s: float, current_s: float) -> str:
    """Return how the time of a stage that the rung targets changed."""
    word = "from" if current_s < below_s else "did not shrink, from"
    return f"{display_name(stage)} {word} {milliseconds(below_s)} to {milliseconds(current_s)}"


def _summary_rows(result: LadderResult, folder: ExperimentDir) -> Iterator[tuple[str, str]]:
    best = next(rung for rung in result.rungs if rung.name == result.best)
    yield "best", best.name
    if best.verdict:
        yield "bottleneck", bottleneck_line(best.verdict)
    if result.stopped:
        yield "stopped", result.stopped
    runs = f"{count(result.repeats, 'pair')} of runs per rung, of {count(result.steps, 'step')}"
    yield (
        "measured",
        f"{runs} after {count(result.warmup_steps, 'step')} of measurement warm-up, in {seconds(result.wall_s)}",
    )
    yield "report", f"{printable(folder.report)}"

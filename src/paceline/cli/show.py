"""Show a result: a table for a person, JSON for a program."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.progress import duration
from paceline.core.results import EvalResult, RunResult
from paceline.core.rundir import RunDir
from paceline.core.units import count


def show_result(result: RunResult, rundir: RunDir, *, as_json: bool) -> None:
    """Print what a run amounts to, and where it is."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    _print(_rows(result), f"{result.status.replace('_', ' ')}: recipe {result.recipe_hash}")
    if result.throughput.n and result.stages:
        _print_stages(result)
    print(f"run directory: {rundir.path}")


def show_evaluation(result: EvalResult, checkpoint: Path, *, as_json: bool) -> None:
    """Print an evaluation of `checkpoint`."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    _print(_judged(result), f"{checkpoint.parent.parent.name}, {checkpoint.name}")


def _rows(result: RunResult) -> list[tuple[str, str]]:
    rates, times = result.throughput, result.time
    rows = _judged(result.eval) if result.eval else []
    if rates.n:
        low, high = rates.spread
        speed = f"{rates.images_per_s:,.0f} images/s ({low:,.0f} to {high:,.0f}; {count(rates.n, 'window')})"
        rows.append(("throughput", f"{speed}, without {rates.excluded_s:.1f} s of warm-up and pauses"))
    parts = f"start {times.startup_s:.1f} s, train {times.train_s:.1f} s, eval {times.eval_s:.1f} s"
    rows.append(("time", f"{duration(times.wall_s)} ({parts}, checkpoints {times.checkpoint_s:.1f} s)"))
    if times.to_target_s is not None:
        rows.append(("to target", duration(times.to_target_s)))
    trained = (
        f"{count(result.steps, 'step')}, {count(result.images_seen, 'image')}, "
        f"{count(round(result.epochs, 2), 'epoch')}, {count(result.world_size, 'rank')}"
    )
    rows += [("trained", trained), ("learning rate", result.lr)]
    advice = f" Try {result.verdict['try']}." if result.verdict["try"] else ""
    rows.append(("verdict", f"{result.verdict['bottleneck']}. {result.verdict['evidence']}{advice}"))
    rows.append(("weights", f"sha256 {result.weights_sha256[:16]}"))
    return rows


def _judged(result: EvalResult) -> list[tuple[str, str]]:
    accuracy = f"{result.top1:.2%}, top-5 {result.top5:.2%}, loss {result.loss:.4f}"
    return [("top-1", f"{accuracy} ({result.images:,} images)")]


def _print(rows: list[tuple[str, str]], title: str) -> None:
    table = _table(title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def _print_stages(result: RunResult) -> None:
    """Print the stages; the device's own seconds only where they are not the host's."""
    has_device = any(stage.device_s != stage.host_s for stage in result.stages.values())
    table = _table("where the time of a step went")
    table.add_column("stage", style="bold")
    for heading in ("host s", *(("device s",) if has_device else ()), "share"):
        table.add_column(heading, justify="right")
    for name, stage in sorted(result.stages.items(), key=lambda item: -item[1].host_s):
        device = (f"{stage.device_s:.2f}",) if has_device else ()
        table.add_row(name, f"{stage.host_s:.2f}", *device, f"{stage.share:.1%}")
    _console().print(table)


def _table(title: str, *, show_header: bool = True) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED, show_header=show_header)


def _console() -> Console:
    return Console(highlight=False, markup=False)

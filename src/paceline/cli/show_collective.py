"""Show what all-reduces take: a table for a person, the file's JSON for a program."""

from pathlib import Path

from paceline.cli.tables import print_table
from paceline.core.units import count, number, seconds, size
from paceline.lab.predict.measured import Measured, TimedReduce
from paceline.lab.predict.networks import GIGA


def show_collective(found: Measured, out: Path | None, *, as_json: bool) -> None:
    """Print what was measured, and where it was written."""
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    where = f"{count(found.ranks, 'rank')} of {count(found.nodes, 'node')}, {found.backend}"
    headings = ("all-reduce", "median", "p10 to p90", "bus bandwidth", "n")
    print_table(f"all-reduces between {where}", headings, [_row(each, found.ranks) for each in found.times])
    low, typical, high = (number(each / GIGA) for each in (found.low, found.bytes_per_s, found.high))
    print(f"a ring explains them with {seconds(found.alpha_s)} a hop and {typical} GB/s ({low} to {high})")
    if out is not None:
        print(f"written: {out} (predict with it: paceline scale RUN --predict --network {out})")


def _row(each: TimedReduce, ranks: int) -> tuple[str, ...]:
    bandwidth = 2 * (ranks - 1) / ranks * each.bytes / each.median_s / GIGA
    spread = f"{seconds(each.p10_s)} to {seconds(each.p90_s)}"
    return size(each.bytes), seconds(each.median_s), spread, f"{number(bandwidth)} GB/s", str(each.n)

"""Print all-reduce times: a table for people, the file's JSON for programs."""

from pathlib import Path

from paceline.cli.tables import print_table
from paceline.core.units import count, number, seconds, size
from paceline.lab.predict.measured import AllReduceMeasurement, AllReduceTiming
from paceline.lab.predict.networks import GIGA


def show_allreduce(result: AllReduceMeasurement, out: Path | None, *, as_json: bool) -> None:
    """Print the measurement, and the file it was written to."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    where = f"{count(result.ranks, 'rank')} of {count(result.nodes, 'node')}, {result.backend}"
    headings = ("all-reduce", "median", "p10 to p90", "bus bandwidth", "n")
    print_table(f"all-reduces between {where}", headings, [_allreduce_row(each, result.ranks) for each in result.times])
    low, typical, high = (number(each / GIGA) for each in (result.low, result.bytes_per_s, result.high))
    print(f"fit of a ring: {seconds(result.alpha_s)} per hop and {typical} GB/s ({low} to {high})")
    if out is not None:
        print(f"written: {out} (to predict with it: paceline scale RUN --predict --network {out})")


def _allreduce_row(each: AllReduceTiming, ranks: int) -> tuple[str, ...]:
    bandwidth = 2 * (ranks - 1) / ranks * each.bytes / each.median_s / GIGA
    spread = f"{seconds(each.p10_s)} to {seconds(each.p90_s)}"
    return size(each.bytes), seconds(each.median_s), spread, f"{number(bandwidth)} GB/s", str(each.n)

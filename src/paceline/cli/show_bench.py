"""Print loader speeds: tables for files in memory and on disk for people, JSON for programs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.units import number, share, size
from paceline.lab.contest import LoaderBenchPlan
from paceline.lab.floors import DECODE_CEILING
from paceline.lab.loaders import BenchRow
from paceline.measure.verdict import LOST_CPU_SHARE

_MIN_ROUNDS = 3
"""Minimum rounds for a meaningful spread."""
_MAX_DECODER_RATIO = 1.1
"""Limit of a loader's speed over that of the decoder it contains; medians of three differ by up to a tenth."""
_HEADINGS = ("loader, data", "images/s", "spread", "per core", "CPU ms")


@dataclass(frozen=True)
class BenchResult:
    """Result of a benchmark: `rows` of all contenders, `notes`, and provenance."""

    title: str
    contest: LoaderBenchPlan
    rows: Sequence[BenchRow]
    notes: Sequence[str]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        window = self.contest.window
        return {
            "source": self.title,
            "images": window.num_images,
            "image_size": window.image_size,
            "batch_size": window.batch_size,
            "seconds": window.seconds,
            "rows": [row.to_dict() for row in self.rows],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.contest.left_out],
            "notes": list(self.notes),
            "provenance": self.provenance,
        }


def show_bench(result: BenchResult, *, as_json: bool) -> None:
    """Print the result of a benchmark."""
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    window = result.contest.window
    warm = [row for row in result.rows if row.cache == "warm"]
    cold = [row for row in result.rows if row.cache == "cold"]
    runs_text = f"medians of {warm[0].n:,}" if warm and warm[0].n > 1 else "measured once"
    print(
        f"{window.num_images:,} images of {result.title} to {window.image_size} px, in batches of {window.batch_size}"
    )
    print_table(f"files in memory, {runs_text}", (*_HEADINGS, "memory"), map(_warm_row, warm))
    if cold:
        print_table("from the disk, from the start of a pass", (*_HEADINGS, "from disk"), map(_cold_row, cold))
    rows = [*_conclusions(result.contest, warm), *(("note", note) for note in result.notes), *result.contest.left_out]
    if rows:
        print_rows(rows, "summary")


def _warm_row(row: BenchRow) -> tuple[str, ...]:
    return *_common_cells(row), size(row.memory_bytes) if row.kind == "loader" else ""


def _cold_row(row: BenchRow) -> tuple[str, ...]:
    """Return a row that ends with the bytes read from storage per image."""
    return *_common_cells(row), size(row.disk_bytes)


def _common_cells(row: BenchRow) -> tuple[str, ...]:
    low, high = row.spread
    spread = f"{100 * (high - low) / row.images_per_s:.0f} %" if row.n > 1 else ""
    cpu_ms = f"{row.cpu_ms:.2f}" if row.cpu_ms < 10 else f"{row.cpu_ms:.1f}"
    return row.name, _rate_text(row.images_per_s), spread, _rate_text(row.images_per_s_per_core), cpu_ms


def _rate_text(value: float) -> str:
    """Return a rate in full, in millions from a million on."""
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.1f} M"


def _conclusions(contest: LoaderBenchPlan, rows: Sequence[BenchRow]) -> Iterator[tuple[str, str]]:
    lost = max((row.lost_cpu for row in rows), default=0.0)
    if lost >= LOST_CPU_SHARE:
        lost_text = f"other processes used the cores for up to {share(lost)} of the time that loaders could have run"
        yield "CPU-starved", f"{lost_text}: loaders cannot be compared (run it again on an idle machine)"
        return
    loaders = sorted((row for row in rows if row.kind == "loader"), key=lambda row: row.images_per_s)
    ceilings = {row.name: row for row in rows if row.kind == "floor"}
    if len(loaders) < 2:
        return
    best, second, worst = loaders[-1], loaders[-2], loaders[0]
    decoder = ceilings.get(DECODE_CEILING)
    if decoder is not None and any(
        row.name.startswith("native") and row.images_per_s > _MAX_DECODER_RATIO * decoder.images_per_s
        for row in loaders
    ):
        yield "noise", "a loader is faster than decoding alone, so these rates are noise (increase --rounds)"
        return
    if best.n < _MIN_ROUNDS or best.spread[0] <= second.spread[1]:
        why = "their rates overlap" if best.n >= _MIN_ROUNDS else f"measured in fewer than {_MIN_ROUNDS} rounds"
        yield "fastest", f"not decided: {best.name} or {second.name}, {why} (increase --rounds)"
    else:
        ratio = best.images_per_s / max(worst.images_per_s, 1e-9)
        yield "fastest", f"{best.name}: {number(round(ratio, 1), 2)} times {worst.name}"
    if decoder is not None and best.name.startswith("native"):
        yield "of its ceiling", f"{share(best.images_per_s / decoder.images_per_s)} of the rate of decoding alone"
    if best.name.endswith(", pack") and len(contest.sources) > 1:
        yield "to use it", "paceline data pack SRC OUT.pack, and train with data.source={name: pack, root: OUT.pack}"

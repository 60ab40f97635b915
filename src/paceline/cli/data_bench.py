"""`paceline data bench`: measure every loader on a dataset, and the limits of the machine."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from paceline.cli.data_source import count_workers, read_source
from paceline.cli.options import DataBenchOptions
from paceline.cli.progress_output import DataProgress
from paceline.cli.tables import print_rows, print_table
from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.core.errors import DataError
from paceline.core.run_dir import write_atomic
from paceline.core.units import number, per_second, share, size
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.files import expand_path, printable
from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.statistics import with_measured
from paceline.lab.dataset_stats import estimate_source_bytes
from paceline.lab.loader_bench import (
    DECODE_CEILING,
    BenchCase,
    BenchRow,
    CacheState,
    LoaderBenchPlan,
    LoaderCase,
    build_bench_plan,
    run_bench,
    sample_datasets,
)
from paceline.lab.page_cache import evict_files, read_into_cache
from paceline.measure.bottleneck import LOST_CPU_SHARE
from paceline.measure.machine import describe_machine

_MIN_ROUNDS = 3
"""Minimum rounds for a meaningful spread."""
_MAX_DECODER_RATIO = 1.1
"""Limit of a loader's speed over that of the decoder it contains; medians of three differ by up to a tenth."""
_HEADINGS = ("loader, data", "images/s", "spread", "per core", "CPU ms")


@dataclass(frozen=True)
class BenchResult:
    """Rows of all cases, notes and provenance."""

    title: str
    plan: LoaderBenchPlan
    rows: Sequence[BenchRow]
    notes: Sequence[str]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        window = self.plan.window
        return {
            "source": self.title,
            "images": window.num_images,
            "image_size": window.image_size,
            "batch_size": window.batch_size,
            "seconds": window.seconds,
            "rows": [row.to_dict() for row in self.rows],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.plan.left_out],
            "notes": list(self.notes),
            "provenance": self.provenance,
        }


def bench_data(options: DataBenchOptions) -> int:
    """Run `paceline data bench`, and return the exit code."""
    num_workers = count_workers(options.workers)
    data_request = read_source(options.src, options.overrides, trust_code=options.trust_code, for_model=True)
    folder = _make_out_folder(options.out) if options.out else None
    skip_bad = data_request.data.on_bad_image == "skip"
    datasets = build_datasets(data_request.source, may_download=False, skip_bad=skip_bad)
    datasets = with_measured(datasets, skip_bad=skip_bad)
    notes = [] if load_native() or isinstance(datasets.train, ArraySource) else [NATIVE_MISSING_MESSAGE]
    with contextlib.ExitStack() as resources:
        sources = {
            _source_kind(datasets.train, data_request.source.name): _select_images(datasets, options.images).train
        }
        if options.packs and not isinstance(datasets.train, ArraySource | PackSource):
            packed, note = resources.enter_context(
                _temporary_pack(_select_images(datasets, options.images), num_workers)
            )
            sources |= {"pack": packed} if packed else {}
            notes += [note]
        plan = build_bench_plan(
            data_request.data,
            sources,
            num_images=options.images,
            seconds=options.seconds,
            workers=num_workers,
            is_recipe=data_request.is_recipe,
        )
        rows = _measure_all(plan, options)
    notes += _cold_cache_notes(plan, rows)
    result = BenchResult(data_request.name, plan, rows, notes, {"machine": describe_machine(), "workers": num_workers})
    show_bench(result, as_json=options.as_json)
    if folder:
        _write_result(result, folder / "bench.json")
    return 0


def _make_out_folder(out: Path) -> Path:
    folder = expand_path(str(out))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out: {printable(folder)}: {error.strerror} (name a folder that can be written)") from None
    return folder


def _write_result(result: BenchResult, path: Path) -> None:
    try:
        write_atomic(path, json.dumps(result.to_dict(), indent=2) + "\n")
    except OSError as error:
        message = (
            f"--out: {printable(path)}: cannot be written: {error.strerror} (free some room, or name another folder)"
        )
        raise DataError(message) from None


def _source_kind(source: Source, name: str) -> str:
    return "pixels" if isinstance(source, ArraySource) else name


def _select_images(datasets: Datasets, num_images: int) -> Datasets:
    """Return the images to measure."""
    # The native loader reads whole packs only.
    return datasets if isinstance(datasets.train, PackSource) else sample_datasets(datasets, num_images)


@contextlib.contextmanager
def _temporary_pack(datasets: Datasets, workers: int) -> Iterator[tuple[Source | None, str]]:
    """Yield a temporary pack, None if it does not fit on disk, and a note about it."""
    read_bytes = estimate_source_bytes(datasets.train)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        room = shutil.disk_usage(folder).free
        if read_bytes is not None and read_bytes * 2 > room:
            yield (
                None,
                f"no pack was measured: {size(read_bytes)} do not fit into {folder}, which has {size(room)} free",
            )
            return
        path = Path(folder) / "bench.pack"
        with DataProgress("images") as progress:
            made = write_pack(datasets, path, PackOptions(skip_bad=True), progress, workers)
        speed = f"{per_second(made.images / max(progress.elapsed_s, 1e-9))} images/s"
        note = f"a pack of the images was written at {speed}: {size(made.bytes)}"
        yield open_pack(path).train, note + (f", {size(read_bytes)} before" if read_bytes else "")


def _measure_all(plan: LoaderBenchPlan, options: DataBenchOptions) -> list[BenchRow]:
    """Measure all cases; a terminal shows the current one."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    warm_kinds: set[str] = set()

    def prepare(case: BenchCase, cache: CacheState) -> None:
        if not isinstance(case, LoaderCase):
            return
        if cache == "cold":
            evict_files(plan.files[case.source_kind])
            warm_kinds.discard(case.source_kind)
        elif case.source_kind not in warm_kinds:
            read_into_cache(case.source, plan.window.num_images)
            warm_kinds.add(case.source_kind)

    # auto_refresh=False: a refresh thread would be alive when a case forks.
    bar = Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False, transient=True)

    def show_turn(done: int, total: int, name: str) -> None:
        bar.update(task, description=f"{name} ({done + 1} of {total})", refresh=True)

    with bar if console.is_terminal else contextlib.nullcontext():
        task = bar.add_task("")
        return run_bench(
            plan.list_entries(cold=options.cold), options.rounds, plan.window, prepare=prepare, progress=show_turn
        )


def _cold_cache_notes(plan: LoaderBenchPlan, rows: list[BenchRow]) -> list[str]:
    cold = [row for row in rows if row.cache == "cold"]
    if any(row.disk_bytes < row.bytes_read / 2 for row in cold):
        return ["little was read from the disk: the page cache or memory held the files; cold results are not cold"]
    return []


def show_bench(result: BenchResult, *, as_json: bool) -> None:
    """Print the result of a benchmark."""
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    window = result.plan.window
    warm = [row for row in result.rows if row.cache == "warm"]
    cold = [row for row in result.rows if row.cache == "cold"]
    runs_text = f"medians of {warm[0].n:,}" if warm and warm[0].n > 1 else "measured once"
    print(
        f"{window.num_images:,} images of {result.title} to {window.image_size} px, in batches of {window.batch_size}"
    )
    print_table(f"files in memory, {runs_text}", (*_HEADINGS, "memory"), map(_warm_row, warm))
    if cold:
        print_table("from the disk, from the start of a pass", (*_HEADINGS, "from disk"), map(_cold_row, cold))
    rows = [*_conclusions(result.plan, warm), *(("note", note) for note in result.notes), *result.plan.left_out]
    if rows:
        print_rows(rows, "summary")


def _warm_row(row: BenchRow) -> tuple[str, ...]:
    return *_common_cells(row), size(row.memory_bytes) if row.kind == "loader" else ""


def _cold_row(row: BenchRow) -> tuple[str, ...]:
    return *_common_cells(row), size(row.disk_bytes)


def _common_cells(row: BenchRow) -> tuple[str, ...]:
    low, high = row.spread
    spread = f"{100 * (high - low) / row.images_per_s:.0f} %" if row.n > 1 else ""
    cpu_ms = f"{row.cpu_ms:.2f}" if row.cpu_ms < 10 else f"{row.cpu_ms:.1f}"
    return row.name, _rate_text(row.images_per_s), spread, _rate_text(row.images_per_s_per_core), cpu_ms


def _rate_text(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.1f} M"


def _conclusions(plan: LoaderBenchPlan, rows: Sequence[BenchRow]) -> Iterator[tuple[str, str]]:
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
    if best.name.endswith(", pack") and len(plan.sources) > 1:
        yield "to use it", "paceline data pack SRC OUT.pack, and train with data.source={name: pack, root: OUT.pack}"

"""`paceline data bench`: measure every loader on a data set, and the limits of the machine."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn

from paceline.cli.data_progress import build_data_progress
from paceline.cli.data_words import count_workers, read_source
from paceline.cli.show_bench import BenchResult, show_bench
from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.core.errors import DataError
from paceline.core.rundir import write_atomic
from paceline.core.units import size
from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.pack.writer import PackOptions, write_pack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.places import expand_path, printable
from paceline.lab.cache import evict_files, read_into_cache
from paceline.lab.contest import LoaderBenchPlan, build_bench_plan, sample_datasets
from paceline.lab.inspection import estimate_source_bytes
from paceline.lab.loaders import BenchCase, BenchRow, CacheState, LoaderCase, run_bench
from paceline.measure.machine import describe_machine


@dataclass(frozen=True)
class BenchRequest:
    """Options of `paceline data bench` as typed."""

    seconds: float
    rounds: int
    images: int
    packs: bool
    cold: bool


def bench_data(
    src: str | None,
    overrides: list[str],
    request: BenchRequest,
    workers: str,
    out: Path | None,
    *,
    own_code: bool = False,
    as_json: bool,
) -> int:
    """Run `paceline data bench`, and return the exit code."""
    num_workers = count_workers(workers)
    meant = read_source(src, overrides, own_code=own_code)
    folder = _make_out_folder(out) if out else None
    datasets = build_datasets(meant.source, may_download=False, skip_bad=meant.data.on_bad_image == "skip")
    notes = [] if load_native() or isinstance(datasets.train, ArraySource) else [NATIVE_MISSING_MESSAGE]
    with contextlib.ExitStack() as resources:
        sources = {_source_kind(datasets.train, meant.source.name): _select_images(datasets, request.images).train}
        if request.packs and not isinstance(datasets.train, ArraySource | PackSource):
            packed, note = resources.enter_context(
                _temporary_pack(_select_images(datasets, request.images), num_workers)
            )
            sources |= {"pack": packed} if packed else {}
            notes += [note]
        contest = build_bench_plan(
            meant.data,
            sources,
            num_images=request.images,
            seconds=request.seconds,
            workers=num_workers,
            is_recipe=meant.is_recipe,
        )
        rows = _measure_all(contest, request)
    notes += _cold_cache_notes(contest, rows)
    result = BenchResult(meant.name, contest, rows, notes, {"machine": describe_machine(), "workers": num_workers})
    show_bench(result, as_json=as_json)
    if folder:
        write_atomic(folder / "bench.json", json.dumps(result.to_dict(), indent=2) + "\n")
    return 0


def _make_out_folder(out: Path) -> Path:
    folder = expand_path(str(out))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out: {printable(folder)}: {error.strerror} (name a folder that can be written)") from None
    return folder


def _source_kind(source: Source, name: str) -> str:
    return "pixels" if isinstance(source, ArraySource) else name


def _select_images(datasets: Datasets, num_images: int) -> Datasets:
    """Return the images to measure; a pack stays whole, because the native loader needs that."""
    return datasets if isinstance(datasets.train, PackSource) else sample_datasets(datasets, num_images)


@contextlib.contextmanager
def _temporary_pack(datasets: Datasets, workers: int) -> Iterator[tuple[Source | None, str]]:
    """Yield a temporary pack of the images (None if it does not fit on disk), and a note about it."""
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
        with build_data_progress("images") as progress:
            made = write_pack(datasets, path, PackOptions(skip_bad=True), progress, workers)
        speed = f"{made.images / max(progress.elapsed_s, 1e-9):,.0f} images/s"
        note = f"a pack of the images was written at {speed}: {size(made.bytes)}"
        yield open_pack(path).train, note + (f", {size(read_bytes)} before" if read_bytes else "")


def _measure_all(contest: LoaderBenchPlan, request: BenchRequest) -> list[BenchRow]:
    """Measure all contenders; on a terminal, show the current one."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    is_warm: set[str] = set()

    def prepare(contender: BenchCase, cache: CacheState) -> None:
        if not isinstance(contender, LoaderCase):
            return
        if cache == "cold":
            evict_files(contest.files[contender.source_kind])
            is_warm.discard(contender.source_kind)
        elif contender.source_kind not in is_warm:
            read_into_cache(contender.source, contest.window.num_images)
            is_warm.add(contender.source_kind)

    # auto_refresh=False: a refresh thread would be alive when a contender forks.
    bar = Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False, transient=True)

    def show_turn(done: int, total: int, name: str) -> None:
        bar.update(task, description=f"{name} ({done + 1} of {total})", refresh=True)

    with bar if console.is_terminal else contextlib.nullcontext():
        task = bar.add_task("")
        return run_bench(
            contest.list_entries(cold=request.cold), request.rounds, contest.window, prepare=prepare, progress=show_turn
        )


def _cold_cache_notes(contest: LoaderBenchPlan, rows: list[BenchRow]) -> list[str]:
    cold = [row for row in rows if row.cache == "cold"]
    if any(row.disk_bytes < row.bytes_read / 2 for row in cold):
        return ["little was read from the disk: the page cache or memory held the files; cold results are not cold"]
    return []

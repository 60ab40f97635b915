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

from paceline.cli.data_progress import build_progress
from paceline.cli.data_words import count_workers, read_source
from paceline.cli.show_bench import Found, show_bench
from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.core.errors import DataError
from paceline.core.rundir import write_atomic
from paceline.core.units import size
from paceline.data.native import WHAT_IS_LOST, native
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.pack.writer import PackOptions, pack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.places import expanded, printable
from paceline.lab.cache import drop, warm
from paceline.lab.contest import Contest, build_contest, some_of
from paceline.lab.inspection import source_bytes
from paceline.lab.loaders import Cache, Contender, Loading, Row, take_turns
from paceline.measure.machine import describe_machine


@dataclass(frozen=True)
class Asked:
    """Options of `paceline data bench` as typed."""

    seconds: float
    rounds: int
    images: int
    packs: bool
    cold: bool


def bench_data(
    src: str | None,
    overrides: list[str],
    request: Asked,
    workers: str,
    out: Path | None,
    *,
    own_code: bool = False,
    as_json: bool,
) -> int:
    """Run `paceline data bench`, and return the exit code."""
    num_workers = count_workers(workers)
    meant = read_source(src, overrides, own_code=own_code)
    folder = _claimed(out) if out else None
    datasets = build_datasets(meant.source, may_download=False, skip_bad=meant.data.on_bad_image == "skip")
    notes = [] if native() or isinstance(datasets.train, ArraySource) else [WHAT_IS_LOST]
    with contextlib.ExitStack() as resources:
        sources = {_kind(datasets.train, meant.source.name): _chosen(datasets, request.images).train}
        if request.packs and not isinstance(datasets.train, ArraySource | PackSource):
            packed, note = resources.enter_context(_packed(_chosen(datasets, request.images), num_workers))
            sources |= {"pack": packed} if packed else {}
            notes += [note]
        contest = build_contest(
            meant.data,
            sources,
            num_images=request.images,
            seconds=request.seconds,
            workers=num_workers,
            is_recipe=meant.is_recipe,
        )
        rows = _measure(contest, request)
    notes += _cold_notes(contest, rows)
    result = Found(meant.name, contest, rows, notes, {"machine": describe_machine(), "workers": num_workers})
    show_bench(result, as_json=as_json)
    if folder:
        write_atomic(folder / "bench.json", json.dumps(result.to_dict(), indent=2) + "\n")
    return 0


def _claimed(out: Path) -> Path:
    folder = expanded(str(out))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out: {printable(folder)}: {error.strerror} (name a folder that can be written)") from None
    return folder


def _kind(source: Source, name: str) -> str:
    return "pixels" if isinstance(source, ArraySource) else name


def _chosen(datasets: Datasets, num_images: int) -> Datasets:
    """Return the images to measure; a pack stays whole, because the native loader needs that."""
    return datasets if isinstance(datasets.train, PackSource) else some_of(datasets, num_images)


@contextlib.contextmanager
def _packed(datasets: Datasets, workers: int) -> Iterator[tuple[Source | None, str]]:
    """Yield a temporary pack of the images (None if it does not fit on disk), and a note about it."""
    read_bytes = source_bytes(datasets.train)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        room = shutil.disk_usage(folder).free
        if read_bytes is not None and read_bytes * 2 > room:
            yield (
                None,
                f"no pack was measured: {size(read_bytes)} do not fit into {folder}, which has {size(room)} free",
            )
            return
        path = Path(folder) / "bench.pack"
        with build_progress("images") as progress:
            made = pack(datasets, path, PackOptions(skip_bad=True), progress, workers)
        speed = f"{made.images / max(progress.elapsed_s, 1e-9):,.0f} images/s"
        note = f"a pack of the images was written at {speed}: {size(made.bytes)}"
        yield open_pack(path).train, note + (f", {size(read_bytes)} before" if read_bytes else "")


def _measure(contest: Contest, request: Asked) -> list[Row]:
    """Measure all contenders; on a terminal, show the current one."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    is_warm: set[str] = set()

    def prepare(contender: Contender, cache: Cache) -> None:
        if not isinstance(contender, Loading):
            return
        if cache == "cold":
            drop(contest.files[contender.reads])
            is_warm.discard(contender.reads)
        elif contender.reads not in is_warm:
            warm(contender.source, contest.window.num_images)
            is_warm.add(contender.reads)

    # auto_refresh=False: a refresh thread would be alive when a contender forks.
    bar = Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False, transient=True)

    def show_turn(done: int, total: int, name: str) -> None:
        bar.update(task, description=f"{name} ({done + 1} of {total})", refresh=True)

    with bar if console.is_terminal else contextlib.nullcontext():
        task = bar.add_task("")
        return take_turns(
            contest.turns(cold=request.cold), request.rounds, contest.window, prepare=prepare, told=show_turn
        )


def _cold_notes(contest: Contest, rows: list[Row]) -> list[str]:
    cold = [row for row in rows if row.cache == "cold"]
    if any(row.disk_bytes < row.bytes_read / 2 for row in cold):
        return ["little was read from the disk: the page cache or memory held the files; cold results are not cold"]
    return []

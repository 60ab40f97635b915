"""Choose what a loader benchmark measures: compatible loaders and ceilings, and the images."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.core.errors import RecipeError
from paceline.data.choice import choose_loader
from paceline.data.native import load_native
from paceline.data.pack.reader import PackSource
from paceline.data.tally import LoaderName
from paceline.lab.cache import list_source_files
from paceline.lab.floors import DECODE_STAGES, CopyCeiling, DecodeCeiling
from paceline.lab.inspection import spread_indices
from paceline.lab.loaders import BenchCase, BenchEntry, LoaderCase, MeasurementWindow
from paceline.lab.part import select_samples
from paceline.recipe.plan import DEFAULT_PHOTO_SIZE
from paceline.recipe.schema.augment import Flip, PadCrop
from paceline.recipe.schema.data import Data

_MAX_BATCH: Final = 64
"""A window ends with a batch, and the slowest loader makes only a few of this size per second."""
_PIXEL_LOADERS: Final[tuple[LoaderName, ...]] = ("inline", "device")
_FILE_LOADERS: Final[tuple[LoaderName, ...]] = ("inline", "threads", "processes")
_PACK_LOADERS: Final[tuple[LoaderName, ...]] = ("threads", "processes", "native")


@dataclass(frozen=True)
class LoaderBenchPlan:
    """What to measure. `left_out` are the names that cannot take part, with reasons.

    `files` and `sources` are, by kind of source, the files read and the splits.
    """

    window: MeasurementWindow
    cases: tuple[BenchCase, ...]
    left_out: tuple[tuple[str, str], ...]
    sources: dict[str, Source]
    files: dict[str, tuple[Path, ...]] = field(default_factory=dict)

    def list_entries(self, *, cold: bool) -> list[BenchEntry]:
        """Return the measurements of a round; `cold` adds those of file-reading loaders with a cold cache."""
        turns: list[BenchEntry] = [(contender, "warm") for contender in self.cases]
        if cold:
            turns += [
                (each, "cold") for each in self.cases if isinstance(each, LoaderCase) and self.files[each.source_kind]
            ]
        return turns


def sample_datasets(datasets: Datasets, num_images: int) -> Datasets:
    """Return at most `num_images` training images, evenly spread, and one validation image, which a pack needs."""
    train = select_samples(datasets.train, spread_indices(len(datasets.train), num_images))
    return Datasets(train, select_samples(datasets.val, spread_indices(len(datasets.val), 1)))


def build_bench_plan(
    data: Data, sources: dict[str, Source], *, num_images: int, seconds: float, workers: int, is_recipe: bool
) -> LoaderBenchPlan:
    """Return the benchmark of all loaders that can read one of `sources`, which hold the same images.

    Keeps a recipe's augmentation; without a recipe (`is_recipe`) in-memory pixels are cropped and flipped.
    """
    first = next(iter(sources.values()))
    data = _with_default_augment(data, first, is_recipe=is_recipe)
    num_images = min(num_images, *map(len, sources.values()))
    # One process loads, like one rank.
    batch_size = data.global_batch_size if data.rank_batch_size == "auto" else data.rank_batch_size
    batch_size = min(_MAX_BATCH, batch_size, num_images)
    window = MeasurementWindow(seconds, batch_size, _choose_image_size(data, first), num_images)
    contenders: list[BenchCase] = []
    left_out: list[tuple[str, str]] = []
    for reads, source in sources.items():
        for loader in _list_compatible_loaders(source):
            case = LoaderCase(loader, reads, source, data, 0 if loader in ("inline", "device") else workers)
            reason = _find_obstacle(case)
            if reason:
                left_out.append((case.name, reason))
            else:
                contenders.append(case)
    contenders += [floor for source in sources.values() for floor in _iter_decode_ceilings(source, data, workers)]
    contenders.append(CopyCeiling(first.info.channels))
    files = {reads: tuple(list_source_files(source)) for reads, source in sources.items()}
    return LoaderBenchPlan(window, tuple(contenders), tuple(left_out), sources, files)


def _with_default_augment(data: Data, source: Source, *, is_recipe: bool) -> Data:
    if is_recipe or not isinstance(source, ArraySource):
        return data
    return data.model_copy(update={"augment": (PadCrop(), Flip())})


def _choose_image_size(data: Data, source: Source) -> int:
    if data.image_size != "auto":
        return data.image_size
    return source.info.image_size[0] if source.info.image_size else DEFAULT_PHOTO_SIZE


def _list_compatible_loaders(source: Source) -> tuple[LoaderName, ...]:
    match source:
        case ArraySource():
            return _PIXEL_LOADERS
        case PackSource():
            return _PACK_LOADERS
    return _FILE_LOADERS


def _find_obstacle(loading: LoaderCase) -> str:
    """Return why a loader cannot read this source, or ""."""
    settings = {"loader": loading.loader, "workers": loading.workers or "auto"}
    if loading.loader == "inline":
        return ""
    try:
        data = loading.data.model_copy(update=settings)
        choose_loader(data, loading.source, device="cpu", cores=1, free_bytes=float("inf"))
    except RecipeError as error:
        return str(error)
    return ""


def _iter_decode_ceilings(source: Source, data: Data, workers: int) -> Iterator[DecodeCeiling]:
    core = load_native()
    if core is None or not isinstance(source, PackSource):
        return
    for name, stage in DECODE_STAGES.items():
        yield DecodeCeiling(name, stage, source, data, core, workers)

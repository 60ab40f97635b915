"""Who makes the batches of a data set: what the recipe says, as far as it can be, and else the fastest that can."""

from typing import Final, NamedTuple

from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import RecipeError
from paceline.core.units import count, size
from paceline.data import native_loader, processes, threads
from paceline.data.augment.build import needs_host
from paceline.data.native import MAX_SIDE, MAX_THREADS, WHAT_IS_LOST, Native, native
from paceline.data.pack.format import KIND_RECORD
from paceline.data.pack.reader import PackSource
from paceline.data.tally import LoaderName
from paceline.recipe.schema.augment import RandomResizedCrop
from paceline.recipe.schema.data import Data

_MAX_WORKERS: Final = 16
_SHARE: Final = 1 / 4
"""Of a GPU's free memory that a set may take unasked; the rest is for the model and what it keeps for backward."""


class Choice(NamedTuple):
    """Who makes batches, with how many processes or threads, and a sentence for the user, or nothing."""

    loader: LoaderName
    workers: int
    note: str = ""

    def memory_bytes(self, batch_bytes: int) -> int:
        """Return the most host memory that batches of so many bytes take: those made ahead, and the one in hand."""
        match self.loader:
            case "native":
                return (native_loader.AHEAD + 2) * batch_bytes  # the rank may hold one while it asks for the next
            case "threads":
                return (threads.PREFETCH * self.workers + 1) * batch_bytes
            case "processes":
                return (processes.PREFETCH * self.workers + 1) * batch_bytes
            case "inline":
                return batch_bytes
        return 0


def choose_loader(data: Data, source: Source, *, device: str, cores: int, free_bytes: float) -> Choice:
    """Return who makes batches of `source` for a model on `device`, `cpu` or `cuda`.

    `cores` are those of this rank, `free_bytes` the device's memory that nobody uses. Raise `RecipeError` for a loader
    that cannot do what the recipe asks for.
    """
    core = native()
    match data.loader:
        case "auto":
            return _fastest(data, source, device == "cuda", cores, free_bytes, core)
        case "device":
            _check_device(data, source, device == "cuda", free_bytes)
            return Choice("device", 0)
        case "native":
            _check_native(data, source, core)
            return Choice("native", _threads(data, cores))
        case "nvjpeg":
            _check_nvjpeg(data, source, device == "cuda")
    return Choice(data.loader, _threads(data, cores))


def _fastest(data: Data, source: Source, is_gpu: bool, cores: int, free_bytes: float, core: Native | None) -> Choice:
    if isinstance(source, ArraySource):
        return _of_pixels(data, source, is_gpu, cores, free_bytes)
    if isinstance(source, PackSource) and data.workers != 0 and _has_records(source) and not _beyond_native(data):
        if core is not None:
            return Choice("native", _threads(data, cores))
        return _processes(data, cores)._replace(note=f"data.loader: {WHAT_IS_LOST}")
    return _processes(data, cores)


def _of_pixels(data: Data, source: ArraySource, is_gpu: bool, cores: int, free_bytes: float) -> Choice:
    """Return who gathers pixels in memory: nobody but the rank, where a GPU changes them or a CPU is to train on them,
    unless each is cropped by itself, or changed by what a GPU would have to be waited for.
    """
    if data.workers != "auto":
        return _processes(data, cores)
    if is_gpu and not _crops(data) and data.augment_on != "host" and source.images.nbytes <= free_bytes * _SHARE:
        return Choice("device", 0)
    return _processes(data, cores) if is_gpu and needs_host(data) else Choice("inline", 0)


def _processes(data: Data, cores: int) -> Choice:
    """Return worker processes: all cores but the rank's own, and none where there is no other."""
    workers = min(_MAX_WORKERS, max(0, cores - 1)) if data.workers == "auto" else data.workers
    return Choice("processes" if workers else "inline", workers)


def _threads(data: Data, cores: int) -> int:
    """Return how many workers there are where there is to be one at least."""
    return max(1, min(_MAX_WORKERS, cores - 1)) if data.workers == "auto" else data.workers


def _check_device(data: Data, source: Source, is_gpu: bool, free_bytes: float) -> None:
    if not isinstance(source, ArraySource):
        raise RecipeError(
            f"data.loader: device keeps a set as pixels of one size, and {data.source.name} has image files "
            f"(set data.loader=auto)"
        )
    if _crops(data):
        raise RecipeError(
            "data.loader: device changes whole batches, and random_resized_crop crops each image by itself "
            "(set data.loader=auto, or use pad_crop)"
        )
    if is_gpu and data.augment_on == "host":
        raise RecipeError(
            "data.loader: device changes batches where they are, and data.augment_on is host (leave one at auto)"
        )
    if is_gpu and source.images.nbytes > free_bytes:
        raise RecipeError(
            f"data.loader: device: the set is {size(source.images.nbytes)}, and the GPU has {size(free_bytes)} free "
            f"(set data.loader=auto)"
        )


def _check_nvjpeg(data: Data, source: Source, is_gpu: bool) -> None:
    if not is_gpu:
        raise RecipeError("data.loader: nvjpeg decodes on a GPU, and this run is on a CPU (set data.loader=auto)")
    if isinstance(source, ArraySource):
        raise RecipeError(
            f"data.loader: nvjpeg decodes photographs, and {data.source.name} is pixels already (set data.loader=auto)"
        )
    if data.augment_on == "host":
        raise RecipeError(
            "data.loader: nvjpeg has batches on the GPU from the start, and data.augment_on is host (leave one at auto)"
        )


def _check_native(data: Data, source: Source, core: Native | None) -> None:
    if isinstance(source, ArraySource):
        raise RecipeError(
            f"data.loader: native decodes photographs, and {data.source.name} is pixels already (set data.loader=auto)"
        )
    if not isinstance(source, PackSource):
        raise RecipeError(
            f"data.loader: native reads packs, and this is {data.source.name} (make one with `paceline data pack`, and "
            f"set data.source={{name: pack, root: OUT}}; or set data.loader=auto)"
        )
    if core is None:
        raise RecipeError(f"data.loader: native: {WHAT_IS_LOST}; or set data.loader=auto")
    if not _has_records(source):
        raise RecipeError(
            f"data.loader: native decodes JPEGs, and {count(len(source), 'image')} of this pack are none "
            f"(set data.loader=auto)"
        )
    beyond = _beyond_native(data)
    if beyond:
        raise RecipeError(f"data.loader: native: {beyond} (lower it, or set data.loader=auto)")


def _beyond_native(data: Data) -> str:
    """Return what of `data` is more than the native core takes; nothing where it takes all."""
    limits = (
        ("image_size", data.image_size, f"makes images of up to {MAX_SIDE:,} px"),
        ("eval_image_size", data.eval_image_size, f"makes images of up to {MAX_SIDE:,} px"),
        ("workers", data.workers, f"has up to {MAX_THREADS:,} threads"),
    )
    for (name, value, what), most in zip(limits, (MAX_SIDE, MAX_SIDE, MAX_THREADS), strict=True):
        if value != "auto" and value > most:
            return f"{what}, and data.{name} is {value:,}"
    return ""


def _has_records(source: PackSource) -> bool:
    return bool((source.kinds == KIND_RECORD).any())


def _crops(data: Data) -> bool:
    return any(isinstance(section, RandomResizedCrop) for section in data.augment)

"""Choose the loader for a dataset: the one that the recipe names, or the fastest that supports it."""

from typing import Final, NamedTuple

import numpy as np

from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import RecipeError
from paceline.core.units import count, size
from paceline.data.augment.build import has_host_augments
from paceline.data.files import JPEG_EXTENSIONS
from paceline.data.native import MAX_SIDE, MAX_THREADS, NATIVE_MISSING_MESSAGE, NativeExtension, load_native
from paceline.data.pack.format import KIND_RECORD
from paceline.data.pack.reader import PackSource
from paceline.data.sources.subset import find_file_source
from paceline.data.timing import LoaderName
from paceline.recipe.schema.augment import RandomResizedCrop
from paceline.recipe.schema.data import Data

_MAX_WORKERS: Final = 16
# Largest share of a GPU's free memory that `loader: auto` gives to a dataset; the rest is for the model and its
# activations.
_MAX_GPU_MEMORY_SHARE: Final = 1 / 4
# Files, spread over a split, by which `loader: auto` judges whether most are JPEGs.
_MAX_FILES_CHECKED: Final = 200
_JPEG_SIGNATURE: Final = b"\xff\xd8\xff"


class LoaderChoice(NamedTuple):
    """A loader, its number of processes or threads, and an optional note for the user."""

    loader: LoaderName
    workers: int
    note: str = ""


def choose_loader(data: Data, source: Source, *, device: str, cores: int, free_bytes: float) -> LoaderChoice:
    """Choose the loader of `source` for a model on `device`, `cpu` or `cuda`.

    `cores` are the CPU cores of this rank, `free_bytes` the free memory of the device. Raise `RecipeError` if the
    loader of the recipe does not support the recipe.
    """
    extension = load_native()
    match data.loader:
        case "auto":
            return _choose_fastest(data, source, device == "cuda", cores, free_bytes, extension)
        case "device":
            _check_device(data, source, device == "cuda", free_bytes)
            return LoaderChoice("device", 0)
        case "native":
            _check_native(data, source, extension)
            return LoaderChoice("native", _count_threads(data, cores))
        case "nvjpeg":
            _check_photo(data, source)
            from paceline.contrib.nvjpeg import check_nvjpeg

            check_nvjpeg(data, source, is_gpu=device == "cuda")
    return LoaderChoice(data.loader, _count_threads(data, cores))


def _choose_fastest(
    data: Data, source: Source, is_gpu: bool, cores: int, free_bytes: float, extension: NativeExtension | None
) -> LoaderChoice:
    if isinstance(source, ArraySource):
        return _choose_for_pixels(data, source, is_gpu, cores, free_bytes)
    if data.workers != 0 and has_jpegs(source) and not _find_exceeded_native_limit(data):
        if data.interpolation != "bilinear":
            note = f"data.loader: processes, as the faster native loader has no {data.interpolation} interpolation"
            return _choose_processes(data, cores)._replace(note=note)
        if extension is not None:
            return LoaderChoice("native", _count_threads(data, cores))
        return _choose_processes(data, cores)._replace(note=f"data.loader: {NATIVE_MISSING_MESSAGE}")
    return _choose_processes(data, cores)


def _choose_for_pixels(data: Data, source: ArraySource, is_gpu: bool, cores: int, free_bytes: float) -> LoaderChoice:
    if data.workers != "auto":
        return _choose_processes(data, cores)
    if (
        is_gpu
        and not _has_random_resized_crop(data)
        and data.augment_on != "host"
        and count_device_bytes(source) <= free_bytes * _MAX_GPU_MEMORY_SHARE
    ):
        return LoaderChoice("device", 0)
    # Pixels in memory need workers only if a GPU would wait for augmentation on the host. On a CPU, workers would
    # compete with the model for cores.
    return _choose_processes(data, cores) if is_gpu and has_host_augments(data) else LoaderChoice("inline", 0)


def count_device_bytes(source: ArraySource) -> int:
    """Return the bytes that the images of `source` take on a device."""
    return source.images[..., 0].size * source.info.pixel_format.batch_bytes


# One core is left to the main process.
def _choose_processes(data: Data, cores: int) -> LoaderChoice:
    workers = min(_MAX_WORKERS, max(0, cores - 1)) if data.workers == "auto" else data.workers
    return LoaderChoice("processes" if workers else "inline", workers)


def _count_threads(data: Data, cores: int) -> int:
    return max(1, min(_MAX_WORKERS, cores - 1)) if data.workers == "auto" else data.workers


def _check_device(data: Data, source: Source, is_gpu: bool, free_bytes: float) -> None:
    if not isinstance(source, ArraySource):
        raise RecipeError(
            f"data.loader: device keeps pixels of one size in GPU memory, and {data.source.name} has image files "
            f"(set data.loader=auto)"
        )
    if _has_random_resized_crop(data):
        raise RecipeError(
            "data.loader: device augments whole batches, and random_resized_crop crops each image separately "
            "(set data.loader=auto, or use pad_crop)"
        )
    if is_gpu and data.augment_on == "host":
        raise RecipeError(
            "data.loader: device augments batches on the GPU, and data.augment_on is host (leave one at auto)"
        )
    num_bytes = count_device_bytes(source)
    if is_gpu and num_bytes > free_bytes:
        raise RecipeError(
            f"data.loader: device: the data is {size(num_bytes)}, and the GPU has {size(free_bytes)} free "
            f"(set data.loader=auto)"
        )


def _check_native(data: Data, source: Source, extension: NativeExtension | None) -> None:
    if isinstance(source, ArraySource):
        raise RecipeError(
            f"data.loader: native decodes image files, and {data.source.name} is stored as pixels "
            f"(set data.loader=auto)"
        )
    if not isinstance(source, PackSource) and find_file_source(source) is None:
        raise RecipeError(
            f"data.loader: native decodes packs and image files, and data.source is {data.source.name} (make a pack "
            f"with `paceline data pack` and set data.source={{name: pack, root: OUT}}, or set data.loader=auto)"
        )
    _check_photo(data, source)
    if extension is None:
        raise RecipeError(f"data.loader: native: {NATIVE_MISSING_MESSAGE}; or set data.loader=auto")
    if isinstance(source, PackSource) and not _has_records(source):
        raise RecipeError(
            f"data.loader: native decodes indexed JPEGs, and this pack has none among {count(len(source), 'image')} "
            f"(set data.loader=auto)"
        )
    if data.interpolation != "bilinear":
        raise RecipeError(
            f"data.loader: native resizes bilinearly, and data.interpolation is {data.interpolation} "
            "(set data.loader=auto, or data.interpolation=bilinear)"
        )
    exceeded = _find_exceeded_native_limit(data)
    if exceeded:
        raise RecipeError(f"data.loader: native: {exceeded} (lower it, or set data.loader=auto)")


def _check_photo(data: Data, source: Source) -> None:
    form = source.info.pixel_format
    if not form.is_photo:
        raise RecipeError(
            f"data.loader: {data.loader} decodes 8-bit gray and RGB images, and data.source has "
            f"{form} (set data.loader=auto)"
        )


def _find_exceeded_native_limit(data: Data) -> str:
    limits = (
        ("image_size", data.image_size, MAX_SIDE, f"makes images of up to {MAX_SIDE:,} px"),
        ("eval_image_size", data.eval_image_size, MAX_SIDE, f"makes images of up to {MAX_SIDE:,} px"),
        ("workers", data.workers, MAX_THREADS, f"has up to {MAX_THREADS:,} threads"),
    )
    for name, value, limit, ability in limits:
        if value != "auto" and value > limit:
            return f"{ability}, and data.{name} is {value:,}"
    return ""


def has_jpegs(source: Source) -> bool:
    """Return whether the native extension decodes enough images of `source`: records, or most of its files."""
    if isinstance(source, PackSource):
        return _has_records(source)
    files = find_file_source(source)
    if files is None or not source.info.pixel_format.is_photo or not len(source):
        return False
    located = files.locate_files(np.linspace(0, len(source) - 1, min(len(source), _MAX_FILES_CHECKED), dtype=np.int64))
    jpegs = [_is_jpeg(file, name) for file, name in zip(located.files, located.names, strict=True)]
    return 2 * sum(jpegs) > len(jpegs)


def _is_jpeg(file: bytes | memoryview | None, name: bytes) -> bool:
    if isinstance(file, memoryview):
        return bytes(file[:3]) == _JPEG_SIGNATURE
    return name.rpartition(b".")[2].lower().decode("ascii", "replace") in JPEG_EXTENSIONS


def _has_records(source: PackSource) -> bool:
    return bool((source.kinds == KIND_RECORD).any())


def _has_random_resized_crop(data: Data) -> bool:
    return any(isinstance(section, RandomResizedCrop) for section in data.augment)

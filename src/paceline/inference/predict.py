"""Read images in threads, in order and ahead of the model, and rank the classes of each."""

import contextlib
import os
import stat
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.core.dataset import JoinedNames
from paceline.core.errors import DataError, RecipeError
from paceline.core.results import printable_class_name
from paceline.data.bad_images import ImageError
from paceline.data.files import printable
from paceline.data.loaders.build import LoaderOptions, build_eval_loader
from paceline.data.loaders.choose import LoaderChoice, choose_loader
from paceline.data.order import EvalShard
from paceline.data.sources.image_files import ImageFileSource, build_files_info
from paceline.inference.classifier import Classifier
from paceline.inference.images import UnreadableImage
from paceline.inference.reference import Rejector
from paceline.models.features import capture_features
from paceline.parallel.device import create_thread_pool

# Size of the largest image that is decoded: 128 million pixels, four channels of 16 bits, uncompressed.
_MAX_IMAGE_BYTES = 2**30
_CHUNK_BYTES = 2**20
# Paths that are listed before their images are read, at first and at most: workers start anew for each list.
_FIRST_PATHS = 256
_MAX_PATHS = 4096
# Images per batch of the loader.
_LOADER_BATCH = 16
# Same k as evaluation (`training.metrics.predict_batch`): it determines the order of ties in `topk`.
_EVAL_TOP_K = 5

# Maximum number of batches for which unreadable images wait behind a readable one.
_MAX_PENDING_BATCHES = 8
_NAN_LOGITS = "its logits are NaN; use another --checkpoint"


@dataclass(frozen=True)
class InputImage:
    """An image of the model's input size, [C, H, W], and the path of its file."""

    path: Path
    pixels: Tensor


def read_images(
    classifier: Classifier, paths: Iterable[Path | UnreadableImage], *, threads: int, num_ahead: int
) -> Generator[InputImage | UnreadableImage, None, None]:
    """Yield the image of each of `paths` in order, preprocessed as in evaluation, prefetching up to `num_ahead`.

    An image that cannot be read or decoded becomes an `UnreadableImage` in its place.
    """
    pool = create_thread_pool(threads, "image")
    pending: deque[Future[InputImage | UnreadableImage]] = deque()
    try:
        for path in paths:
            pending.append(pool.submit(partial(_read_image, classifier, path)))
            if len(pending) > num_ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # the consumer may stop early


def load_images(
    classifier: Classifier, paths: Iterable[Path | UnreadableImage], *, cores: int
) -> Generator[InputImage | UnreadableImage, None, None]:
    """Yield what `read_images` does, by the loader and number of workers of the run's evaluation, on `cores` CPU cores.

    It reads up to 4,096 of `paths` ahead, fewer at first.
    """
    if classifier.preprocessing.is_pixels:  # evaluation takes such pixels from memory
        yield from read_images(classifier, paths, threads=cores, num_ahead=2 * _LOADER_BATCH * cores)
        return
    remaining, num_paths = iter(paths), _FIRST_PATHS
    while chunk := list(islice(remaining, num_paths)):
        yield from _load_chunk(classifier, chunk, cores)
        num_paths = min(2 * num_paths, _MAX_PATHS)


def _load_chunk(
    classifier: Classifier, paths: Sequence[Path | UnreadableImage], cores: int
) -> Generator[InputImage | UnreadableImage, None, None]:
    files = [path for path in paths if isinstance(path, Path) and _is_image_sized_file(path)]
    with contextlib.closing(_load_files(classifier, files, cores)) as loaded:
        are_files = set(files)
        for path in paths:
            if isinstance(path, Path) and path in are_files and (pixels := next(loaded)) is not None:
                yield InputImage(path, pixels)
            else:  # an image that the loader cannot read is read again, for its message
                yield _read_image(classifier, path)


def _load_files(classifier: Classifier, files: Sequence[Path], cores: int) -> Generator[Tensor | None, None, None]:
    """Yield the image of each of `files`, or None if it cannot be read."""
    preprocessing, data = classifier.preprocessing, classifier.recipe.data
    # The loaders of other sources and of a GPU do not read files, or not with the same pixels.
    has_own_loader = data.loader in ("device", "native", "nvjpeg")
    # Indexes of images that are seen once would displace those of datasets from the run's cache.
    update = {"on_bad_image": "skip", "cache": "off", "loader": "auto" if has_own_loader else data.loader}
    if preprocessing.resize is None:  # also for a run on images of one size, whatever the recipe says
        update["eval_resize"] = "stretch"
    data = data.model_copy(update=update)
    info = build_files_info("images", "val", len(files), classifier.classes, preprocessing.pixel_format)
    names = JoinedNames.from_list([os.fsencode(path) for path in files])
    source = ImageFileSource(info, os.path.curdir, names, np.zeros(len(files), dtype=np.int32))
    choice = choose_loader(data, source, device="cpu", cores=cores, free_bytes=0)
    if choice.loader == "inline":  # the same pixels, in parallel
        choice = LoaderChoice("threads", cores)
    # Small batches, so that all workers have some.
    shard = EvalShard(len(files), max(1, min(_LOADER_BATCH, len(files) // (2 * choice.workers))))
    options = LoaderOptions(choice.workers, pin_memory=False, loader=choice.loader)
    loader = build_eval_loader(data, source, shard, preprocessing.image_size, options)
    with contextlib.closing(loader):
        for number, batch in enumerate(loader.batches(0, shard.num_batches)):
            images = dict(zip(batch.indices.tolist(), batch.images, strict=True))
            yield from map(images.get, shard.indices(number).tolist())


def _is_image_sized_file(path: Path) -> bool:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_IMAGE_BYTES


def _read_image(classifier: Classifier, path: Path | UnreadableImage) -> InputImage | UnreadableImage:
    if isinstance(path, UnreadableImage):
        return path
    try:
        return InputImage(path, classifier.image(_read_content(path), printable(path)))
    except ImageError as error:
        return UnreadableImage(path, f"{error.reason}; remove it or replace it")
    except DataError as error:
        return UnreadableImage(path, str(error))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return UnreadableImage(path, f"cannot be read: {reason}; correct its name, or leave it out")


def _read_content(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise ValueError("is a device")
        if status.st_size <= _MAX_IMAGE_BYTES:
            chunks = iter(partial(file.read, max(status.st_size, _CHUNK_BYTES)), b"")
            content = b"".join(islice(chunks, 1 + _MAX_IMAGE_BYTES // _CHUNK_BYTES))
            if len(content) <= _MAX_IMAGE_BYTES:
                return content
    raise ValueError(f"has more than {_MAX_IMAGE_BYTES / 2**30:g} GiB, too large for an image")


@dataclass(frozen=True)
class Guess:
    """A class, its predicted probability (0 to 1, float32 precision), and its position among the logits."""

    name: str
    probability: float
    index: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Prediction:
    """An image by path and its most likely classes, most likely first; with several labels, those it has.

    With a `Rejector`, `distance` is its distance to the training images, and `is_rejected` whether that is too large.
    """

    path: Path
    guesses: tuple[Guess, ...]
    distance: float | None = None
    is_rejected: bool = False


def predict_images(
    classifier: Classifier,
    images: Iterable[InputImage | UnreadableImage],
    *,
    batch_size: int,
    top: int,
    rejector: Rejector | None = None,
) -> Iterator[Prediction | UnreadableImage]:
    """Yield the `top` classes of each of `images` in order, running up to `batch_size` images at once.

    With several labels per image, at most `top` of those above the threshold.

    Unreadable images keep their place. Raise `RecipeError` if the batch does not fit into GPU memory.
    """
    batch: list[InputImage | UnreadableImage] = []
    num_images = 0
    for each in images:
        if not num_images and isinstance(each, UnreadableImage):
            yield each
            continue
        batch.append(each)
        num_images += isinstance(each, InputImage)
        if num_images == batch_size or len(batch) >= _MAX_PENDING_BATCHES * batch_size:
            yield from _predict_batch(classifier, batch, top, rejector)
            batch, num_images = [], 0
    yield from _predict_batch(classifier, batch, top, rejector)


def rank_classes(
    log_probabilities: Tensor, classes: Sequence[str], top: int, threshold: float | None = None
) -> list[tuple[Guess, ...]]:
    """Return the `top` classes of each row of `log_probabilities`, float [N, len(classes)], ties as in evaluation.

    With `threshold`, only those with a probability above it.
    """
    best = log_probabilities.topk(min(_EVAL_TOP_K, len(classes)), dim=1).indices
    # topk orders ties by k, so take evaluation's classes first and the others after them.
    if top > _EVAL_TOP_K:
        others = log_probabilities.scatter(1, best, -torch.inf)
        best = torch.cat([best, others.topk(min(top, len(classes)) - best.shape[1], dim=1).indices], dim=1)
    best = best[:, :top]
    probabilities = log_probabilities.gather(1, best).exp()
    # float32, as evaluation compares them.
    is_shown = probabilities.float() > (-1 if threshold is None else threshold)
    rows = zip(best.tolist(), probabilities.tolist(), is_shown.tolist(), strict=True)
    return [
        tuple(Guess(classes[number], share, number) for number, share, shown in zip(*row, strict=True) if shown)
        for row in rows
    ]


def _predict_batch(
    classifier: Classifier, batch: Sequence[InputImage | UnreadableImage], top: int, rejector: Rejector | None
) -> Iterator[Prediction | UnreadableImage]:
    pixels = [each.pixels for each in batch if isinstance(each, InputImage)]
    names = [printable_class_name(name) for name in classifier.classes]
    log_probabilities = torch.empty(0, len(names))
    distances: Iterator[float] = iter(())
    if pixels:
        log_probabilities, distances = _run_model(classifier, torch.stack(pixels), rejector)
    are_numbers = iter((~log_probabilities.isnan().any(dim=1)).tolist())
    guesses = iter(rank_classes(log_probabilities, names, top, classifier.threshold))
    for each in batch:
        if isinstance(each, UnreadableImage):
            yield each
            continue
        guess = next(guesses)
        distance = next(distances, None)
        is_rejected = rejector is not None and distance is not None and distance > rejector.threshold
        prediction = Prediction(each.path, guess, distance, is_rejected)
        yield prediction if next(are_numbers) else UnreadableImage(each.path, _NAN_LOGITS)


def _run_model(classifier: Classifier, images: Tensor, rejector: Rejector | None) -> tuple[Tensor, Iterator[float]]:
    """Return log-probabilities [N, classes], and with a rejector the distance of each image."""
    if rejector is None:
        return _compute_log_probabilities(classifier, images), iter(())
    with capture_features(classifier.model, rejector.layer) as captured:
        log_probabilities = _compute_log_probabilities(classifier, images)
    # The first view is the image itself.
    return log_probabilities, iter(rejector.reference.distances(captured[0].cpu()).tolist())


def _compute_log_probabilities(classifier: Classifier, images: Tensor) -> Tensor:
    try:
        return classifier.log_probabilities(images)
    except torch.OutOfMemoryError:
        fix = f"try {len(images) // 2}" if len(images) > 1 else "use --device cpu"
        raise RecipeError(f"--batch-size: {len(images)}: the images do not fit into GPU memory ({fix})") from None

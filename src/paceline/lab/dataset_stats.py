"""Statistics of a dataset: class balance, image sizes, formats and bytes. Torch-free."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Source
from paceline.core.errors import DataError
from paceline.data.decode_array import read_header
from paceline.data.pack.format import KIND_FILE, KIND_PIXELS, KIND_RECORD
from paceline.data.pack.reader import PackSource
from paceline.data.sources.fingerprint import get_labels
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.subset import SourceSubset

PIXELS_FORMAT: Final = "pixels"
_MAX_STAT_CALLS: Final = 20_000
"""Limit of stat calls: 0.2 s on a local disk; on a network file system each one is a message."""
_PERCENTILES: Final = (0, 10, 50, 90, 100)
_PACK_KIND_NAMES: Final = {KIND_RECORD: "indexed JPEGs", KIND_FILE: "kept whole", KIND_PIXELS: PIXELS_FORMAT}


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of a split. `class_counts` are images per class, in label order.

    Of `num_inspected` images, `formats` counts the formats, `sizes` are (height, width), int64 [K, 2], `num_bytes` is
    the sum of bytes, and `num_bad` the number of unreadable ones. `pack_kinds` counts the kinds of records of a pack.
    """

    info: DatasetInfo
    class_counts: NDArray[np.int64]
    num_inspected: int
    formats: Mapping[str, int]
    sizes: NDArray[np.int64]
    num_bytes: int
    num_bad: int
    pack_kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> float:
        """Bytes of the whole split, extrapolated from the inspected images."""
        return self.num_bytes / max(1, self.num_inspected) * self.info.num_images

    @property
    def imbalance(self) -> float:
        """Images of the most frequent class over those of the rarest; infinite with an empty class."""
        fewest, most = int(self.class_counts.min()), int(self.class_counts.max())
        return most / fewest if fewest else float("inf")

    @property
    def percentiles(self) -> Mapping[str, Sequence[int]]:
        """Minimum, 10th, 50th and 90th percentile and maximum of the sides in pixels; empty without sizes."""
        if not len(self.sizes):
            return {}
        sides = {"short side": self.sizes.min(1), "long side": self.sizes.max(1)}
        return {
            name: [int(each) for each in np.percentile(values, _PERCENTILES, method="nearest")]
            for name, values in sides.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        fewest = int(self.class_counts.min())
        return {
            "images": self.info.num_images,
            "classes": dict(zip(self.info.class_names, self.class_counts.tolist(), strict=True)),
            "imbalance": self.imbalance if fewest else None,
            "channels": self.info.channels,
            "image_size": self.info.image_size,
            "looked_at": self.num_inspected,
            "bad": self.num_bad,
            "formats": dict(self.formats),
            "bytes": round(self.total_bytes),
            **{
                side.replace(" ", "_"): dict(zip(("min", "p10", "p50", "p90", "max"), values, strict=True))
                for side, values in self.percentiles.items()
            },
            "pack": dict(self.pack_kinds),
            "mean": self.info.mean,
            "std": self.info.std,
            "notes": list(self.info.notes),
        }


def inspect_source(
    source: Source, limit: int | None, progress: Callable[[int, int], None] = lambda done, total: None
) -> DatasetStats:
    """Inspect at most `limit` images of a split (None: all), evenly spread.

    `progress` gets the numbers of images done and in all.
    """
    # Labels are counted completely. Only the headers of images are read; `paceline data verify` decodes images.
    match source:
        case ArraySource(images=images):
            height, width = images.shape[1:3]
            sizes = np.broadcast_to(np.array([[height, width]], dtype=np.int64), (len(source), 2))
            return DatasetStats(
                source.info, count_classes(source), len(source), {PIXELS_FORMAT: len(source)}, sizes, images.nbytes, 0
            )
        case PackSource():
            return _inspect_pack(source, limit, progress)
    chosen = spread_indices(len(source), limit)
    seen = _scan_headers(source, chosen, progress)
    counts = count_classes(source, seen.labels)
    forms = dict(seen.formats.most_common())
    return DatasetStats(source.info, counts, len(chosen), forms, seen.all_sizes, seen.num_bytes, seen.num_bad)


def _inspect_pack(source: PackSource, limit: int | None, progress: Callable[[int, int], None]) -> DatasetStats:
    # The index has sizes and bytes of all images; only the formats of files stored whole must be read.
    stored_whole = np.flatnonzero(source.kinds == KIND_FILE)
    seen = _scan_headers(source, stored_whole[spread_indices(len(stored_whole), limit)], progress)
    kinds = {name: int((source.kinds == kind).sum()) for kind, name in _PACK_KIND_NAMES.items()}
    sizes = np.stack([source.heights, source.widths], axis=1).astype(np.int64)
    return DatasetStats(
        source.info,
        count_classes(source),
        len(source),
        dict(seen.formats.most_common()),
        sizes[sizes.min(1) > 0],
        _sum_pack_bytes(source),
        seen.num_bad,
        {name: number for name, number in kinds.items() if number},
    )


def _sum_pack_bytes(source: PackSource) -> int:
    return int(source.locate(np.arange(len(source), dtype=np.int64))[2].sum())


def spread_indices(num_images: int, limit: int | None) -> NDArray[np.int64]:
    """Return at most `limit` of 0..num_images-1, int64, ascending and evenly spread."""
    wanted = num_images if limit is None else min(limit, num_images)
    return np.arange(wanted, dtype=np.int64) * num_images // max(1, wanted)


def estimate_source_bytes(source: Source) -> float | None:
    """Return the bytes of a split on its storage, extrapolated from some files if there are many; None if unknown."""
    if not len(source):
        return 0.0
    match source:
        case ArraySource(images=images):
            return images.nbytes
        case PackSource():
            return _sum_pack_bytes(source)
        case ImageFileSource():
            chosen = spread_indices(len(source), _MAX_STAT_CALLS)
            return sum(_stat_bytes(source.get_path(index)) for index in chosen.tolist()) / len(chosen) * len(source)
        case SourceSubset(sources=sources):
            known = [num_bytes for each in sources if (num_bytes := estimate_source_bytes(each)) is not None]
            share = len(source) / sum(map(len, sources))
            return share * sum(known) if len(known) == len(sources) else None
    return None


def _stat_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading it reports the error
        return 0


def count_classes(source: Source, labels_seen: Sequence[int] = ()) -> NDArray[np.int64]:
    """Return the images per class, int64 [C]; counts `labels_seen` if labels are not indexed."""
    known = get_labels(source)
    counted = np.array(labels_seen, dtype=np.int64) if known is None else known
    return np.asarray(np.rint(source.info.count_classes(counted)), dtype=np.int64)


@dataclass
class _HeaderScan:
    """Accumulated statistics of the images inspected so far."""

    labels: list[int] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_bad: int = 0

    @property
    def all_sizes(self) -> NDArray[np.int64]:
        """Sizes, int64 [K, 2]."""
        return np.array(self.sizes, dtype=np.int64).reshape(-1, 2)


def _scan_headers(source: Source, indices: NDArray[np.int64], progress: Callable[[int, int], None]) -> _HeaderScan:
    scan = _HeaderScan()
    for done, index in enumerate(indices.tolist(), start=1):
        try:
            content, label = source.read(index)
            scan.labels.append(label)
            if isinstance(content, bytes):
                scan.num_bytes += len(content)
                header = read_header(content, source.info.pixel_format, name=source.name_of(index))
                scan.formats[header.format] += 1
                scan.sizes.append((header.height, header.width))
            else:
                scan.num_bytes += content.nbytes
                scan.formats[PIXELS_FORMAT] += 1
                scan.sizes.append((content.shape[0], content.shape[1]))
        except DataError:
            scan.num_bad += 1
        progress(done, len(indices))
    return scan

"""`dataset.json`: the classes, channels and normalization of a run's training set, without images and paths."""

from dataclasses import dataclass
from typing import Any, Final, Self, cast

import numpy as np

from paceline.core.dataset import ArraySource, DatasetInfo, Source
from paceline.core.errors import PacelineError
from paceline.core.json_file import read_json
from paceline.core.pixels import FULL_SCALE, PixelType
from paceline.core.run_dir import RunDir
from paceline.data.pack.format import KIND_PIXELS
from paceline.data.pack.reader import PackSource
from paceline.data.sources.fingerprint import get_labels
from paceline.data.sources.subset import SourceSubset

_SCHEMA_VERSION: Final = 1


@dataclass(frozen=True)
class TrainedDataset:
    """`info` of the training split; `is_pixels` is True for pixels of one size, False for image files.

    `class_counts` are images per class, None if labels cannot be read without images. `is_multi_label` tells that the
    run's model gives each class a probability of its own.
    """

    info: DatasetInfo
    is_pixels: bool
    class_counts: tuple[int, ...] | None = None
    is_multi_label: bool = False

    @property
    def are_one_size(self) -> bool:
        """Whether all images have the same size."""
        return self.is_pixels or self.info.image_size is not None

    @classmethod
    def from_source(cls, train: Source, *, is_multi_label: bool = False) -> Self:
        """Return the description of a training split."""
        labels = get_labels(train)
        counts = None if labels is None else np.rint(train.info.count_classes(labels)).astype(np.int64).tolist()
        return cls(train.info, _has_pixels(train), counts and tuple(counts), is_multi_label)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        info = self.info
        return {
            "schema_version": _SCHEMA_VERSION,
            "name": info.name,
            "num_images": info.num_images,
            "class_names": list(info.class_names),
            "channels": info.channels,
            "pixels": info.pixels,
            "image_size": info.image_size and list(info.image_size),
            "mean": list(info.mean),
            "std": list(info.std),
            "is_pixels": self.is_pixels,
            "class_counts": self.class_counts and list(self.class_counts),
            **({"multi_label": True} if self.is_multi_label else {}),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return what `to_dict` described. Raise `LookupError`, `TypeError` or `ValueError` for anything else."""
        if values["schema_version"] != _SCHEMA_VERSION:
            raise ValueError(f"it has version {values['schema_version']!r:.20}, this paceline reads {_SCHEMA_VERSION}")
        size = values["image_size"]
        height, width = (int(size[0]), int(size[1])) if size else (0, 0)
        info = DatasetInfo(
            name=str(values["name"]),
            split="train",
            num_images=int(values["num_images"]),
            class_names=tuple(map(str, values["class_names"])),
            channels=int(values["channels"]),
            image_size=(height, width) if size else None,
            mean=tuple(map(float, values["mean"])),
            std=tuple(map(float, values["std"])),
            pixels=_read_pixel_type(values),
        )
        return cls(info, bool(values["is_pixels"]), is_multi_label=bool(values.get("multi_label", False)))


def _has_pixels(source: Source) -> bool:
    """Return whether `source` holds pixels of one size: in memory, or in a pack of several shards."""
    match source:
        case ArraySource():
            return True
        case PackSource():
            return source.info.image_size is not None and bool((source.kinds == KIND_PIXELS).all())
        case SourceSubset(sources=sources):
            return all(_has_pixels(each) for each in sources)
    return False


def _read_pixel_type(values: dict[str, Any]) -> PixelType:
    pixels = values.get("pixels", "uint8")  # runs of older versions have no other
    if pixels not in FULL_SCALE:
        raise ValueError(f"its pixels are {pixels!r:.20}")
    return cast(PixelType, pixels)


def read_trained_dataset(rundir: RunDir) -> TrainedDataset:
    """Return the dataset of the run in `rundir`. Raise `PacelineError` for a missing or damaged file."""
    try:
        return TrainedDataset.from_dict(read_json(rundir.dataset))
    except FileNotFoundError:
        raise PacelineError(f"{rundir.dataset}: does not exist (copy the whole run directory or train again)") from None
    except (LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        first = " ".join(str(error).split())[:150]
        raise PacelineError(
            f"{rundir.dataset}: cannot be read: {type(error).__name__}: {first} (copy the run directory again)"
        ) from None

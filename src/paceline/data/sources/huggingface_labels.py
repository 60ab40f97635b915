"""The column of labels of a data set that the `datasets` library reads, as numbers of classes. Reads whole columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.sources.places import printable
from paceline.recipe.schema.source import HuggingFace

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Labels:
    """The classes, and the labels of each split by its name, int32 [N]."""

    class_names: tuple[str, ...]
    numbers: dict[str, NDArray[np.int32]]


def read_labels(splits: "Mapping[str, Dataset]", section: HuggingFace, place: str) -> Labels:
    """Return the labels of `splits`, of which the first is the one to train on and decides which classes there are.

    A column of classes (`ClassLabel`) names them itself; numbers and texts are classes in their own order. Raise
    `DataError` for a column that holds neither, has gaps, or has a label in another split that training has not.
    """
    train, *_ = splits.values()
    column = _column(train, section, place)
    listed = _class_names(train, column)
    values = {name: _values(split, column, f"{place}/{name}") for name, split in splits.items()}
    if listed is not None:
        for name, split in splits.items():
            if _class_names(split, column) != listed:
                raise DataError(
                    f"{place}: the classes of {column} differ in '{name}' (save the splits with the same ones)"
                )
            _refuse_unknown(values[name], range(len(listed)), f"{place}/{name}")
        return Labels(listed, {name: np.asarray(labels, dtype=np.int32) for name, labels in values.items()})
    classes = sorted(set(next(iter(values.values()))))
    numbers = {value: number for number, value in enumerate(classes)}
    for name, labels in values.items():
        _refuse_unknown(labels, numbers, f"{place}/{name}")
    return Labels(
        tuple(printable(str(value)) for value in classes),
        {name: np.array([numbers[label] for label in labels], dtype=np.int32) for name, labels in values.items()},
    )


def _column(train: "Dataset", section: HuggingFace, place: str) -> str:
    from datasets import ClassLabel

    found = [name for name, feature in train.features.items() if isinstance(feature, ClassLabel)]
    name = section.label
    if name == "auto":
        name = found[0] if len(found) == 1 else "label"
    if name not in train.features:
        there = ", ".join(map(printable, train.features))
        raise DataError(
            f"data.source.label: {place} has no column '{printable(name)}' (set it to one of {there[:300]})"
        )
    return name


def _class_names(split: "Dataset", column: str) -> tuple[str, ...] | None:
    from datasets import ClassLabel

    feature = split.features.get(column)
    return tuple(map(printable, feature.names)) if isinstance(feature, ClassLabel) else None


def _values(split: "Dataset", column: str, place: str) -> list[Any]:
    """Return the labels as they are stored. Raise `DataError` unless all are numbers, or all are texts."""
    import pyarrow as pa

    if column not in split.features:
        raise DataError(f"data.source.label: {place} has no column '{printable(column)}' (choose another split)")
    stored = split.select_columns([column]).with_format("arrow")[:].column(0)
    kind = stored.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            f"data.source.label: '{printable(column)}' of {place} holds {kind}, not labels (name another column)"
        )
    if stored.null_count:
        raise DataError(f"{place}: {stored.null_count:,} images have no label in '{printable(column)}' (remove them)")
    return list(stored.to_pylist())


def _refuse_unknown(labels: list[Any], known: Any, place: str) -> None:
    strange = set(labels).difference(known)
    if strange:
        index = next(index for index, label in enumerate(labels) if label in strange)
        raise DataError(
            f"{place}[{index}]: has the label {printable(str(labels[index]))[:80]}, which is no class of the training "
            f"split (correct it, or choose another split)"
        )

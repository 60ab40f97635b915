"""Read the label column of a data set of the `datasets` library as class numbers."""

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
class SplitLabels:
    """Class names, and the labels of each split by name, int32 [N]."""

    class_names: tuple[str, ...]
    numbers: dict[str, NDArray[np.int32]]


def read_label_column(splits: "Mapping[str, Dataset]", section: HuggingFace, root: str) -> SplitLabels:
    """Read the labels of `splits`; the first split is the training split and defines the classes.

    A `ClassLabel` column defines its own class names; integers and strings are sorted. Raise `DataError` for a column
    of another type, a missing label, or a label that the training split does not have.
    """
    train, *_ = splits.values()
    column = _find_label_column(train, section, root)
    class_names = _get_class_names(train, column)
    values = {name: _read_label_values(split, column, f"{root}/{name}") for name, split in splits.items()}
    if class_names is not None:
        for name, split in splits.items():
            if _get_class_names(split, column) != class_names:
                raise DataError(
                    f"{root}: the classes of {column} differ in '{name}' (save the splits with the same ones)"
                )
            _check_known_labels(values[name], range(len(class_names)), f"{root}/{name}")
        return SplitLabels(class_names, {name: np.asarray(labels, dtype=np.int32) for name, labels in values.items()})
    classes = sorted(set(next(iter(values.values()))))
    numbers = {value: number for number, value in enumerate(classes)}
    for name, labels in values.items():
        _check_known_labels(labels, numbers, f"{root}/{name}")
    return SplitLabels(
        tuple(printable(str(value)) for value in classes),
        {name: np.array([numbers[label] for label in labels], dtype=np.int32) for name, labels in values.items()},
    )


def _find_label_column(train: "Dataset", section: HuggingFace, root: str) -> str:
    from datasets import ClassLabel

    label_columns = [name for name, feature in train.features.items() if isinstance(feature, ClassLabel)]
    name = section.label
    if name == "auto":
        name = label_columns[0] if len(label_columns) == 1 else "label"
    if name not in train.features:
        columns = ", ".join(map(printable, train.features))
        raise DataError(
            f"data.source.label: {root} has no column '{printable(name)}' (set it to one of {columns[:300]})"
        )
    return name


def _get_class_names(split: "Dataset", column: str) -> tuple[str, ...] | None:
    from datasets import ClassLabel

    feature = split.features.get(column)
    return tuple(map(printable, feature.names)) if isinstance(feature, ClassLabel) else None


def _read_label_values(split: "Dataset", column: str, root: str) -> list[Any]:
    """Read a column of integers or strings. Raise `DataError` for any other type."""
    import pyarrow as pa

    if column not in split.features:
        raise DataError(f"data.source.label: {root} has no column '{printable(column)}' (choose another split)")
    stored = split.select_columns([column]).with_format("arrow")[:].column(0)
    kind = stored.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            f"data.source.label: '{printable(column)}' of {root} holds {kind}, not labels (choose another column)"
        )
    if stored.null_count:
        raise DataError(f"{root}: {stored.null_count:,} images have no label in '{printable(column)}' (remove them)")
    return list(stored.to_pylist())


def _check_known_labels(labels: list[Any], known: Any, root: str) -> None:
    unknown = set(labels).difference(known)
    if unknown:
        index = next(index for index, label in enumerate(labels) if label in unknown)
        raise DataError(
            f"{root}[{index}]: has the label {printable(str(labels[index]))[:80]}, which is not a class of the "
            f"training split (correct it, or choose another split)"
        )

"""Describe answers by the names of images and classes: the result of `paceline probe`, and its tables as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from paceline.core.csv_cells import to_cell
from paceline.core.dataset import Source
from paceline.core.probe_result import CurvePoint, DuplicatePair, ProbedImage, ProbeResult, SuspectLabel, UnusualImage
from paceline.core.results import printable_class_name
from paceline.data.files import printable
from paceline.data.sources.image_files import ImageFileSource
from paceline.inference.probe.answers import Answers
from paceline.inference.probe.backbone import SplitFeatures
from paceline.training.datasets import DecodedSource

_MAX_LISTED: Final = 100
_DIGITS: Final = 6


@dataclass(frozen=True)
class ProbedSplits:
    """Sources and features of both splits; images are numbered training first, then validation."""

    sources: Sequence[Source]
    features: Sequence[SplitFeatures]

    @property
    def class_names(self) -> list[str]:
        """Printable names of the classes."""
        return [printable_class_name(name) for name in self.sources[0].info.class_names]

    def __len__(self) -> int:
        return sum(map(len, self.features))

    def describe(self, number: int) -> ProbedImage:
        """Return the image of a number."""
        split = int(number >= len(self.features[0]))
        row = number - split * len(self.features[0])
        source, features = self.sources[split], self.features[split]
        index = int(features.indices[row])
        return ProbedImage(
            split=source.info.split,
            index=index,
            name=printable_class_name(_listed_name(source, index)),
            label=self.class_names[features.labels[row]],
        )


def build_result(answers: Answers, splits: ProbedSplits, **fields: Any) -> ProbeResult:
    """Return the result; `fields` are those that the answers do not have."""
    separability, train = answers.separability, splits.features[0]
    is_leak = (answers.pairs >= len(train)).any(axis=1) & (answers.pairs < len(train)).any(axis=1)
    linear, linear_val = (separability.accuracy(separability.linear, is_val=each) for each in (False, True))
    knn, knn_val = (separability.accuracy(separability.knn, is_val=each) for each in (False, True))
    return ProbeResult(
        train_images=len(train),
        val_images=len(splits) - len(train),
        total_train=len(splits.sources[0]),
        total_val=sum(map(len, splits.sources[1:])),
        classes=len(splits.class_names),
        dimensions=train.of(answers.stage).shape[1],
        stage=answers.stage,
        is_cached=all(each.is_cached for each in splits.features),
        linear=linear,
        knn=knn,
        linear_val=linear_val,
        knn_val=knn_val,
        num_suspects=len(answers.suspects),
        suspects=[_describe_suspect(answers, splits, *each) for each in islice(answers.suspects.items(), _MAX_LISTED)],
        num_duplicates=int((~is_leak).sum()),
        num_leaks=int(is_leak.sum()),
        duplicates=list(_describe_pairs(answers, splits, _MAX_LISTED)),
        curve=[CurvePoint(images=images, accuracy=accuracy) for images, accuracy in answers.curve],
        current=answers.current,
        doubled=answers.doubled,
        threshold=answers.threshold,
        unusual=[
            UnusualImage(image=splits.describe(each), distance=_rounded(answers.distances[each]))
            for each in np.argsort(-answers.distances, kind="stable")[:_MAX_LISTED].tolist()
        ],
        **fields,
    )


def _listed_name(source: Source, index: int) -> str:
    """Return the path of an image file below its root, or the name of another sample."""
    while isinstance(source, DecodedSource):
        source = source.source
    return printable(source.get_listed_path(index)) if isinstance(source, ImageFileSource) else source.name_of(index)


def _describe_suspect(answers: Answers, splits: ProbedSplits, number: int, suggested: int) -> SuspectLabel:
    separability = answers.separability
    return SuspectLabel(
        image=splits.describe(number),
        confidence=_rounded(separability.confidence[number]),
        suggested=splits.class_names[suggested],
        suggested_confidence=_rounded(separability.pooled[number, suggested]),
        knn_agrees=int(separability.knn[number].argmax()) == suggested,
    )


def _describe_pairs(answers: Answers, splits: ProbedSplits, most: int | None) -> Iterable[DuplicatePair]:
    # Leaks first: they make the accuracy on the validation images too high.
    pairs = [tuple(map(splits.describe, pair)) for pair in answers.pairs.tolist()]
    order = sorted(range(len(pairs)), key=lambda number: pairs[number][0].split == pairs[number][1].split)
    for number in order[:most]:
        first, second = pairs[number]
        yield DuplicatePair(first=first, second=second, similarity=_rounded(answers.similarities[number]))


def images_csv(answers: Answers, splits: ProbedSplits) -> str:
    """Return a row per image, the least likely label first, with the predictions and the distance."""
    separability, names, rows = answers.separability, splits.class_names, []
    for number in np.argsort(separability.confidence, kind="stable").tolist():
        image = splits.describe(number)
        rows.append(
            [
                *_image_cells(image),
                to_cell(names[separability.linear[number].argmax()]),
                to_cell(names[separability.knn[number].argmax()]),
                _rounded(separability.confidence[number]),
                int(number in answers.suspects),
                _rounded(answers.distances[number]),
            ]
        )
    return _to_csv("split index image label linear knn label_confidence suspect distance", rows)


def duplicates_csv(answers: Answers, splits: ProbedSplits) -> str:
    """Return a row per pair of near duplicates, leaks first."""
    rows = [
        [*(cell for each in (pair.first, pair.second) for cell in _image_cells(each)), pair.similarity]
        for pair in _describe_pairs(answers, splits, None)
    ]
    columns = " ".join(f"{name}_{number}" for number in (1, 2) for name in ("split", "index", "image", "label"))
    return _to_csv(f"{columns} similarity", rows)


def _image_cells(image: ProbedImage) -> list[str | int]:
    return [image.split, image.index, to_cell(image.name), to_cell(image.label)]


def _to_csv(columns: str, rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([columns.split(), *rows])
    return file.getvalue()


def _rounded(value: Any) -> float:
    return float(f"{float(value):.{_DIGITS}g}")

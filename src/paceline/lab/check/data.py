"""Check a dataset before a long run: classes, unreadable images, copies and leaks, and likely wrong labels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Datasets, Source
from paceline.core.results import printable_class_name
from paceline.core.units import count, join_few, share
from paceline.data.files import printable
from paceline.data.sources.fingerprint import get_labels
from paceline.lab.check.near_duplicates import CopyGroup, DuplicateScan, ImageRef
from paceline.lab.doctor.check import DoctorFinding, failure, ok, warning

MAX_PAIRS: Final = 200
_SHOWN: Final = 5
_MAX_IMBALANCE: Final = 10.0
"""Ratio of the largest to the smallest class above which a class weight or a balanced sampler is advised."""
_MAX_LEAKED: Final = 0.01
"""Share of leaked validation images from which the accuracy can be wrong by a percentage point."""
_MAX_COPIES: Final = 0.05


def check_classes(datasets: Datasets) -> Iterator[DoctorFinding]:
    """Yield findings on the number of images per split and class."""
    train, val = datasets.train, datasets.val
    names = [printable_class_name(name) for name in train.info.class_names]
    sizes = f"{count(len(train), 'training image')} and {count(len(val), 'validation image')}"
    yield DoctorFinding("images", *ok(f"{sizes} of {count(len(names), 'class', 'classes')}"))
    in_train, in_val = _count_classes(train), _count_classes(val)
    if in_train is None or in_val is None or not len(names):
        yield DoctorFinding("classes", *ok("not counted: the labels cannot be read without the images"))
        return
    fewest, most = int(in_train.argmin()), int(in_train.argmax())
    text = f"from {int(in_train[fewest]):,} ({names[fewest]}) to {int(in_train[most]):,} images ({names[most]})"
    if in_train[fewest] == in_train[most]:
        text = f"{count(int(in_train[most]), 'training image')} each"
    ratio = float(in_train[most]) / max(1.0, float(in_train[fewest]))
    if ratio > _MAX_IMBALANCE:
        advice = "train.class_weights=balanced, or data.sampler.name=balanced; compare the balanced accuracy"
        yield DoctorFinding("classes", *warning(f"{text}, a ratio of {ratio:,.0f}", advice))
    else:
        yield DoctorFinding("classes", *ok(text))
    if untrained := _names_of(names, (in_val > 0) & (in_train == 0)):
        yield DoctorFinding("only in val", *failure(untrained, "add training images, or remove the classes"))
    if len(val) and (unseen := _names_of(names, (in_train > 0) & (in_val == 0))):
        yield DoctorFinding("only in train", *warning(unseen, "add validation images: nothing measures these classes"))


def _names_of(names: Sequence[str], which: NDArray[np.bool_]) -> str:
    found = [name for name, is_one in zip(names, which.tolist(), strict=True) if is_one]
    return f"{count(len(found), 'class', 'classes')}: {join_few(found)}" if found else ""


def _count_classes(source: Source) -> NDArray[Any] | None:
    labels = get_labels(source)
    return None if labels is None else source.info.count_classes(labels)


def check_images(scan: DuplicateScan, datasets: Datasets, *, skips_bad: bool) -> Iterator[DoctorFinding]:
    """Yield findings on unreadable images, on copies across splits, with several labels, and others."""
    is_whole = scan.images == scan.total
    sample = f" of {scan.images:,}" if is_whole else f" in a random sample of {scan.images:,}"
    among = "" if is_whole else sample
    if scan.bad:
        found = f"{count(len(scan.bad), 'image')}{sample}: {printable(scan.bad[0].name)} {scan.bad[0].reason}"
        advice = "paceline data verify lists them all; remove or replace them"
        outcome = warning(found, advice) if skips_bad else failure(found, f"{advice}, or data.on_bad_image=skip")
        yield DoctorFinding("unreadable", *outcome)
    else:
        yield DoctorFinding("unreadable", *ok(f"none of {scan.images:,}" if is_whole else f"none{sample}"))
    leaks = [group for group in scan.groups if group.in_both_splits]
    if leaks:
        of_val = scan.leaked / max(1, round(len(datasets.val) * scan.images / max(1, scan.total)))
        found = f"{count(scan.leaked, 'validation image')} ({share(of_val)}) also in training{among}"
        advice = "remove one of each: the accuracy on them says nothing about new images"
        outcome = (failure if of_val >= _MAX_LEAKED else warning)(f"{found}\n{_pair_lines(leaks, datasets)}", advice)
        yield DoctorFinding("leaks", *outcome)
    elif len(datasets.val):
        yield DoctorFinding("leaks", *ok(f"no validation image is also in training{among}"))
    mixed = [group for group in scan.groups if group.in_two_classes]
    if mixed:
        found = f"{count(len(mixed), 'image')}{sample} with different labels\n{_pair_lines(mixed, datasets)}"
        yield DoctorFinding("two labels", *warning(found, "correct the labels, or remove the images"))
    others = [group for group in scan.groups if not (group.in_both_splits or group.in_two_classes)]
    num_extra = sum(group.images - 1 for group in others)
    text = f"{count(num_extra, 'further copy', 'further copies')}{sample} within a split and class"
    if num_extra > _MAX_COPIES * scan.images:
        found = f"{text}\n{_pair_lines(others, datasets)}"
        yield DoctorFinding("copies", *warning(found, "remove them: they count several times"))
    else:
        yield DoctorFinding("copies", *ok(text))


def check_labels(errors: Mapping[int, int], images: Sequence[ImageRef], run: str, source: Source) -> DoctorFinding:
    """Return the finding on likely wrong labels of `images`, by the model of `run`.

    `errors` has the likely class of images by position.
    """
    basis = f"of {count(len(images), 'validation image')}, by the model of {run} and confident learning"
    if not errors:
        return DoctorFinding("labels", *ok(f"none likely to be wrong {basis}"))
    lines = [
        f"{each['image']} is {each['label']}, likely {each['likely']}"
        for each in labels_to_list(errors, images, source)[:_SHOWN]
    ]
    found = "\n".join([f"{len(errors):,} likely to be wrong {basis}", *lines, *_more(len(errors))])
    return DoctorFinding("labels", *warning(found, "look at them: a model that errs can be at fault, too"))


def copies_to_dict(scan: DuplicateScan, datasets: Datasets) -> dict[str, Any]:
    """Return plain values of a scan, with at most `MAX_PAIRS` pairs."""
    counts = {"images": scan.images, "total": scan.total, "leaked": scan.leaked, "flat": scan.flat}
    pairs = [
        {
            **{name: value for name, value in asdict(group).items() if name not in ("first", "second")},
            **{name: _image_to_dict(getattr(group, name), datasets) for name in ("first", "second")},
        }
        for group in scan.groups[:MAX_PAIRS]
    ]
    return {**counts, "groups": len(scan.groups), "pairs": pairs, "unreadable": [each.name for each in scan.bad]}


def labels_to_list(errors: Mapping[int, int], images: Sequence[ImageRef], source: Source) -> list[dict[str, str]]:
    """Return plain values of the first `MAX_PAIRS` likely label errors."""
    return [
        {
            "image": printable(images[position].name),
            "label": _class_text(source, images[position].label),
            "likely": _class_text(source, likely),
        }
        for position, likely in islice(errors.items(), MAX_PAIRS)
    ]


def _image_to_dict(image: ImageRef, datasets: Datasets) -> dict[str, str]:
    return {
        "split": image.split,
        "image": printable(image.name),
        "label": _class_text(datasets.train, image.label),
    }


def _pair_lines(groups: Sequence[CopyGroup], datasets: Datasets) -> str:
    """Return a line for each of the first pairs, with paths, splits and labels."""
    lines = []
    for group in groups[:_SHOWN]:
        one, two = (
            f"{printable(each.name)} ({each.split}, {_class_text(datasets.train, each.label)})"
            for each in (group.first, group.second)
        )
        lines.append(f"{one} = {two}")
    return "\n".join([*lines, *_more(len(groups))])


def _more(number: int) -> list[str]:
    return [f"and {number - _SHOWN:,} more (--json lists up to {MAX_PAIRS})"] if number > _SHOWN else []


def _class_text(source: Source, label: int) -> str:
    info = source.info
    if info.targets is None:
        return printable_class_name(info.class_names[label])
    names = [name for name, value in zip(info.class_names, info.targets.rows[label], strict=True) if value > 0]
    return "+".join(map(printable_class_name, names[:_SHOWN])) or "none"

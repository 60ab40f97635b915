"""Copies of images, re-saved and resized, within and across splits; different images are none."""

import io
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from PIL import Image, ImageDraw

from paceline.core.dataset import DatasetInfo, Datasets
from paceline.lab.check import near_duplicates
from paceline.lab.check.data import check_classes, check_images, copies_to_dict
from paceline.lab.check.near_duplicates import find_near_duplicates
from paceline.lab.doctor.check import find_worst_state

INFO = DatasetInfo("made", "train", 0, ("cat", "dog"), 3, None, (0.5,) * 3, (0.5,) * 3)


@dataclass(frozen=True)
class Files:
    info: DatasetInfo
    content: list[tuple[bytes, int]]

    def __len__(self) -> int:
        return len(self.content)

    def read(self, index):
        return self.content[index]

    def name_of(self, index):
        return f"{self.info.split}/{index}.jpg"


def picture(seed: int, size: tuple[int, int] = (240, 200)) -> Image.Image:
    """Return shapes on a gradient, different ones for each seed."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(np.linspace(0, 255, size[0] * size[1]).reshape(size[::-1]).astype(np.uint8)).convert("RGB")
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        left, top = (int(each) for each in rng.integers(0, 180, 2))
        width, height = (int(each) for each in rng.integers(20, 90, 2))
        draw.ellipse((left, top, left + width, top + height), fill=tuple(int(each) for each in rng.integers(0, 255, 3)))
    return image


def save(image: Image.Image, format: str = "JPEG", **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def datasets(train, val=()) -> Datasets:
    splits = (("train", train), ("val", val))
    sources = [Files(replace(INFO, split=split, num_images=len(files)), [*files]) for split, files in splits]
    return Datasets(*sources)


def scan(train, val=(), most=10_000):
    return find_near_duplicates(datasets(train, val), most=most, threads=2)


@pytest.mark.parametrize(
    "copy",
    [
        lambda image: save(image, quality=40),
        lambda image: save(image, "PNG"),
        lambda image: save(image.resize((120, 100))),
        lambda image: save(image.resize((300, 250), Image.Resampling.BICUBIC), quality=60),
        lambda image: save(image.point(lambda value: min(255, round(1.05 * value)))),
    ],
    ids=["quality 40", "PNG", "half", "larger", "brighter"],
)
def test_a_copy_is_found_across_splits_and_other_images_are_none(copy) -> None:
    train = [(save(picture(seed), quality=95), seed % 2) for seed in range(30)]
    found = scan(train, [(copy(picture(7)), 1), (save(picture(99)), 0)])
    (group,) = found.groups
    assert (group.first.split, group.first.index, group.second.split, group.second.index) == ("train", 7, "val", 0)
    assert group.in_both_splits and not group.in_two_classes and not group.is_exact
    assert (found.images, found.leaked, found.flat) == (32, 1, 0)


def test_groups_are_chained_exact_ones_named_and_the_most_harmful_first() -> None:
    one, two, three = (save(picture(seed), quality=95) for seed in (1, 2, 3))
    found = scan([(one, 0), (one, 0), (two, 0), (two, 1), (three, 1)], [(three, 0), (save(picture(3), quality=50), 1)])
    kinds = [(each.images, each.in_both_splits, each.in_two_classes, each.is_exact) for each in found.groups]
    assert kinds == [(3, True, True, True), (2, False, True, True), (2, False, False, True)]
    assert found.groups[0].second.label == 0 and found.leaked == 2


def test_flat_images_are_compared_by_content_alone() -> None:
    blank = [(save(Image.new("RGB", (64, 64), (value, value, value)), "PNG"), 0) for value in range(0, 200, 5)]
    found = scan([*blank, blank[3]])
    assert found.flat == len(blank) + 1 and [each.images for each in found.groups] == [2]


def test_unreadable_images_are_listed_in_order_whichever_thread_is_first() -> None:
    third = threading.Event()

    class Source(Files):
        def read(self, index):
            if index == 2:
                third.set()
            assert index or third.wait(30)  # the first image is read after the second
            return super().read(index)

    data = replace(datasets([]), train=Source(INFO, [(b"no image", 0)] * 3))
    found = find_near_duplicates(data, most=9, threads=2)
    assert [each.name for each in found.bad] == ["train/0.jpg", "train/1.jpg", "train/2.jpg"]


def test_an_unreadable_image_is_listed_and_a_large_dataset_is_sampled_the_same_way() -> None:
    train = [(save(picture(seed)), 0) for seed in range(12)]
    found = scan([*train, (b"no image", 0)])
    assert [each.name for each in found.bad] == ["train/12.jpg"] and found.images == 13
    samples = [scan(train * 2, most=9) for _ in range(2)]
    assert samples[0] == samples[1] and (samples[0].images, samples[0].total) == (9, 24)


def test_pairs_across_bands_are_those_of_all_pairs(monkeypatch) -> None:
    """Multi-index hashing is exact: compared with all pairs of random hashes, many of them near."""
    rng = np.random.default_rng(0)
    centers = rng.integers(0, 2**63, 40, dtype=np.uint64)
    hashes = np.concatenate([centers ^ (np.uint64(1) << rng.integers(0, 64, 40, dtype=np.uint64)) for _ in range(8)])
    flip = np.uint64(1) << rng.integers(0, 64, len(hashes), dtype=np.uint64)
    hashes = np.concatenate([hashes, hashes ^ flip])
    small = np.zeros((len(hashes), 32, 32), np.uint8)
    monkeypatch.setattr(near_duplicates, "_are_near", lambda small, pairs: np.ones(len(pairs), bool))
    found = near_duplicates._pairs_of_copies(hashes, small, np.zeros(len(hashes), bool))
    bits = [[bin(int(one) ^ int(two)).count("1") for two in hashes] for one in hashes]
    near = np.argwhere(np.triu(np.array(bits) <= near_duplicates.MAX_DISTANCE, 1))
    assert len(near) > 300 and (found == near).all()


def test_a_leak_is_an_error_from_one_percent_and_two_labels_a_warning() -> None:
    one = save(picture(1))
    data = datasets([(one, 0), (save(picture(2)), 1), (save(picture(2)), 0)], [(save(picture(1), quality=50), 0)])
    found = {
        each.name: each for each in check_images(find_near_duplicates(data, most=99, threads=1), data, skips_bad=False)
    }
    assert {name: each.state for name, each in found.items()} == {
        "unreadable": "ok", "leaks": "error", "two labels": "warning", "copies": "ok"
    }  # fmt: skip
    assert "train/0.jpg (train, cat) = val/0.jpg (val, cat)" in found["leaks"].found
    assert "train/1.jpg (train, dog) = train/2.jpg (train, cat)" in found["two labels"].found
    values = copies_to_dict(find_near_duplicates(data, most=99, threads=1), data)
    assert (values["leaked"], values["groups"]) == (1, 2)
    assert values["pairs"][0]["second"] == {"split": "val", "image": "val/0.jpg", "label": "cat"}


@pytest.mark.parametrize(("skips", "state"), [(False, "error"), (True, "warning")])
def test_an_unreadable_image_fails_a_run_unless_it_skips_them(skips, state) -> None:
    data = datasets([(b"no image", 0), (save(picture(1)), 1)])
    found = [*check_images(find_near_duplicates(data, most=99, threads=1), data, skips_bad=skips)]
    assert find_worst_state(found) == state and "train/0.jpg" in found[0].found


def test_classes_without_training_images_are_an_error_and_imbalance_is_a_warning(monkeypatch) -> None:
    labels = {"train": np.array([0] * 50 + [1] * 2), "val": np.array([0, 1])}
    monkeypatch.setattr("paceline.lab.check.data.get_labels", lambda source: labels[source.info.split])
    data = datasets([(b"", 0)] * 52, [(b"", 0)] * 2)
    assert {each.name: each.state for each in check_classes(data)} == {"images": "ok", "classes": "warning"}
    labels["train"] = np.array([0] * 5)
    found = {each.name: each for each in check_classes(data)}
    assert found["only in val"].state == "error" and "dog" in found["only in val"].found
    labels["train"], labels["val"] = np.array([0, 1]), np.array([1])
    found = {each.name: each for each in check_classes(data)}
    assert found["only in train"].state == "warning" and "cat" in found["only in train"].found

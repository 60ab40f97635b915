"""The digest of a dataset changes with its content, and with nothing else."""

import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets
from paceline.data.sources.builtin import load_digits
from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.sources.folder import load_folder
from paceline.recipe.schema.source import Folder


@pytest.fixture
def photographs(tmp_path):
    """Return a function that loads a folder of two classes, with a few more files."""

    def make(name, *more, channels=3):
        for path in ("train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "val/cat/1.png", "val/dog/1.png", *more):
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4)).save(tmp_path / name / path)
        return load_folder(Folder(root=str(tmp_path / name), channels=channels))

    return make


# matrix: 7
def test_the_digest_of_a_folder_does_not_depend_on_its_path(photographs):
    digest = digest_datasets(photographs("one"))
    assert len(digest) == 16 and int(digest, 16) > 0
    assert digest_datasets(photographs("two")) == digest


# matrix: 7
def test_a_file_added_removed_or_moved_changes_the_digest(photographs):
    digests = [
        digest_datasets(photographs("one")),
        digest_datasets(photographs("train", "train/cat/3.png")),
        digest_datasets(photographs("class", "train/dog/3.png")),
        digest_datasets(photographs("val", "val/cat/3.png")),
        digest_datasets(photographs("classes", "train/emu/1.png")),
        digest_datasets(photographs("grey", channels=1)),
    ]
    assert len(set(digests)) == len(digests)


# matrix: 7
def test_pixels_labels_and_classes_change_the_digest():
    data = load_digits()
    train = data.train
    assert isinstance(train, ArraySource)
    pixels, labels = train.images.copy(), train.labels.copy()
    pixels[7, 3, 3] ^= 1
    labels[7] = (labels[7] + 1) % 10
    names = replace(train.info, class_names=(*"abcdefghij",))
    others = [
        data,
        Datasets(replace(train, images=pixels), data.val),
        Datasets(replace(train, labels=labels), data.val),
        Datasets(replace(train, info=names), data.val),
        Datasets(data.val, data.train),
    ]
    digests = [digest_datasets(other) for other in others]
    assert len(set(digests)) == len(digests)
    assert digest_datasets(load_digits()) == digests[0]


def test_cifar_takes_less_than_a_second_of_a_core():
    """A tenth of a second of a core with SHA instructions, and several times that on one without."""
    info = DatasetInfo("made", "train", 50_000, ("a",), 3, (32, 32), (0.5,) * 3, (0.25,) * 3)
    pixels = np.zeros((60_000, 32, 32, 3), np.uint8)
    source = ArraySource(info, pixels, np.zeros(60_000, np.int64))
    started = time.process_time()
    digest_datasets(Datasets(source, replace(source, images=pixels[:1], labels=source.labels[:1])))
    assert time.process_time() - started < 1

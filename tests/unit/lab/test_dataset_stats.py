"""Statistics of a split: classes, sizes, formats and bytes, of all images or of some."""

import math
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.native import load_native
from paceline.data.pack.reader import open_pack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.subset import SourceSubset, select_samples
from paceline.lab.dataset_stats import estimate_source_bytes, inspect_source, spread_indices
from paceline.recipe.schema.source import Folder


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Datasets:
    """Return five images of two sizes and formats to train on, and one that is no image."""
    root = tmp_path_factory.mktemp("photos")
    for number, (size, form) in enumerate([((20, 10), "jpg"), ((20, 10), "jpg"), ((8, 30), "png"), ((20, 10), "jpg")]):
        path = root / f"train/{'cat' if number < 3 else 'dog'}/{number}.{form}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    (root / "train/dog/9.jpg").write_bytes(b"no image")
    (root / "val/cat").mkdir(parents=True)
    (root / "val/dog").mkdir()
    Image.new("RGB", (4, 4)).save(root / "val/cat/0.jpg")
    Image.new("RGB", (4, 4)).save(root / "val/dog/0.jpg")
    return build_datasets(Folder(root=str(root)), may_download=False)


def test_files_are_inspected(photographs):
    calls = []
    found = inspect_source(photographs.train, None, lambda done, total: calls.append((done, total)))
    assert calls == [(number, 5) for number in range(1, 6)]
    assert found.class_counts.tolist() == [3, 2] and found.imbalance == 1.5
    assert (found.formats, found.num_bad, found.num_inspected) == ({"JPEG": 3, "PNG": 1}, 1, 5)
    assert found.sizes.tolist() == [[10, 20], [10, 20], [30, 8], [10, 20]]
    assert found.percentiles == {"short side": [8, 8, 10, 10, 10], "long side": [20, 20, 20, 30, 30]}
    assert found.total_bytes == estimate_source_bytes(photographs.train) == found.num_bytes


def test_of_many_only_some_are_inspected_and_the_bytes_are_extrapolated(photographs):
    found = inspect_source(photographs.train, 2)
    assert (found.num_inspected, found.formats, found.class_counts.tolist()) == (2, {"JPEG": 1, "PNG": 1}, [3, 2])
    assert found.total_bytes == pytest.approx(found.num_bytes * 5 / 2)  # of rounding


def test_what_is_chosen_is_evenly_spread():
    assert spread_indices(10, 4).tolist() == [0, 2, 5, 7]
    assert spread_indices(3, None).tolist() == spread_indices(3, 9).tolist() == [0, 1, 2]


def test_pixels_have_one_size():
    info = DatasetInfo("x", "train", 3, ("a", "b", "c"), 3, (4, 6), (0.5,) * 3, (0.5,) * 3)
    source = ArraySource(info, np.zeros((3, 4, 6, 3), dtype=np.uint8), np.array([0, 0, 1]))
    found = inspect_source(source, 1)
    assert (found.num_inspected, found.formats, found.num_bytes) == (3, {"pixels": 3}, 3 * 72)
    assert found.percentiles == {"short side": [4] * 5, "long side": [6] * 5}
    assert math.isinf(found.imbalance) and found.to_dict()["imbalance"] is None
    assert estimate_source_bytes(select_samples(source, np.array([1]))) == 72


@pytest.mark.skipif(load_native() is None, reason="the native core is not built")
def test_a_pack_reports_all_its_images(photographs, tmp_path):
    write_pack(photographs, tmp_path / "x.pack", PackOptions(skip_bad=True), lambda done, total: None, 1)
    train = open_pack(tmp_path / "x.pack").train
    found = inspect_source(train, 1)
    assert found.pack_kinds == {"indexed JPEGs": 3, "kept whole": 2}
    assert found.class_counts.tolist() == [3, 2]
    assert sorted(found.sizes.tolist()) == [[10, 20], [10, 20], [10, 20], [30, 8]]
    assert (found.num_inspected, found.formats) == (5, {"PNG": 1})
    assert found.num_bytes == estimate_source_bytes(train) > 0


def test_part_of_a_set_takes_its_share_of_bytes(photographs):
    train, part = photographs.train, np.array([0, 1])
    files = sum(train.get_path(index).stat().st_size for index in (0, 1))
    assert estimate_source_bytes(select_samples(train, part)) == files
    whole = estimate_source_bytes(train)
    assert estimate_source_bytes(SourceSubset(train.info, (train,), part)) == whole * 2 / 5


def test_a_set_that_no_one_knows_the_bytes_of(photographs):
    class Other:
        info = photographs.train.info

        def __len__(self) -> int:
            return 1

        def read(self, index: int):
            file = BytesIO()
            Image.new("L", (2, 3)).save(file, "PNG")
            return file.getvalue(), 1

        def name_of(self, index: int) -> str:
            return "x"

    assert estimate_source_bytes(Other()) is None
    found = inspect_source(Other(), None)
    assert found.class_counts.tolist() == [0, 1] and found.sizes.tolist() == [[3, 2]]

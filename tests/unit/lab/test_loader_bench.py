"""The loader benchmark: windows, turns, cases and their results. Speeds themselves are not tested."""

import os
import signal
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.native import load_native
from paceline.data.pack.reader import open_pack
from paceline.data.sources.build import build_datasets
from paceline.lab.loader_bench import (
    BenchCase,
    LoaderCase,
    LoaderMeasurement,
    MeasurementWindow,
    build_bench_plan,
    count_images,
    measure_in_subprocess,
    run_bench,
    sample_datasets,
    summarize_measurements,
)
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.source import Folder, Synthetic

PIXELS = Synthetic(num_images=100, num_val_images=10, image_size=8)
WINDOW = MeasurementWindow(seconds=0.0, batch_size=4, image_size=8, num_images=8)
needs_core = pytest.mark.skipif(load_native() is None, reason="the native core is not built")


FOUND = LoaderMeasurement(images=100, wall_s=2.0, cpu_s=3.0, bytes_read=1000, disk_bytes=500, memory_bytes=7)


@dataclass(frozen=True)
class Told(BenchCase):
    """A case whose measurements are known."""

    cores: int = 2

    def measure(self, window: MeasurementWindow, cache: str) -> LoaderMeasurement:
        return FOUND


@dataclass(frozen=True)
class Fails(Told):
    def measure(self, window: MeasurementWindow, cache: str) -> LoaderMeasurement:
        if self.name == "dies":
            os._exit(3)
        if self.name == "is interrupted":
            signal.raise_signal(signal.SIGINT)
            return replace(FOUND, images=0)
        raise DataError("a.jpg: is empty (remove it)")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Datasets:
    root = tmp_path_factory.mktemp("photos")
    noise = np.random.default_rng(0).integers(0, 256, (8, 16, 24, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        folder = root / ("train", "val")[number % 2] / ("cat", "dog")[number // 4]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return build_datasets(Folder(root=str(root)), may_download=False)


@pytest.fixture(scope="module")
def packed(photographs, tmp_path_factory) -> Datasets:
    out = tmp_path_factory.mktemp("pack") / "photos.pack"
    write_pack(photographs, out, PackOptions(), lambda done, total: None, 1)
    return open_pack(out)


def photo_data():
    patch = Patch.parse(["data.source.root=x", "data.image_size=8", "data.batch_size=2", "data.cache=off"])
    return load("folder", patch).recipe.data


def test_a_window_begins_behind_the_warm_up_and_ends_with_a_batch():
    found = count_images(iter([1, 2, 4, 8, 16]), seconds=0.0, num_warmup=2)
    assert found.images == 4  # the first batch behind the warm-up takes longer than no time
    assert found.wall_s > 0 and found.cpu_s >= 0
    assert 0 <= found.lost_cpu <= 1


def test_a_window_ends_where_there_are_no_more_batches():
    assert count_images(iter([3, 3, 3]), seconds=1e9, num_warmup=0).images == 9


def test_turns_are_summed_up_by_their_medians():
    turns = [
        LoaderMeasurement(100, wall_s, 3.0, 1000, 500, memory) for wall_s, memory in ((1.0, 5), (2.0, 9), (4.0, 7))
    ]
    row = summarize_measurements(Told("x"), "warm", turns)
    assert (row.images_per_s, row.spread, row.images_per_s_per_core) == (50.0, (25.0, 100.0), 25.0)
    assert (row.cpu_ms, row.bytes_read, row.disk_bytes, row.memory_bytes) == (30.0, 10.0, 5.0, 9)
    assert (row.kind, row.n, row.cores) == ("floor", 3, 2)
    assert row.to_dict()["cache"] == "warm"


def test_all_have_their_turn_in_every_round_forwards_and_backwards():
    prepared, calls = [], []
    turns = [(Told("a"), "warm"), (Told("b"), "warm"), (Told("a"), "cold")]
    rows = run_bench(
        turns,
        2,
        WINDOW,
        prepare=lambda case, cache: prepared.append((case.name, cache)),
        progress=lambda done, total, name: calls.append((done, total, name)),
    )
    order = [("a", "warm"), ("b", "warm"), ("a", "cold")]
    assert prepared == [*order, *order[::-1]]
    assert calls == [(number, 6, name) for number, (name, _) in enumerate(prepared)]
    assert [(row.name, row.cache, row.n) for row in rows] == [("a", "warm", 2), ("b", "warm", 2), ("a", "cold", 2)]


def test_what_a_contender_raises_is_raised_here():
    with pytest.raises(DataError, match=r"^a\.jpg: is empty"):
        measure_in_subprocess(Fails("raises"), WINDOW, "warm")


def test_an_interrupt_from_the_terminal_is_left_to_the_parent():
    assert measure_in_subprocess(Fails("is interrupted"), WINDOW, "warm").images == 0


def test_a_contender_that_dies_is_reported():
    with pytest.raises(DataError, match="dies: exited with code 3 during the measurement"):
        measure_in_subprocess(Fails("dies"), WINDOW, "warm")


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_a_loader_is_measured_in_a_process_of_its_own(photographs, cache):
    loading = LoaderCase.build("inline", "folder", photographs.train, photo_data(), 0)
    found = measure_in_subprocess(loading, MeasurementWindow(0.0, 2, 8, 4), cache)
    assert found.images == 2 and found.wall_s > 0
    sizes = [Path(photographs.train.name_of(index)).stat().st_size for index in range(4)]
    assert 2 * min(sizes) <= found.bytes_read <= 2 * max(sizes)


def test_a_cold_loader_makes_one_pass_at_most(photographs):
    loading = LoaderCase.build("inline", "folder", photographs.train, photo_data(), 0)
    assert loading.measure(MeasurementWindow(60.0, 2, 8, 4), "cold").images == 4


@needs_core
def test_photographs_are_loaded_from_files_and_from_a_pack(photographs, packed):
    sources = {"folder": photographs.train, "pack": packed.train}
    contest = build_bench_plan(photo_data(), sources, num_images=99, seconds=0.0, workers=1, is_recipe=False)
    assert [each.name for each in contest.cases] == [
        "inline, folder",
        "threads, folder",
        "processes, folder",
        "native, folder",
        "threads, pack",
        "processes, pack",
        "native, pack",
        "ceiling: entropy decode",
        "ceiling: to planes",
        "ceiling: native decode",
        "ceiling: memcpy",
    ]
    assert contest.left_out == ()
    assert contest.window == MeasurementWindow(0.0, 2, 8, 4)
    cold = [case.name for case, cache in contest.list_entries(cold=True) if cache == "cold"]
    assert cold == [each.name for each in contest.cases if isinstance(each, LoaderCase)]
    for each in contest.cases:
        assert each.measure(contest.window, "warm").images > 0, each.name


def test_without_the_core_native_is_left_out_and_why_is_reported(photographs, packed, monkeypatch):
    monkeypatch.setattr("paceline.data.loaders.choose.load_native", lambda: None)
    monkeypatch.setattr("paceline.lab.loader_bench.load_native", lambda: None)
    contest = build_bench_plan(
        photo_data(), {"pack": packed.train}, num_images=99, seconds=0.0, workers=1, is_recipe=False
    )
    ((name, reason),) = contest.left_out
    assert name == "native, pack" and "the native core was not built" in reason
    assert [each.name for each in contest.cases] == ["threads, pack", "processes, pack", "ceiling: memcpy"]


def test_pixels_are_loaded_by_the_rank_or_lie_on_the_device():
    source = build_datasets(PIXELS, may_download=False).train
    contest = build_bench_plan(
        photo_data(), {"pixels": source}, num_images=100, seconds=0.0, workers=2, is_recipe=False
    )
    assert [each.name for each in contest.cases] == ["inline, pixels", "device, pixels", "ceiling: memcpy"]
    assert [section.name for section in contest.cases[0].data.augment] == ["pad_crop", "flip"]
    assert contest.list_entries(cold=True) == contest.list_entries(cold=False)
    for each in contest.cases:
        assert each.measure(contest.window, "warm").images > 0, each.name


def test_some_images_are_evenly_spread_and_read_as_they_are(photographs):
    some = sample_datasets(photographs, 2)
    assert (len(some.train), some.train.info.num_images, len(some.val)) == (2, 2, 1)
    assert [some.train.name_of(index) for index in range(2)] == [photographs.train.name_of(index) for index in (0, 2)]
    assert some.train.read(1) == photographs.train.read(2)
    assert sample_datasets(photographs, 99).train is photographs.train
    pixels = build_datasets(PIXELS, may_download=False)
    some_pixels = sample_datasets(pixels, 3).train
    np.testing.assert_array_equal(some_pixels.images[1], pixels.train.images[33])


def test_counting_is_of_batches_that_never_end():
    assert count_images(repeat(5), seconds=0.0, num_warmup=3).images == 5

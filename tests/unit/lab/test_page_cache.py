"""The kernel's cache before a run: exactly what the run reads is there or gone, and a cold run that is none is refused.

What the kernel holds of a file is asked of it (mincore); where it keeps files in any case, as on tmpfs, there is
nothing to test.
"""

import ctypes
import mmap
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import RecipeError
from paceline.data.bad_images import ImageError
from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.order import TrainOrder
from paceline.data.sampler import ShuffleSampler
from paceline.data.sources.build import build_datasets
from paceline.lab.page_cache import (
    check_reads_once,
    evict_files,
    list_source_files,
    prepare_page_cache,
    read_into_cache,
)
from paceline.lab.trial import apply_patch
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Folder, Lmdb, Pack, SourceSection

NUM_TRAIN = 12


def is_held(path: Path) -> bool:
    """Return whether the kernel holds any page of a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as pages:
        num_pages = -(-len(pages) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * num_pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        code = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(pages)), found)
        del start
    assert code == 0, os.strerror(ctypes.get_errno())
    return any(byte & 1 for byte in found)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    noise = np.random.default_rng(0).integers(0, 256, (NUM_TRAIN + 2, 40, 40, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        split = "train" if number < NUM_TRAIN else "val"
        path = root / split / ("cat", "dog")[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    _flushed(root)
    return root


def _flushed(root: Path) -> None:
    """Have all on the disk: what is not yet written cannot be dropped."""
    for path in [root, *root.rglob("*")]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    probe = next(path for path in [root, *root.rglob("*")] if path.is_file())
    evict_files([probe])
    if is_held(probe):
        pytest.skip(f"the kernel keeps what is in {root}, as on tmpfs")


def recipe_of(source: SourceSection, **settings: object) -> Recipe:
    """Return four images a step, two of warm-up and one that is counted at most."""
    base = load("folder", Patch((("data.source", source.model_dump()),))).recipe
    said = {"data.batch_size": 4, "train.steps": 2, "measure.warmup_steps": 1, "train.eval_every": "off", **settings}
    return apply_patch(base, Patch(tuple(said.items())))


def as_folder(root: Path, tmp_path: Path) -> SourceSection:
    return Folder(root=str(root))


def as_pack(root: Path, tmp_path: Path) -> SourceSection:
    datasets = build_datasets(Folder(root=str(root)), may_download=False)
    write_pack(datasets, tmp_path / "photos.pack", PackOptions(), lambda done, total: None, 1)
    return Pack(root=str(tmp_path / "photos.pack"))


def as_lmdb(root: Path, tmp_path: Path) -> SourceSection:
    pytest.importorskip("lmdb", reason="the package lmdb is not installed: pip install lmdb")
    datasets = build_datasets(Folder(root=str(root)), may_download=False)
    write_lmdb(datasets, tmp_path / "lmdb", lambda done, total: None)
    return Lmdb(root=str(tmp_path / "lmdb"))


@pytest.mark.parametrize("form", [as_folder, as_pack, as_lmdb])
def test_files_are_out_of_the_cache_before_a_cold_run_and_in_it_before_a_warm_one(form, root, tmp_path) -> None:
    recipe = recipe_of(form(root, tmp_path))
    files = list_source_files(build_datasets(recipe.data.source, may_download=False).train)
    evict_files(files)
    assert files and not any(is_held(path) for path in files)
    prepare_page_cache(recipe, is_cold=False)
    assert any(is_held(path) for path in files)
    prepare_page_cache(recipe, is_cold=True)
    assert not any(is_held(path) for path in files)


@pytest.mark.parametrize("order", ["random", "stored"])
def test_the_samples_that_a_run_takes_are_read_and_no_others(order: str, root: Path, tmp_path: Path) -> None:
    recipe = recipe_of(as_folder(root, tmp_path), **{"data.order": order, "seed": 5})
    source = build_datasets(recipe.data.source, may_download=False).train
    taken = TrainOrder(5, NUM_TRAIN, 4, sampler=ShuffleSampler(is_random=order == "random"))
    expected = {int(index) for step in range(2) for index in taken.indices(step)}
    evict_files(list_source_files(source))
    prepare_page_cache(recipe, is_cold=False)
    assert {index for index in range(NUM_TRAIN) if is_held(source.get_path(index))} == expected


def test_a_run_of_whole_epochs_reads_everything(root: Path, tmp_path: Path) -> None:
    recipe = recipe_of(as_folder(root, tmp_path), **{"train.steps": "auto", "train.epochs": 2})
    files = list_source_files(build_datasets(recipe.data.source, may_download=False).train)
    evict_files(files)
    prepare_page_cache(recipe, is_cold=False)
    assert all(is_held(path) for path in files)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"train.steps": 4}, r"\(ask for --steps 2 or set data\.batch_size=3\)"),
        ({"train.steps": 13}, r"\(ask for --steps 2\)"),
        ({"train.steps": 4, "measure.warmup_steps": 3}, r"\(set data\.batch_size=3\)"),
        ({"train.steps": 13, "measure.warmup_steps": 3}, r"\(add images\)"),
        ({"train.steps": "auto", "train.epochs": 2}, r"\(ask for --steps 2 or set data\.batch_size=2\)"),
    ],
)
def test_a_cold_run_that_reads_an_image_twice_is_refused_with_what_helps(settings, fix, root, tmp_path) -> None:
    recipe = recipe_of(as_folder(root, tmp_path), **settings)
    with pytest.raises(RecipeError, match=rf"^train\.steps: .* not cold {fix}$"):
        prepare_page_cache(recipe, is_cold=True)


def test_each_image_may_be_read_once() -> None:
    check_reads_once(3, 4, NUM_TRAIN, 1)


def test_what_no_disk_is_read_for_is_not_cold(root: Path, tmp_path: Path) -> None:
    staged = recipe_of(as_folder(root, tmp_path), **{"data.stage": "/dev/shm"})
    with pytest.raises(RecipeError, match=r"^data\.stage: .* cannot be cold \(set data\.stage=off"):
        prepare_page_cache(staged, is_cold=True)
    with pytest.raises(RecipeError, match=r"^data\.source\.name: digits is read into memory before the first step"):
        prepare_page_cache(load("digits", Patch()).recipe, is_cold=True)


def test_before_a_warm_run_of_what_is_in_memory_or_copied_there_nothing_is_read() -> None:
    for words in (["digits"], ["folder", "data.source.root=/nowhere", "data.stage=/dev/shm"]):
        prepare_page_cache(load(words[0], Patch.parse(words[1:])).recipe, is_cold=False)


def test_what_is_not_on_the_disk_yet_is_dropped_too(root: Path) -> None:
    path = root / "fresh"
    path.write_bytes(bytes(1 << 20))
    assert is_held(path)
    evict_files([path])
    assert not is_held(path)


def test_an_image_that_cannot_be_read_is_left_for_the_run_to_report(root: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(root, copied)
    source = build_datasets(Folder(root=str(copied)), may_download=False).train
    files = list_source_files(source)
    files[0].write_bytes(b"")
    evict_files(files)
    with pytest.raises(ImageError):
        source.read(0)
    read_into_cache(source, len(source))
    assert all(is_held(path) for path in files[1:])

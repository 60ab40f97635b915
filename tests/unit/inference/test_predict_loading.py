"""Predict reads files by the loader of evaluation: the same pixels, and what cannot be read keeps its place."""

import contextlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.decode_array import decode_image
from paceline.data.loaders.build import LoaderOptions, build_eval_loader
from paceline.data.loaders.choose import choose_loader
from paceline.data.loaders.reader import to_planes
from paceline.data.order import EvalShard
from paceline.data.resize import build_eval_resizer
from paceline.data.sources.build import build_validation
from paceline.inference import predict
from paceline.inference.classifier import Classifier, Preprocessing
from paceline.inference.images import UnreadableImage, list_images
from paceline.inference.predict import InputImage, load_images, read_images
from paceline.recipe.schema.data import Data

SIZE, CORES = 24, 3


def classifier(data: Data, *, is_pixels: bool = False) -> Classifier:
    """Return what reads images for a model; it has none."""
    preprocessing = Preprocessing(SIZE, 28, 3, (0.5,) * 3, (0.25,) * 3, is_pixels=is_pixels)
    made = object.__new__(Classifier)
    fields = {
        "preprocessing": preprocessing,
        "recipe": SimpleNamespace(data=data),
        "sizing": build_eval_resizer(data, are_one_size=False),
        "classes": ("a", "b"),
    }
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def write_photographs(folder: Path, suffix: str) -> Path:
    """Write forty photographs of several sizes into class folders."""
    for number in range(40):
        path = folder / "ab"[number % 2] / f"{number:02}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (30 + number, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return photographs that every loader decodes with Pillow."""
    return write_photographs(tmp_path / "photos", ".png")


def assert_same(found: list[InputImage | UnreadableImage], expected: list[InputImage | UnreadableImage]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.path == other.path
        if isinstance(one, InputImage) and isinstance(other, InputImage):
            assert torch.equal(one.pixels, other.pixels)
        else:
            assert one == other


@pytest.mark.parametrize(
    "fields", [{}, {"workers": 0}, {"workers": 2, "loader": "threads"}, {"loader": "device"}], ids=str
)
def test_a_folder_has_the_pixels_of_its_evaluation(tmp_path: Path, fields: dict[str, object]) -> None:
    folder = write_photographs(tmp_path / "photos", ".jpg")
    data = Data(source={"name": "folder", "root": str(folder)}, **fields)  # type: ignore[arg-type]
    loaded = list(load_images(classifier(data), list_images([str(folder)], ()), cores=CORES))
    by_path = {str(each.path): each.pixels for each in loaded if isinstance(each, InputImage)}
    assert len(by_path) == 40
    data = Data(source=data.source) if data.loader == "device" else data
    source = build_validation(data.source)
    choice = choose_loader(data, source, device="cpu", cores=CORES, free_bytes=0)
    options = LoaderOptions(choice.workers, pin_memory=False, loader=choice.loader)
    seen, shard = 0, EvalShard(len(source), 4)
    with contextlib.closing(build_eval_loader(data, source, shard, SIZE, options)) as loader:
        for batch in loader.batches(0, shard.num_batches):
            for index, pixels in zip(batch.indices.tolist(), batch.images, strict=True):
                assert torch.equal(by_path[source.name_of(index)], pixels)
                seen += 1
    assert seen == len(source) > 0


def test_no_index_is_written_to_the_cache_of_the_run(tmp_path: Path) -> None:
    folder, cache = write_photographs(tmp_path / "photos", ".jpg"), tmp_path / "cache"
    names = list_images([str(folder)], ())
    assert len(list(load_images(classifier(Data(cache=str(cache))), names, cores=CORES))) == 40
    assert not cache.exists()


def test_what_cannot_be_read_keeps_its_place_and_its_message(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "00.png").write_bytes(b"no image")
    (folder / "a" / "02.png").write_bytes(b"")
    (folder / "b" / "01.png").unlink()
    os.mkfifo(folder / "b" / "01.png")
    with (tmp_path / "film.mov").open("wb") as file:
        file.truncate(2**40)
    names = [str(folder), "missing.jpg", str(tmp_path / "film.mov"), str(folder / "a" / "04.png"), "/dev/zero", "a\0b"]
    names += ["https://example.org/a.jpg", str(folder / "a" / "04.png")]
    data = Data(on_bad_image="skip", max_bad_images=1)
    loaded = list(load_images(classifier(data), list_images(names, ()), cores=CORES))
    assert_same(loaded, list(read_images(classifier(data), list_images(names, ()), threads=1, num_ahead=0)))
    assert sum(isinstance(each, UnreadableImage) for each in loaded) == 8


def test_a_pipe_named_like_a_file_is_read(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jpg"
    os.mkfifo(pipe)
    content = (folder / "a" / "04.png").read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True)
    writer.start()
    (found,) = load_images(classifier(Data()), [pipe], cores=CORES)
    writer.join(10)
    assert isinstance(found, InputImage)
    image = decode_image(content, classifier(Data()).preprocessing.pixel_format, name="")
    planes = to_planes(image) if isinstance(image, np.ndarray) else image
    assert torch.equal(found.pixels, build_eval_resizer(Data(), are_one_size=False)(planes, np.empty(0), SIZE))


def test_paths_are_read_a_part_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_FIRST_PATHS", 3)
    monkeypatch.setattr(predict, "_MAX_PATHS", 8)
    paths = sorted(folder.rglob("*.png"))
    remaining = iter(paths)
    found = load_images(classifier(Data()), remaining, cores=CORES)
    first = next(found)
    assert next(remaining) == paths[3]
    assert_same([first, *found], list(read_images(classifier(Data()), paths[:3] + paths[4:], threads=1, num_ahead=0)))


def test_workers_end_when_no_more_predictions_are_wanted(folder: Path) -> None:
    before = threading.active_count()
    found = load_images(classifier(Data(workers=2)), sorted(folder.rglob("*.png")), cores=CORES)
    next(found)
    found.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:  # the thread that feeds a closed queue ends by itself
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)

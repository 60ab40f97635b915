"""Files become images in the order they were named, and what cannot be read keeps its place."""

import os
import threading
from pathlib import Path

import pytest
import torch

from paceline.data.bad_images import ImageError
from paceline.inference.images import UnreadableImage
from paceline.inference.predict import InputImage, read_images


class Decoder:
    """A classifier's reading of images: a file is one gray pixel, and no number is no image."""

    def image(self, data: bytes, name: str) -> torch.Tensor:
        if not data.isdigit():
            raise ImageError(name, "cannot be decoded: it is no number", "remove it")
        return torch.full((1, 1, 1), int(data), dtype=torch.uint8)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return the paths of thirty images."""
    paths = [tmp_path / f"{number}.jpg" for number in range(30)]
    for number, path in enumerate(paths):
        path.write_text(str(number))
    return paths


@pytest.mark.parametrize(("threads", "ahead"), [(1, 0), (4, 3), (4, 100)])
def test_images_come_in_order_with_any_number_of_threads(files: list[Path], threads: int, ahead: int) -> None:
    found = list(read_images(Decoder(), files, threads=threads, num_ahead=ahead))
    assert [(each.path, each.pixels.item()) for each in found] == [(path, n) for n, path in enumerate(files)]


def test_what_cannot_be_read_keeps_its_place(files: list[Path], tmp_path: Path) -> None:
    files[1].write_text("no number")
    files[2] = tmp_path / "missing.jpg"
    files[3] = tmp_path
    files[4] = Path("with\0null")
    unreadable = UnreadableImage(Path("a folder"), "has none")
    found = list(read_images(Decoder(), [*files[:5], unreadable, files[5]], threads=2, num_ahead=2))
    reasons = [each.reason if isinstance(each, UnreadableImage) else "" for each in found]
    assert [isinstance(each, InputImage) for each in found] == [True, *[False] * 5, True]
    assert reasons[1] == "cannot be decoded: it is no number; remove it or replace it"
    assert reasons[2].startswith("cannot be read: No such file or directory")
    assert reasons[3].startswith("cannot be read: Is a directory")
    assert "null" in reasons[4]
    assert found[5] is unreadable


def test_prefetching_is_limited(files: list[Path]) -> None:
    paths = iter(files)
    found = read_images(Decoder(), paths, threads=2, num_ahead=4)
    assert next(found).path == files[0]
    assert next(paths) == files[5]
    found.close()


def test_what_is_too_large_for_an_image_is_not_read_and_a_device_never(tmp_path: Path) -> None:
    with (tmp_path / "film.mov").open("wb") as file:
        file.truncate(2**40)  # a hole, which takes no room
    found = list(read_images(Decoder(), [tmp_path / "film.mov", Path("/dev/zero")], threads=1, num_ahead=0))
    assert [each.reason.partition(";")[0] for each in found] == [
        "cannot be read: has more than 1 GiB, too large for an image",
        "cannot be read: is a device",
    ]


def test_a_pipe_is_read_to_its_end_and_no_further_than_an_image_can_be_long(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.inference.predict._MAX_IMAGE_BYTES", 4)
    monkeypatch.setattr("paceline.inference.predict._CHUNK_BYTES", 2)
    found = [piped(tmp_path, text) for text in ("7", "0007", "00007")]
    assert [isinstance(each, InputImage) for each in found] == [True, True, False]
    assert "too large for an image" in found[2].reason


def piped(folder: Path, text: str) -> InputImage | UnreadableImage:
    """Return what is made of `text` that comes through a pipe."""
    path = folder / text
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=[text])
    writer.start()
    (found,) = read_images(Decoder(), [path], threads=1, num_ahead=0)
    writer.join(timeout=10)
    return found

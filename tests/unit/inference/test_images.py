"""Which images a user's words name, and in which order."""

import os
from pathlib import Path

import pytest

from paceline.inference.images import UnreadableImage, list_images


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder of files, some of which are called like images."""
    for name in (
        "b.PNG",
        "a/2.jpg",
        "a/10.jpeg",
        "a/deep/x.webp",
        "c.tif",
        "d.JFIF",
        "notes.txt",
        ".hidden.jpg",
        ".git/y.jpg",
        "jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"any")
    return tmp_path


def names(args: list[str], lines: tuple[bytes, ...] = ()) -> list[str]:
    return [str(each.path if isinstance(each, UnreadableImage) else each) for each in list_images(args, lines)]


def test_a_folder_is_walked_in_the_order_of_names(tree: Path) -> None:
    expected = ["a/10.jpeg", "a/2.jpg", "a/deep/x.webp", "b.PNG", "c.tif", "d.JFIF"]
    assert names([str(tree)]) == [f"{tree}/{name}" for name in expected]


def test_names_keep_their_order_and_a_file_may_have_any_name(tree: Path) -> None:
    args = [f"{tree}/notes.txt", f"{tree}/a", f"{tree}/b.PNG"]
    assert names(args) == [args[0], *(f"{tree}/a/{name}" for name in ("10.jpeg", "2.jpg", "deep/x.webp")), args[2]]


def test_a_minus_stands_for_the_paths_in_lines(tree: Path) -> None:
    lines = (f"{tree}/c.tif\n".encode(), b"\n", f"{tree}/a/deep\r\n".encode(), b"caf\xe9 \xff.jpg")
    found = names([f"{tree}/b.PNG", "-"], lines)
    assert found == [f"{tree}/b.PNG", f"{tree}/c.tif", f"{tree}/a/deep/x.webp", os.fsdecode(b"caf\xe9 \xff.jpg")]


def test_lines_of_standard_input_are_read_as_names(tree: Path) -> None:
    lines = iter([b"one.jpg\n", b"two.jpg\n"])
    found = list_images(["-"], lines)
    assert next(found) == Path("one.jpg")
    assert next(lines) == b"two.jpg\n"


def test_a_folder_without_images_is_reported(tree: Path) -> None:
    (tree / "empty").mkdir()
    (only,) = list_images([str(tree / "empty")], ())
    assert isinstance(only, UnreadableImage)
    assert only.path == tree / "empty" and "has no image files" in only.reason


def test_entries_that_cannot_be_images_are_reported_and_the_rest_listed(tree: Path) -> None:
    (tree / "a/3.jpg").symlink_to("nowhere")
    (tree / "a/4.jpg").write_bytes(b"")
    os.mkfifo(tree / "a/5.jpg")
    (tree / "a/back").symlink_to(tree)
    found = list(list_images([str(tree / "a")], ()))
    reasons = {
        str(each.path).removeprefix(f"{tree}/a/"): each.reason for each in found if isinstance(each, UnreadableImage)
    }
    assert "a dangling link" in reasons["3.jpg"] and "empty" in reasons["4.jpg"] and "a pipe" in reasons["5.jpg"]
    assert "links back to a parent folder" in reasons["back/a"]
    assert [each for each in found if not isinstance(each, UnreadableImage)][:2] == [
        tree / "a/10.jpeg",
        tree / "a/2.jpg",
    ]

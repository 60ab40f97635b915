"""Image extensions, and the summary of other files."""

import pytest
from PIL import Image

from paceline.data.decode import decode
from paceline.data.files import IMAGE_EXTENSIONS, JPEG_EXTENSIONS, has_image_extension, summarize_extensions


@pytest.mark.parametrize(
    ("name", "is_image"),
    [
        ("a.jpg", True),
        ("a.b.JFIF", True),
        ("a.jpe", True),
        ("jpg", False),
        (".jpg", False),
        ("a.raw", False),
        ("a.heic", True),
        ("a.npy", False),
    ],
)
def test_a_name_a_dot_and_an_extension_make_an_image(name, is_image):
    assert has_image_extension(name) == is_image


def test_npy_files_are_images_only_among_arrays():
    assert has_image_extension("a.NPY", arrays=True)
    assert not has_image_extension("a.txt", arrays=True)


def test_every_extension_is_one_of_a_format_that_is_decoded(tmp_path):
    formats = {**dict.fromkeys(JPEG_EXTENSIONS, "JPEG"), "tif": "TIFF", "pgm": "PPM"}
    others = {"heic", "heif", "jxl"}  # test_extra_formats
    assert len(IMAGE_EXTENSIONS - others) == 14
    for extension in IMAGE_EXTENSIONS - others:
        path = tmp_path / f"image.{extension}"
        Image.new("L", (5, 4)).save(path, formats.get(extension, extension.upper()))
        assert decode(path.read_bytes(), channels=3, name="").size == (5, 4), extension


def test_files_are_counted_by_extension_the_most_frequent_first():
    names = ["b.txt", "Thumbs.db", "1.RAW", "2.raw", "a.txt", "3.raw", "README", "LICENSE", "Thumbs.db"]
    assert summarize_extensions(names) == "3 .raw, 2 .txt, 2 Thumbs.db, 2 without an extension"
    assert summarize_extensions([]) == ""
    assert summarize_extensions(["a\n.x"]) == "1 a\\n.x"


def test_only_the_five_most_frequent_extensions_are_listed():
    names = [f"{number}.{kind}" for kind in "abcdefg" for number in range(2)]
    assert summarize_extensions(names) == "2 .a, 2 .b, 2 .c, 2 .d, 2 .e, 4 others"

"""Thumbnails of misclassified images: small, upright, replaced as a whole, what is gone is left out."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.core.results import MisclassifiedImage
from paceline.data.sources.image_files import ImageFileSource
from paceline.training.eval_outputs import save_worst_images

KB = 1024


def info(channels: int, num_images: int = 4) -> DatasetInfo:
    grey = (0.5,) * channels
    return DatasetInfo("made", "val", num_images, ("cat", "<script>", "d\udcffg"), channels, None, grey, grey)


def arrays(side: int, channels: int) -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (4, side, side, channels), dtype=np.uint8)
    return ArraySource(info(channels), images, np.array([0, 1, 2, 0]))


def files(folder: Path, contents: dict[str, bytes], channels: int = 3) -> ImageFileSource:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    labels = np.zeros(len(contents), dtype=np.int32)
    return ImageFileSource.from_paths(
        info(channels, len(contents)), str(folder), [each.encode() for each in contents], labels
    )


def encoded(pixels: np.ndarray, kind: str = "JPEG", **options: object) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def mistake(index: int, loss: float = 2.5) -> MisclassifiedImage:
    return MisclassifiedImage(index, 0, 1, 0.75, loss)


def listed(folder: Path) -> list[dict]:
    return json.loads((folder / "worst.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("channels", [1, 3])
def test_small_images_are_kept_as_they_are(tmp_path, channels: int) -> None:
    source = arrays(64, channels)
    save_worst_images(tmp_path / "worst", [mistake(2), mistake(0)], source)
    rows = listed(tmp_path / "worst")
    assert [row["file"] for row in rows] == ["2.png", "0.png"]
    for row in rows:
        path = tmp_path / "worst" / row["file"]
        expected = source.images[row["index"]]
        assert np.array_equal(np.asarray(Image.open(path)).reshape(expected.shape), expected)
        assert path.stat().st_size < 16 * KB  # noise of 64 pixels squared: nothing takes more


@pytest.mark.parametrize("channels", [1, 3])
def test_photographs_are_shrunk_to_less_than_16_kb(tmp_path, channels: int) -> None:
    save_worst_images(tmp_path / "worst", [mistake(1)], arrays(300, channels))
    (row,) = listed(tmp_path / "worst")
    path = tmp_path / "worst" / row["file"]
    with Image.open(path) as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (96, 96), {1: "L", 3: "RGB"}[channels])
    assert row["file"] == "1.jpg" and path.stat().st_size < 16 * KB


def test_a_row_has_the_image_and_its_prediction(tmp_path) -> None:
    save_worst_images(tmp_path / "worst", [MisclassifiedImage(3, 2, 1, 0.75, 2.5)], arrays(8, 1))
    assert listed(tmp_path / "worst") == [
        {
            "index": 3,
            "name": "made/val[3]",
            "true": "d\\udcffg",
            "predicted": "<script>",
            "confidence": 0.75,
            "loss": 2.5,
            "file": "3.png",
        }
    ]


def test_a_photograph_that_was_taken_sideways_stands_upright(tmp_path) -> None:
    pixels = np.zeros((200, 400, 3), dtype=np.uint8)
    pixels[:, :200] = 255  # the left half is bright: turned by a quarter clockwise it is the top
    exif = Image.Exif()
    exif[0x0112] = 6
    source = files(tmp_path / "photos", {"a.jpg": encoded(pixels, exif=exif)})
    save_worst_images(tmp_path / "worst", [mistake(0)], source)
    with Image.open(tmp_path / "worst" / "0.jpg") as image:
        assert image.size == (48, 96) and "exif" not in image.info
        shown = np.asarray(image)
    assert shown[:40].min() > 200 and shown[-40:].max() < 50  # JPEG blurs the edge in the middle


def test_metadata_of_a_file_is_not_copied(tmp_path) -> None:
    pixels = np.full((40, 40, 3), 7, dtype=np.uint8)
    beside = b"x" * 60_000
    contents = {
        "a.jpg": encoded(np.tile(pixels, (3, 3, 1)), comment=beside, icc_profile=beside),
        "b.png": encoded(pixels, "PNG", icc_profile=np.random.default_rng(0).bytes(60_000)),
    }
    save_worst_images(tmp_path / "worst", [mistake(0), mistake(1)], files(tmp_path / "photos", contents))
    sizes = [(tmp_path / "worst" / row["file"]).stat().st_size for row in listed(tmp_path / "worst")]
    assert len(sizes) == 2 and max(sizes) < 2 * KB


def test_images_that_cannot_be_read_any_more_are_left_out(tmp_path) -> None:
    good = encoded(np.zeros((80, 80), dtype=np.uint8))
    source = files(tmp_path / "photos", {"a.jpg": good, "b.jpg": good, "c.jpg": good}, channels=1)
    (tmp_path / "photos" / "a.jpg").unlink()
    (tmp_path / "photos" / "c.jpg").write_bytes(good[:40])
    save_worst_images(tmp_path / "worst", [mistake(0), mistake(1), mistake(2)], source)
    assert [row["index"] for row in listed(tmp_path / "worst")] == [1]
    assert {path.name for path in (tmp_path / "worst").iterdir()} == {"1.jpg", "worst.json"}


def test_a_folder_of_before_is_replaced_as_a_whole(tmp_path) -> None:
    source, folder = arrays(8, 1), tmp_path / "worst"
    save_worst_images(folder, [mistake(0), mistake(1)], source)
    save_worst_images(folder, [mistake(2)], source)
    assert {path.name for path in folder.iterdir()} == {"2.png", "worst.json"}
    assert list(tmp_path.iterdir()) == [folder]


def test_without_mistakes_there_is_no_folder(tmp_path) -> None:
    source = arrays(8, 1)
    save_worst_images(tmp_path / "worst", [mistake(0)], source)
    save_worst_images(tmp_path / "worst", [], source)
    save_worst_images(tmp_path / "worst", [], source)
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_kill_are_removed(tmp_path) -> None:
    for name in (".worst.tmp", ".worst.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "9.png").touch()
    save_worst_images(tmp_path / "worst", [mistake(0)], arrays(8, 1))
    assert {path.name for path in tmp_path.iterdir()} == {"worst"}


def test_a_disk_that_refuses_is_an_error_and_leaves_the_folder_of_before(tmp_path) -> None:
    folder = tmp_path / "worst"
    save_worst_images(folder, [mistake(0)], arrays(8, 1))

    class Full(ArraySource):
        def read(self, index: int):
            (tmp_path / ".worst.tmp").rmdir()  # what is written next has no place to go
            return super().read(index)

    with pytest.raises(OSError, match="No such file"):
        save_worst_images(folder, [mistake(1)], Full(info(1), arrays(8, 1).images, np.zeros(4, dtype=np.int64)))
    assert {path.name for path in folder.iterdir()} == {"0.png", "worst.json"} and list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_is_nowhere_is_an_error(tmp_path) -> None:
    with pytest.raises(OSError, match="No such file"):
        save_worst_images(tmp_path / "gone" / "worst", [mistake(0)], arrays(8, 1))

"""Unpacking restores the files of a pack, and writes only into its folder."""

import io

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.data.convert.unpack import unpack
from paceline.data.decode import decode
from paceline.data.files import JPEG_EXTENSIONS
from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.sources.folder import load_folder
from paceline.data.sources.image_files import ImageFileSource
from paceline.recipe.schema.source import Folder


def silent(done, total):
    pass


def pixels_of(content):
    return np.asarray(decode(content, channels=3, name="x"))


def test_unpacked_files_have_their_names_and_pixels(core, folder, photos, packed, tmp_path):
    calls = []
    found = unpack(packed(photos), tmp_path / "out", lambda done, total: calls.append((done, total)), 2)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(
        path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
    assert found.images == len(files) == 10 and calls[-1] == (10, 10)
    for file in files:
        before, after = (folder / file).read_bytes(), (tmp_path / "out" / file).read_bytes()
        np.testing.assert_array_equal(pixels_of(before), pixels_of(after))
        if file.name in ("d.png", "e.jpg", "j.gif"):
            assert before == after
    assert digest_datasets(load_folder(Folder(root=str(tmp_path / "out")))) == digest_datasets(photos)


def test_a_jpeg_keeps_its_name_with_any_jpeg_extension(core, photos, packed, tmp_path, make_photo, monkeypatch):
    names = [f"cat/{extension}.{extension}".encode() for extension in sorted(JPEG_EXTENSIONS)]
    source = ImageFileSource.from_paths(photos.train.info, str(tmp_path), names, np.zeros(len(names), dtype=np.int32))
    monkeypatch.setattr(ImageFileSource, "read_bytes", lambda self, index: make_photo(index))
    unpack(packed(Datasets(source, photos.val)), tmp_path / "out", silent, 1)
    files = (tmp_path / "out" / "train").rglob("*.*")
    assert sorted(str(path.relative_to(tmp_path / "out/train")).encode() for path in files) == names


def test_a_name_without_an_extension_gets_that_of_its_format(core, photos, packed, tmp_path, monkeypatch):
    pytest.importorskip("PIL.AvifImagePlugin", reason="this Pillow has no AVIF")
    names = ["avif", "bmp", "gif", "png", "ppm", "tif", "webp"]
    files = [io.BytesIO() for _ in names]
    for name, file in zip(names, files, strict=True):
        Image.linear_gradient("L").convert("RGB").save(file, "TIFF" if name == "tif" else name.upper())
    paths = [f"cat/{name}".encode() for name in names]
    source = ImageFileSource.from_paths(photos.train.info, str(tmp_path), paths, np.zeros(len(names), dtype=np.int32))
    monkeypatch.setattr(ImageFileSource, "read_bytes", lambda self, index: files[index].getvalue())
    unpack(packed(Datasets(source, source)), tmp_path / "out", silent, 1)
    assert sorted(path.name for path in (tmp_path / "out" / "train").rglob("*.*")) == [
        f"{name}.{name}" for name in names
    ]


def test_pixels_are_unpacked_as_png(core, pixels, packed, tmp_path):
    unpack(packed(pixels), tmp_path / "out", silent, 2)
    found = load_folder(Folder(root=str(tmp_path / "out"), channels=1))
    assert (found.train.labels.tolist(), found.val.labels.tolist()) == ([0, 0, 0, 1, 1], [0, 1, 1])
    images = [np.asarray(decode(found.train.read(index)[0], channels=1, name="")) for index in range(5)]
    expected = pixels.train.images[[0, 2, 4, 1, 3], :, :, 0]
    np.testing.assert_array_equal(np.stack(images), expected)


NAMES = [
    b"../../escape.jpg", b"/etc/escape.jpg", b"cat/../../escape.jpg", b"..", b".", b"cat/..", b"cat//x", b"cat/.hidden",
    b"n\0ul", b"", b"cat/" + b"x" * 300, b"\xff\xfe.jpg", b"cat/same.jpg", b"same.jpg", b"a/b/same.jpg",
    b"cat/no-extension",
]  # fmt: skip


def test_no_name_leads_outside_the_folder(core, photos, packed, tmp_path, make_photo, monkeypatch):
    """Each name becomes one file in its class folder."""
    source = ImageFileSource.from_paths(photos.train.info, str(tmp_path), NAMES, np.zeros(len(NAMES), dtype=np.int32))
    monkeypatch.setattr(ImageFileSource, "read_bytes", lambda self, index: make_photo(index))
    unpack(packed(Datasets(source, photos.val)), tmp_path / "out", silent, 2)
    files = [path for path in (tmp_path / "out" / "train").rglob("*") if path.is_file()]
    assert len(files) == len(NAMES)
    assert {path.parent for path in files} == {tmp_path / "out" / "train" / "cat"}
    assert {pixels_of(path.read_bytes()).tobytes() for path in files} == {
        pixels_of(make_photo(index)).tobytes() for index in range(len(NAMES))
    }
    assert not [path for path in tmp_path.rglob("escape*") if "out/train/cat" not in str(path)]


def test_a_class_named_like_a_path_gets_a_numbered_folder(core, photos, packed, tmp_path):
    info = photos.train.info.__class__(**{**vars(photos.train.info), "class_names": ("../up", "/")})
    sources = [ImageFileSource(info, each.root, each.paths, each.labels) for each in (photos.train, photos.val)]
    sources[1] = ImageFileSource(info.__class__(**{**vars(info), "split": "val"}), *list(vars(photos.val).values())[1:])
    unpack(packed(Datasets(*sources)), tmp_path / "out", silent, 2)
    assert sorted(path.name for path in (tmp_path / "out" / "train").iterdir()) == ["class-0", "class-1"]


def test_an_existing_folder_is_refused(core, pixels, packed, tmp_path):
    with pytest.raises(DataError, match=r"exists already \(name a folder that does not\)"):
        unpack(packed(pixels), tmp_path, silent, 1)


def test_the_folder_appears_only_when_it_is_complete(core, photos, packed, tmp_path):
    made = packed(photos)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(made, tmp_path / "out", stop, 1)
    assert not (tmp_path / "out").exists()
    assert unpack(made, tmp_path / "out", silent, 1).images == 10
    assert not list(tmp_path.glob(".*"))


def test_a_failed_unpacking_leaves_no_files(core, photos, packed, tmp_path):
    def stop(done, total):
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"out: cannot be written: No space left on device \(write elsewhere\)"):
        unpack(packed(photos), tmp_path / "out", stop, 1)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]

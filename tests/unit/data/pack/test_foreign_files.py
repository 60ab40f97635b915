"""Packing and unpacking replace and remove only packs."""

import os
from pathlib import Path

import numpy as np
import pytest

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.convert.unpack import unpack
from paceline.data.sources.image_files import ImageFileSource

THESIS = "years of work"
NOBODY = 65534
SHARDS = PackOptions(shard_bytes=1 << 20)


def silent(done, total):
    pass


def write_thesis(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "thesis.txt"
    path.write_text(THESIS)
    return path


def test_an_unfinished_pack_of_another_user_is_refused(core, pixels, tmp_path):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text(THESIS)
    unfinished_pack = tmp_path / ".x.pack.part"
    unfinished_pack.mkdir()
    (unfinished_pack / "data-00000.pack").symlink_to(thesis)
    with pytest.raises(DataError, match=r"data-00000\.pack: is not part of an unfinished pack \(move it away"):
        write_pack(pixels, tmp_path / "x.pack", PackOptions(), silent, 1)
    os.chown(unfinished_pack, NOBODY, NOBODY)
    tmp_path.chmod(0o777)
    with pytest.raises(DataError, match=r"\.x\.pack\.part: .*made by another user \(remove it, or write elsewhere\)"):
        write_pack(pixels, tmp_path / "x.pack", PackOptions(), silent, 1)
    unfinished_pack.rename(tmp_path / "elsewhere")
    unfinished_pack.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"\.x\.pack\.part: .*is a link"):
        write_pack(pixels, tmp_path / "x.pack", PackOptions(), silent, 1)
    assert thesis.read_text() == THESIS and not (tmp_path / "x.pack").exists()


@pytest.mark.parametrize("options", [PackOptions(), SHARDS], ids=["one file", "shards"])
def test_an_unfinished_pack_is_private_and_a_pack_follows_the_umask(core, pixels, tmp_path, options):
    seen = []
    before = os.umask(0o027)
    try:
        write_pack(
            pixels, tmp_path / "x", options, lambda *calls: seen.append((tmp_path / ".x.part").stat().st_mode), 1
        )
    finally:
        os.umask(before)
    assert {mode & 0o777 for mode in seen} == {0o700}
    assert (tmp_path / "x").stat().st_mode & 0o777 == (0o640 if options.shard_bytes is None else 0o750)


def test_a_folder_of_other_files_is_not_an_unfinished_pack(core, pixels, tmp_path):
    for name in ("thesis.txt", "pack.key"):
        unfinished_pack = tmp_path / f".{name}.pack.part"
        unfinished_pack.mkdir()
        (unfinished_pack / name).write_text("the key of a house")
        with pytest.raises(DataError, match=rf"{name}: is not (part of|of) an unfinished pack"):
            write_pack(pixels, tmp_path / f"{name}.pack", PackOptions(), silent, 1)
        assert (unfinished_pack / name).read_text() == "the key of a house"


@pytest.mark.parametrize("options", [PackOptions(), SHARDS], ids=["one file", "shards"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_a_folder_created_at_the_output_path_meanwhile_stays(core, pixels, tmp_path, options, overwrite):
    options = PackOptions(shard_bytes=options.shard_bytes, overwrite=overwrite)
    out = tmp_path / "out.pack"

    def create_folder(done, total):
        if done == total and not out.exists():
            write_thesis(out)

    with pytest.raises(DataError, match=r"out\.pack: .*(move it away|remove it)"):
        write_pack(pixels, out, options, create_folder, 1)
    assert (out / "thesis.txt").read_text() == THESIS
    out.rename(tmp_path / "moved")
    calls = []
    write_pack(pixels, out, options, lambda done, total: calls.append(done), 1)
    assert calls == [8], "packed samples are not packed again"
    assert {path.name for path in tmp_path.iterdir()} == {"out.pack", "moved"}


def test_a_folder_called_old_stays(core, pixels, tmp_path):
    thesis = write_thesis(tmp_path / ".out.pack.old")
    write_pack(pixels, tmp_path / "out.pack", SHARDS, silent, 1)
    assert thesis.read_text() == THESIS
    with pytest.raises(DataError, match=r"\.out\.pack\.old: is not a pack, so it is not overwritten"):
        write_pack(pixels, tmp_path / "out.pack", PackOptions(shard_bytes=1 << 20, overwrite=True), silent, 1)
    assert thesis.read_text() == THESIS


def test_overwriting_a_folder_removes_only_files_of_a_pack(core, pixels, tmp_path):
    out = tmp_path / "out.pack"
    write_pack(pixels, out, SHARDS, silent, 1)
    (out / "thesis.txt").write_text(THESIS)
    again = PackOptions(shard_bytes=1 << 20, overwrite=True)
    with pytest.raises(DataError, match=r"thesis\.txt: is not part of a pack, so the folder is not overwritten \(move"):
        write_pack(pixels, out, again, silent, 1)
    assert (out / "thesis.txt").read_text() == THESIS
    (out / "thesis.txt").unlink()
    assert write_pack(pixels, out, again, silent, 1).images == 8
    assert [path.name for path in tmp_path.iterdir()] == ["out.pack"]


def test_unpacking_removes_neither_an_unfinished_pack_nor_other_files(core, pixels, packed, tmp_path):
    made = packed(pixels)
    unfinished = tmp_path / ".photos.part"
    unfinished.mkdir()
    (unfinished / "journal").write_text("hours of work")
    unpack(made, tmp_path / "photos", silent, 1)
    assert (unfinished / "journal").read_text() == "hours of work"
    thesis = write_thesis(tmp_path / ".more.unpacking")
    with pytest.raises(DataError, match=r"\.more\.unpacking: holds thesis\.txt, which .*\(move it away"):
        unpack(made, tmp_path / "more", silent, 1)
    assert thesis.read_text() == THESIS
    thesis.rename(tmp_path / ".more.unpacking" / ".paceline-unpacking")  # as a kill leaves it
    (tmp_path / ".more.unpacking" / "train").mkdir()
    unpack(made, tmp_path / "more", silent, 1)
    assert sorted(path.name for path in (tmp_path / "more").iterdir()) == ["train", "val"]


def test_images_with_the_same_name_are_all_unpacked(core, photos, packed, tmp_path, make_photo, monkeypatch):
    names = [b"cat/00000002-x.jpg", b"cat/x.jpg", b"cat/x.jpg", b"cat/x.jpg", b"cat/00000003-x.jpg"]
    source = ImageFileSource.from_paths(photos.train.info, str(tmp_path), names, np.zeros(len(names), dtype=np.int32))
    monkeypatch.setattr(ImageFileSource, "read_bytes", lambda self, index: make_photo(index))
    unpack(packed(Datasets(source, photos.val)), tmp_path / "out", silent, 1)
    files = [path for path in (tmp_path / "out" / "train").rglob("*") if path.is_file()]
    assert len({path.read_bytes() for path in files}) == len(files) == len(names)

"""Packing keeps all samples in order, also after interruptions."""

import errno
import io
import os
import tarfile
from types import SimpleNamespace

import pytest

from paceline.core.dataset import ArraySource
from paceline.core.errors import DataError
from paceline.data.convert.encode import build_file_state_function
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.convert.partial_pack import PartialPack
from paceline.data.pack.format import KIND_FILE, KIND_RECORD
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.sources.fingerprint import digest_datasets, digest_split
from paceline.data.sources.folder import load_folder
from paceline.data.sources.webdataset import load_webdataset
from paceline.recipe.schema.source import Folder, WebDataset


def silent(done, total):
    pass


def splits(datasets, other):
    return ((datasets.train, other.train), (datasets.val, other.val))


def test_labels_names_order_info_and_digest_are_those_of_the_source(core, photos, packed):
    found = packed(photos)
    for each, other in splits(found, photos):
        assert isinstance(each, PackSource)
        assert each.info == other.info and len(each) == len(other) > 2
        assert each.labels.tolist() == other.labels.tolist()
        for index in range(len(each)):
            assert each.name_of(index) == other.get_path(index).relative_to(other.root).as_posix()
    assert digest_datasets(found) == digest_datasets(photos)


def test_jpegs_become_records_and_other_files_are_stored_unchanged(core, photos, packed, tmp_path):
    found = packed(photos)
    kinds = {found.train.name_of(index): int(found.train.kinds[index]) for index in range(7)}
    kept = {name for name, kind in kinds.items() if kind == KIND_FILE}
    assert kept == {"cat/d.png", "dög/e.jpg"}
    assert set(kinds.values()) == {KIND_FILE, KIND_RECORD}
    for index, name in enumerate(kinds):
        if name in kept:
            assert found.train.read(index) == photos.train.read(index)


def test_files_stored_unchanged_are_counted_by_reason(core, photos, tmp_path):
    made = write_pack(photos, tmp_path / "p", PackOptions(), silent, 2)
    assert made.images == 10 and made.bytes == (tmp_path / "p").stat().st_size
    assert made.kept == {"it is no JPEG": 2, "it is progressive": 1}


def test_sizes_are_those_of_the_upright_images(core, photos, packed):
    train = packed(photos).train
    sizes = {train.name_of(index): (int(train.heights[index]), int(train.widths[index])) for index in range(7)}
    assert sizes["cat/a.jpg"] == (30, 40) and sizes["cat/c.JPEG"] == (40, 30) and sizes["dög/f.jpg"] == (17, 9)
    assert sizes["cat/d.png"] == sizes["dög/e.jpg"] == (30, 40)


def test_without_the_native_core_every_file_is_stored_unchanged(no_core, photos, tmp_path):
    made = write_pack(photos, tmp_path / "p", PackOptions(), silent, 2)
    assert made.kept == {"the native core is not there": 8, "it is no JPEG": 2}
    found = open_pack(tmp_path / "p")
    assert [found.train.read(index) for index in range(7)] == [photos.train.read(index) for index in range(7)]


def test_pixels_of_one_size_become_an_array_source_with_the_same_names(core, pixels, packed):
    found = packed(pixels)
    for each, other in splits(found, pixels):
        assert isinstance(each, ArraySource)
        assert each.info == other.info and each.labels.tolist() == other.labels.tolist()
        assert each.images.tolist() == other.images.tolist()
        assert each.name_of(1) == other.name_of(1)
    assert digest_datasets(found) == digest_datasets(pixels)


def test_shards_hold_the_same_samples_as_one_file(core, photos, packed, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    one, many = packed(photos), packed(photos, "shards", shard_bytes=2500)
    assert len(many.train.files) >= 4
    files = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert files == [f"data-{number:05d}.pack" for number in range(len(many.train.files))] + ["index.pack"]
    for each, other in splits(one, many):
        assert [each.read(index) for index in range(len(each))] == [other.read(index) for index in range(len(other))]


def test_the_bytes_are_the_same_for_any_number_of_threads(core, photos, tmp_path):
    for workers in (1, 3):
        write_pack(photos, tmp_path / f"p{workers}", PackOptions(), silent, workers)
    assert (tmp_path / "p1").read_bytes() == (tmp_path / "p3").read_bytes()


def test_resize_scales_larger_images_down_and_changes_the_digest(core, photos, packed):
    found = packed(photos, resize=24, quality=80)
    train = found.train
    sizes = {train.name_of(index): (int(train.heights[index]), int(train.widths[index])) for index in range(7)}
    assert sizes["cat/a.jpg"] == (24, 32) and sizes["cat/c.JPEG"] == (32, 24) and sizes["dög/deep/g.jpg"] == (24, 24)
    assert sizes["dög/f.jpg"] == (17, 9), "a small image stays as it is"
    assert set(train.kinds.tolist()) == {KIND_RECORD}
    assert train.index.meta.made.model_dump() == {"resize": 24, "quality": 80, "every": 8}
    assert digest_split(train) != digest_split(photos.train)


def test_an_existing_pack_is_refused_unless_it_may_be_replaced(core, photos, pixels, packed, tmp_path):
    packed(photos)
    with pytest.raises(DataError, match=r"made.pack: exists already \(.*\)$"):
        packed(pixels)
    assert len(packed(pixels, overwrite=True).train) == 5
    assert [path.name for path in tmp_path.iterdir() if "made" in path.name] == ["made.pack"]


def test_one_file_and_a_folder_of_shards_replace_each_other(core, pixels, packed, tmp_path):
    for options in ({}, {"shard_bytes": 1 << 20}, {"shard_bytes": 1 << 21}, {}):
        assert len(packed(pixels, overwrite=True, **options).train) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["made.pack"]


def test_only_packs_are_overwritten(core, pixels, packed, tmp_path):
    (tmp_path / "made.pack").mkdir()
    (tmp_path / "made.pack" / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match="is not a pack, so it is not overwritten"):
        packed(pixels, overwrite=True)
    assert (tmp_path / "made.pack" / "thesis.tex").exists()


class StopError(Exception):
    pass


def stop_after(images):
    def progress(done, total):
        if done >= images:
            raise StopError

    return progress


def test_an_interrupted_pack_is_resumed_with_the_same_bytes(core, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    monkeypatch.setattr("paceline.data.convert.pack_writer._FILES_PER_TASK", 1)
    options = PackOptions(shard_bytes=2500)
    write_pack(photos, tmp_path / "whole", options, silent, 1)
    resumed = []
    for images in (1, 4, 7, 9):
        with pytest.raises(StopError):
            write_pack(photos, tmp_path / "p", options, stop_after(images), 1)
        assert not (tmp_path / "p").exists()
        resumed.append(len(list((tmp_path / ".p.part").glob("*.rows"))))
    assert 0 == resumed[0] < resumed[1] < resumed[3], "finished shards stay"
    calls = []
    write_pack(photos, tmp_path / "p", options, lambda done, total: calls.append((done, total)), 1)
    assert 0 < calls[0][0] <= 9 and calls[-1] == (10, 10)
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


def test_a_pack_of_one_file_starts_again(core, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._FILES_PER_TASK", 1)
    write_pack(photos, tmp_path / "whole", PackOptions(), silent, 1)
    with pytest.raises(StopError):
        write_pack(photos, tmp_path / "p", PackOptions(), stop_after(9), 1)
    calls = []
    write_pack(photos, tmp_path / "p", PackOptions(), lambda done, total: calls.append(done), 1)
    assert calls[0] == 0 and contents(tmp_path / "p") == contents(tmp_path / "whole")


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_shard_with_a_file_replaced_after_an_interruption_is_packed_again(
    core, photos, make_photo, tmp_path, monkeypatch, at
):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    monkeypatch.setattr("paceline.data.convert.pack_writer._FILES_PER_TASK", 1)
    monkeypatch.setattr("paceline.data.convert.pack_writer._STATES_PER_TASK", 3)
    options = PackOptions(shard_bytes=2500)
    with pytest.raises(StopError):
        write_pack(photos, tmp_path / "p", options, stop_after(9), 1)
    path = photos.train.get_path(at) if at < 7 else photos.val.get_path(at - 7)
    path.write_bytes(make_photo(99, 33, 22))
    calls = []
    write_pack(photos, tmp_path / "p", options, lambda done, total: calls.append(done), 2)
    assert calls[0] <= at
    write_pack(photos, tmp_path / "whole", options, silent, 1)
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")


def test_the_modification_time_decides_whether_a_file_has_changed(core, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    monkeypatch.setattr("paceline.data.convert.pack_writer._FILES_PER_TASK", 1)
    path, calls, options = photos.train.get_path(0), [], PackOptions(shard_bytes=2500)
    status = path.stat()
    for later_ns in (0, 1):
        with pytest.raises(StopError):
            write_pack(photos, tmp_path / "p", options, stop_after(9), 1)
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later_ns))
        with pytest.raises(StopError):
            write_pack(
                photos, tmp_path / "p", options, lambda done, total: (calls.append(done), stop_after(0)(1, 1)), 1
            )
    assert calls[0] > 0 and calls[1] == 0


def test_a_replaced_tar_changes_the_state_of_its_samples_only(make_photo, tmp_path):
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for name, content in (("a.jpg", make_photo(number)), ("a.cls", b"0"), ("b.jpg", b"x"), ("b.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    section = WebDataset(train=f"{tmp_path}/{{0..1}}.tar", val=f"{tmp_path}/0.tar")
    tars, states = load_webdataset(section).train, []
    for _ in range(2):
        states.append([build_file_state_function(tars)(index) for index in range(4)])
        os.utime(tmp_path / "1.tar", ns=(1, 1))
    assert len(set(states[0])) == 4
    assert [index for index in range(4) if states[0][index] != states[1][index]] == [2, 3]


def test_the_state_of_a_packed_sample_is_its_checksum(core, folder, make_photo, packed, tmp_path):
    states = []
    for _ in range(2):
        photos = load_folder(Folder(root=str(folder)))
        states.append([build_file_state_function(packed(photos, overwrite=True).train)(index) for index in range(7)])
        photos.train.get_path(2).write_bytes(make_photo(98))
    assert [index for index in range(7) if states[0][index] != states[1][index]] == [2]


def contents(path):
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file.read_bytes() for file in files]


def test_shards_damaged_by_a_power_failure_are_packed_again(core, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    monkeypatch.setattr("paceline.data.convert.pack_writer._FILES_PER_TASK", 1)
    options = PackOptions(shard_bytes=2500)
    write_pack(photos, tmp_path / "whole", options, silent, 1)
    unfinished = tmp_path / ".p.part"
    rows, data, key = unfinished / "data-00000.rows", unfinished / "data-00000.pack", unfinished / "pack.key"
    damages = {
        "torn rows": lambda: rows.write_bytes(rows.read_bytes()[:-7]),
        "zeros": lambda: rows.write_bytes(bytes(99)),
        "data that are gone": lambda: data.write_bytes(data.read_bytes()[:1000]),
        "no data": data.unlink,
        "no rows": rows.unlink,
        "neither rows nor a key": lambda: (key.unlink(), rows.unlink()),
    }
    for name, damage in damages.items():
        with pytest.raises(StopError):
            write_pack(photos, tmp_path / "p", options, stop_after(6), 1)
        damage()
        write_pack(photos, tmp_path / "p", options, silent, 1)
        assert contents(tmp_path / "p") == contents(tmp_path / "whole"), name
        for path in (tmp_path / "p").iterdir():
            path.unlink()
        (tmp_path / "p").rmdir()


def test_an_unfinished_pack_of_another_source_is_not_resumed(core, photos, pixels, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    monkeypatch.setattr("paceline.data.convert.pack_writer._FILES_PER_TASK", 1)
    with pytest.raises(StopError):
        write_pack(photos, tmp_path / "p", PackOptions(shard_bytes=2500), stop_after(9), 1)
    for datasets, options in ((pixels, PackOptions()), (photos, PackOptions(every=4)), (photos, PackOptions(resize=9))):
        with pytest.raises(DataError, match=r"\.p\.part: is an unfinished pack of another source or with other"):
            write_pack(datasets, tmp_path / "p", options, silent, 1)


def test_two_processes_do_not_write_the_same_pack(core, pixels, tmp_path):
    unfinished = PartialPack.open(tmp_path / ".p.part", bytes(32), None)
    with pytest.raises(DataError, match="another process is writing to it"):
        write_pack(pixels, tmp_path / "p", PackOptions(), silent, 1)
    unfinished.close()


def test_bad_images_are_named_at_the_end_and_can_be_stored_unchanged(core, folder, tmp_path):
    (folder / "train/cat/a.jpg").write_bytes(b"\xff\xd8nothing")
    (folder / "train/cat/d.png").write_bytes(b"")
    photos = load_folder(Folder(root=str(folder)), skip_bad=True)
    with pytest.raises(DataError, match=r"^2 images cannot be read: cat/a.jpg \(.*\), cat/d.png \(is empty .*skip$"):
        write_pack(photos, tmp_path / "p", PackOptions(), silent, 2)
    calls = []
    write_pack(photos, tmp_path / "p", PackOptions(skip_bad=True), lambda done, total: calls.append(done), 2)
    assert calls == [10], "packed samples are not packed again"
    train = open_pack(tmp_path / "p").train
    assert train.read(0) == (b"\xff\xd8nothing", 0)
    with pytest.raises(DataError, match=r"p: cat/d.png: is empty \(0 bytes\)"):
        train.read(3)
    assert train.labels.tolist() == photos.train.labels.tolist()


def test_an_empty_sample_of_a_tar_keeps_its_label(core, folder, tmp_path):
    photo = (folder / "train/cat/a.jpg").read_bytes()
    with tarfile.open(tmp_path / "t.tar", "w") as file:
        for name, content in (("0.cls", b"0"), ("0.jpg", photo), ("1.cls", b"1"), ("1.jpg", b"")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    tars = load_webdataset(WebDataset(train=str(tmp_path / "t.tar"), val=str(tmp_path / "t.tar")))
    write_pack(tars, tmp_path / "p", PackOptions(skip_bad=True), silent, 1)
    train = open_pack(tmp_path / "p").train
    assert train.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"is empty \(0 bytes\)"):
        train.read(1)


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 2500}], ids=["one file", "shards"])
@pytest.mark.parametrize("fix", ["replaced", "removed"])
def test_a_bad_image_can_be_replaced_or_removed(core, folder, tmp_path, monkeypatch, options, fix):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    bad = folder / "train/cat/b.jpg"
    good = bad.read_bytes()
    bad.write_bytes(b"\xff\xd8" + bytes(20_000))
    with pytest.raises(DataError, match="remove or replace them"):
        photos = load_folder(Folder(root=str(folder)), skip_bad=True)
        write_pack(photos, tmp_path / "p", PackOptions(**options), silent, 2)
    if fix == "replaced":
        bad.write_bytes(good)
    else:
        bad.unlink()
    photos = load_folder(Folder(root=str(folder)))
    for name in ("p", "whole"):
        write_pack(photos, tmp_path / name, PackOptions(**options), silent, 2)
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")


def test_a_full_disk_is_a_one_line_error_and_the_next_run_resumes(core, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    monkeypatch.setattr("paceline.data.convert.pack_writer._FILES_PER_TASK", 1)
    add, remaining, options = PartialPack.add, iter(range(6)), PackOptions(shard_bytes=2500)

    def full(self, sample, *, is_first):
        if next(remaining, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, sample, is_first=is_first)

    monkeypatch.setattr(PartialPack, "add", full)
    with pytest.raises(
        DataError, match=r"p: the disk is full \(free some space and pack again: finished shards are kept\)"
    ):
        write_pack(photos, tmp_path / "p", options, silent, 1)
    monkeypatch.setattr(PartialPack, "add", add)
    calls = []
    write_pack(photos, tmp_path / "p", options, lambda done, total: calls.append(done), 1)
    assert 0 < calls[0] < 6


@pytest.mark.parametrize("wrong", [{"resize": 0}, {"quality": 0}, {"quality": 101}, {"every": 0}, {"shard_bytes": 9}])
def test_invalid_options_are_refused(core, pixels, packed, wrong):
    (name,) = wrong
    with pytest.raises(DataError, match=f"^{name.replace('_', ' ')}: .*\\)$"):
        packed(pixels, **wrong)


def test_a_missing_output_folder_is_refused(core, pixels, tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        write_pack(pixels, tmp_path / "no" / "p", PackOptions(), silent, 1)


def test_a_pack_can_be_packed_again(core, photos, packed):
    once = packed(photos)
    again = packed(once, "again.pack")
    assert digest_datasets(again) == digest_datasets(photos)
    assert [again.train.name_of(index) for index in range(7)] == [once.train.name_of(index) for index in range(7)]
    assert again.train.read(0) == once.train.read(0)


def test_names_of_a_source_without_a_list_of_names_are_stored(core, pixels, packed):
    train = SimpleNamespace()
    train.info, train.read, train.name_of = pixels.train.info, pixels.train.read, lambda index: f"n\u00e4me {index}"
    source = type("Plain", (), {"__len__": lambda self: 5, **{k: property(lambda self, k=k: getattr(train, k)) for k in
                  ("info", "read", "name_of")}})()  # fmt: skip
    found = packed(type(pixels)(source, pixels.val))
    assert isinstance(found.train, PackSource)
    assert [found.train.name_of(index) for index in range(5)] == [f"näme {index}" for index in range(5)]
    assert found.train.read(3)[0].tolist() == pixels.train.images[3].tolist()

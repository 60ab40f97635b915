"""A pack is compared with its source."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.core.dataset import ArraySource, Datasets
from paceline.core.errors import DataError
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.convert.verify_pack import compare_pack
from paceline.data.native import load_native
from paceline.data.pack.reader import open_pack
from paceline.data.sources.folder import load_folder
from paceline.data.sources.image_files import ImageFileSource
from paceline.recipe.schema.source import Folder


def silent(done, total):
    pass


def relabelled(source, labels):
    return ImageFileSource(source.info, source.root, source.paths, np.array(labels, dtype=np.int32))


def test_pack_equals_its_source(core, photos, packed):
    calls = []
    found = compare_pack(photos, packed(photos), lambda done, total: calls.append((done, total)), 2)
    assert (found.images, found.exact, found.faults, found.mean_difference) == (10, 10, (), 0.0)
    assert calls[0] == (0, 10) and calls[-1] == (10, 10)


def test_pixels_are_compared_too(core, pixels, packed):
    found = compare_pack(pixels, packed(pixels), silent, 2)
    assert (found.exact, found.faults) == (8, ())
    train = pixels.train
    other = Datasets(ArraySource(train.info, train.images[::-1], train.labels), pixels.val)
    assert [fault.index for fault in compare_pack(other, packed(pixels, "p"), silent, 2).faults] == [0, 1, 3, 4]


def test_a_replaced_image_is_found(core, folder, photos, packed, make_photo):
    made = packed(photos)
    (folder / "train/cat/b.jpg").write_bytes(make_photo(99, mode="L"))
    (fault,) = compare_pack(photos, made, silent, 2).faults
    assert (fault.split, fault.index, fault.name, fault.what) == (
        "train",
        1,
        "cat/b.jpg",
        "has other pixels in the pack",
    )


def test_all_faults_are_counted_and_the_first_are_named(core, pixels, packed, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.verify_pack._MAX_FAULTS", 2)
    train = pixels.train
    other = Datasets(ArraySource(train.info, train.images[::-1], train.labels), pixels.val)
    found = compare_pack(other, packed(pixels), silent, 2)
    assert (found.num_faults, [fault.index for fault in found.faults]) == (4, [0, 1])


def test_another_label_is_found(core, photos, packed):
    made = packed(photos)
    labels = photos.val.labels.tolist()
    other = Datasets(photos.train, relabelled(photos.val, labels[::-1]))
    faults = compare_pack(other, made, silent, 2).faults
    assert [(fault.split, fault.index) for fault in faults] == [("val", 0), ("val", 2)]
    assert faults[0].what == "has label 0 in the pack, and 1 in the source"


def test_another_name_is_found(core, folder, photos, packed):
    made = packed(photos)
    (folder / "val/cat/h.jpg").rename(folder / "val/cat/z.jpg")
    (fault,) = compare_pack(load_folder(Folder(root=str(folder))), made, silent, 2).faults
    assert (fault.name, fault.what) == ("cat/z.jpg", "is named cat/h.jpg in the pack")


@pytest.mark.parametrize("change", [{"class_names": ("x", "y")}, {"channels": 1}], ids=["classes", "channels"])
def test_a_pack_of_another_data_set_is_refused(core, photos, packed, change):
    other = replace(photos.train, info=replace(photos.train.info, **change))
    with pytest.raises(
        DataError, match=r"^the pack and its source differ in .* of train: .* \(pack the source again\)"
    ):
        compare_pack(Datasets(other, photos.val), packed(photos), silent, 2)


def test_images_that_were_scaled_down_are_close_and_of_the_right_size(core, photos, packed):
    found = compare_pack(photos, packed(photos, resize=16, quality=90), silent, 2)
    assert found.faults == () and found.images == 10
    # One image is smaller than 16 and is untouched. Blobs of 3 pixels lose to the halved resolution of color (8 levels
    # seen); another image in their place differs by 70 and more.
    assert found.exact == 1 and 0 < found.mean_difference < 16


def test_a_scaled_image_of_another_picture_is_found(core, folder, photos, packed):
    made = packed(photos, resize=16)
    black = folder / "train/cat/d.png"
    from PIL import Image

    Image.new("RGB", (40, 30)).save(black)
    (fault,) = compare_pack(photos, made, silent, 2).faults
    assert fault.name == "cat/d.png" and fault.what.startswith("is another image: its pixels differ by")


def test_images_that_are_unreadable_in_both_are_equal(core, folder, tmp_path):
    (folder / "train/cat/d.png").write_bytes(b"")
    (folder / "train/cat/a.jpg").write_bytes(b"\xff\xd8nothing")
    photos = load_folder(Folder(root=str(folder)), skip_bad=True)
    write_pack(photos, tmp_path / "p", PackOptions(skip_bad=True), silent, 2)
    found = compare_pack(photos, open_pack(tmp_path / "p"), silent, 2)
    assert found.faults == () and found.images == found.exact == 10


def test_the_native_core_decodes_the_same_pixels(photos, tmp_path):
    if load_native() is None:
        pytest.skip("the native core is not built")
    write_pack(photos, tmp_path / "p", PackOptions(), silent, 2)
    found = compare_pack(photos, open_pack(tmp_path / "p"), silent, 2)
    assert (found.exact, found.faults, found.decoders) == (10, (), ("pillow", "native"))
    assert open_pack(tmp_path / "p").train.kinds.tolist().count(1) >= 5


def test_other_pixels_of_the_native_core_are_found(core, photos, packed, monkeypatch):
    class Wrong:
        def size_of(self, record):
            return 30, 40, 3

        def decode_into(self, record, channels, out):
            out[:] = 7

    made = packed(photos)
    monkeypatch.setattr("paceline.data.convert.verify_pack.load_native", Wrong)
    faults = compare_pack(photos, made, silent, 2).faults
    assert len(faults) == 7 and {fault.what for fault in faults} == {"decodes to other pixels with the native core"}

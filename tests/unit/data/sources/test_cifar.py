"""CIFAR from its authors' files and from class folders: the same pixels, and no code of a file is run."""

import hashlib
import io
import os
import pickle
import tarfile
import urllib.error

import numpy as np
import pytest
from PIL import Image

from paceline.data.sources.build import build_datasets
from paceline.data.sources.cifar import load_cifar, load_cifar_validation
from paceline.recipe.schema.source import Cifar10, Cifar100

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def batch(num_images, seed, num_classes=10, key="labels"):
    """Images in the authors' layout, classes in turn."""
    data = np.random.default_rng(seed).integers(0, 256, (num_images, 3072), dtype=np.uint8)
    return {"data": data, key: [(seed + place) % num_classes for place in range(num_images)], "batch_label": "x"}


def as_python_2(value):
    """The stream that Python 2 and numpy 1 wrote: byte strings for text and for the array's content."""
    stream = pickle.dumps(value, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in stream or b"numpy" not in stream
    return stream


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_bytes(value if isinstance(value, bytes) else as_python_2(value))


def cifar10_files(**changed):
    files = {name: batch(20, seed) for seed, name in enumerate(BATCHES)} | {"test_batch": batch(10, 7)}
    return files | {"batches.meta": {"label_names": list(NAMES), "num_vis": 3072}} | changed


@pytest.fixture
def cifar10(tmp_path):
    write(tmp_path / "cifar-10-batches-py", cifar10_files())
    return tmp_path


@pytest.mark.parametrize("place", ["", "cifar-10-batches-py"])
def test_planes_of_the_authors_files_become_pixels(place, cifar10):
    data = load_cifar(Cifar10(root=str(cifar10 / place)), may_download=False)
    files = cifar10_files()
    assert data.train.images.shape == (100, 32, 32, 3)
    assert (data.train.images.dtype, data.train.labels.dtype) == (np.uint8, np.int64)
    for index, (name, row) in ((0, ("data_batch_1", 0)), (47, ("data_batch_3", 7)), (99, ("data_batch_5", 19))):
        assert np.array_equal(data.train.images[index].transpose(2, 0, 1).ravel(), files[name]["data"][row])
        assert data.train.labels[index] == files[name]["labels"][row]
    assert np.array_equal(data.val.images.transpose(0, 3, 1, 2).reshape(10, 3072), files["test_batch"]["data"])
    assert data.train.info.class_names == data.val.info.class_names == NAMES
    assert (data.train.info.image_size, data.val.info.num_images) == ((32, 32), 10)
    assert data.train.images.flags.writeable  # torch warns about memory that it may not write
    assert data.val.images.flags.writeable


def test_strings_of_python_2_are_read(cifar10):
    """Protocol 2 of Python 3 differs from the originals in this: they hold SHORT_BINSTRING and BINSTRING."""
    array = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    raw = array.tobytes()
    stream = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T" + len(raw).to_bytes(4, "little") + raw + b"tbU\x06labels](K\x03K\x04eu."
    )
    write(cifar10 / "cifar-10-batches-py", {"test_batch": stream})
    val = load_cifar(Cifar10(root=str(cifar10)), may_download=False).val
    assert np.array_equal(val.images.transpose(0, 3, 1, 2).reshape(2, 3072), array)
    assert val.labels.tolist() == [3, 4]


def test_cifar100_takes_the_fine_labels(tmp_path):
    names = [f"class{number:02d}" for number in range(100)]
    files = {"train": batch(200, 1, 100, "fine_labels"), "test": batch(100, 2, 100, "fine_labels")}
    write(tmp_path / "cifar-100-python", files | {"meta": {"fine_label_names": names, "coarse_label_names": []}})
    for root in (tmp_path, tmp_path / "cifar-100-python"):
        data = load_cifar(Cifar100(root=str(root)), may_download=False)
        assert (len(data.train), len(data.val), data.train.info.num_classes) == (200, 100, 100)
        assert data.train.labels[:3].tolist() == [1, 2, 3]


def test_class_folders_of_png_give_the_same_pixels(cifar10, tmp_path):
    files = load_cifar(Cifar10(root=str(cifar10)), may_download=False)
    for split, source in (("train", files.train), ("test", files.val)):
        for index in range(len(source)):
            pixels, label = source.read(index)
            folder = tmp_path / "png" / split / NAMES[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{index:04d}.png")

    folders = load_cifar(Cifar10(root=str(tmp_path / "png")), may_download=False)

    for split in ("train", "val"):
        one, other = getattr(files, split), getattr(folders, split)
        order = np.argsort(one.labels, kind="stable")
        assert np.array_equal(one.images[order], other.images)
        assert np.array_equal(one.labels[order], other.labels)
        assert one.info == other.info
    for root, whole in ((cifar10, files), (tmp_path / "png", folders)):
        for path in (*root.rglob("data_batch_[2-5]"), *root.rglob("png/train/*/*.png")):
            path.write_bytes(b"")  # training images are not looked at for the others
        alone = load_cifar_validation(Cifar10(root=str(root)))
        assert np.array_equal(alone.images, whole.val.images) and alone.info == whole.val.info


def test_class_folders_of_other_images_are_refused(make_images, error_message):
    tree = {f"{split}/{name}": 1 for split in ("train", "test") for name in NAMES}
    root = make_images(tree)
    message = error_message(load_cifar, Cifar10(root=str(root)), may_download=False)
    assert message == f"{root}/train/airplane/0.png: is 4x4, not 32x32 (use data.source.name=folder)"
    message = error_message(load_cifar, Cifar100(root=str(root)), may_download=False)
    assert "train has 10 class folders, but CIFAR-100 has 100 classes" in message


def test_train_and_test_folders_must_agree(tmp_path, error_message):
    for split in ("train", "test"):
        for name in (*NAMES[:9], "lorry" if split == "test" else "truck"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(tmp_path / split / name / "0.png")
    message = error_message(load_cifar, Cifar10(root=str(tmp_path)), may_download=False)
    assert message.startswith(f"{tmp_path}: train/ and test/ differ in class 'lorry'")


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
def test_an_evil_file_runs_nothing(name, cifar10, error_message):
    mark = cifar10 / "ran"
    write(cifar10 / "cifar-10-batches-py", {name: {"data": Evil(mark), "labels": [], "label_names": []}})
    message = error_message(load_cifar, Cifar10(root=str(cifar10)), may_download=False)
    assert message.startswith(
        f"{cifar10}/cifar-10-batches-py/{name}: refers to posix.mkdir; a CIFAR file may hold only"
    )
    assert not mark.exists()


def objects(mark):
    array = np.empty((1, 3072), dtype=object)
    array[0, 0] = Evil(mark)
    return array


BAD = {
    "objects": {"data": np.empty((1, 3072), dtype=object), "labels": [1]},
    "floats": {"data": np.zeros((1, 3072)), "labels": [1]},
    "a record": {"data": np.zeros((1, 3072), dtype=[("a", "u1")]), "labels": [1]},
    "another shape": {"data": np.zeros((1, 3071), dtype=np.uint8), "labels": [1]},
    "one dimension": {"data": np.zeros(3072, dtype=np.uint8), "labels": [1]},
    "no data": {"labels": [1]},
    "a list": {"data": [0] * 3072, "labels": [1]},
    "a label too many": {"data": np.zeros((1, 3072), dtype=np.uint8), "labels": [1, 2]},
    "a label out of range": {"data": np.zeros((1, 3072), dtype=np.uint8), "labels": [10]},
    "a label that is no number": {"data": np.zeros((1, 3072), dtype=np.uint8), "labels": ["1"]},
    "a label that is a truth": {"data": np.zeros((1, 3072), dtype=np.uint8), "labels": [True]},
    "no labels": {"data": np.zeros((1, 3072), dtype=np.uint8)},
    "no dict": [1, 2],
    "no pickle": b"<!DOCTYPE html>",
    "a scalar": {"data": np.uint8(1), "labels": [1]},
    "array with no state": b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n"
    b"cnumpy\nndarray\nK\x00\x85U\x01b\x87Rs.",
    "a changed stand-in": b"\x80\x02}U\x04datacnumpy\ndtype\n}U\x08__call__K\x01s\x86bs.",
    "zip as text encoding": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00zip\x86R.",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_an_invalid_batch_file_is_refused_by_name(content, cifar10, error_message):
    write(cifar10 / "cifar-10-batches-py", {"data_batch_2": content})
    message = error_message(load_cifar, Cifar10(root=str(cifar10)), may_download=False)
    assert message.startswith(f"{cifar10}/cifar-10-batches-py/data_batch_2: ")
    assert "fetch the dataset again" in message


def test_objects_in_an_array_are_not_even_built(cifar10, error_message):
    write(cifar10 / "cifar-10-batches-py", {"data_batch_2": {"data": objects(cifar10 / "ran"), "labels": [1]}})
    assert "holds an array of 'O8'" in error_message(load_cifar, Cifar10(root=str(cifar10)), may_download=False)
    assert not (cifar10 / "ran").exists()


def test_array_content_that_does_not_fit_its_shape_is_refused(cifar10, error_message):
    stream = as_python_2({"data": np.zeros((1, 3072), dtype=np.uint8), "labels": [1]})
    write(cifar10 / "cifar-10-batches-py", {"data_batch_2": stream.replace(b"K\x01M\x00\x0c", b"K\x02M\x00\x0c")})
    assert "does not fit" in error_message(load_cifar, Cifar10(root=str(cifar10)), may_download=False)


def test_a_missing_batch_is_named(cifar10, error_message):
    (cifar10 / "cifar-10-batches-py/data_batch_4").unlink()
    message = error_message(load_cifar, Cifar10(root=str(cifar10)), may_download=False)
    assert message.startswith(f"{cifar10}/cifar-10-batches-py/data_batch_4: cannot be read: No such file or directory")


@pytest.mark.parametrize(("download", "fix"), [(False, ", or data.source.download=true)"), (True, "that has it)")])
def test_a_root_without_cifar_names_the_expected_folders(download, fix, tmp_path, error_message):
    message = error_message(load_cifar, Cifar10(root=str(tmp_path), download=download), may_download=not download)
    assert message.startswith(
        f"data.source.root: {tmp_path} has no CIFAR-10 "
        f"(expected cifar-10-batches-py/ or train/ and test/ class folders; "
    )
    assert message.endswith(fix)


@pytest.fixture
def served(tmp_path, monkeypatch, serve):
    """CIFAR-10's archive on a local server, with members that lead outside the folder."""
    from torchvision.datasets import CIFAR10

    archive = tmp_path / "served/cifar.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for name, value in cifar10_files().items():
            stream = as_python_2(value)
            for path in (f"cifar-10-batches-py/{name}", f"../{name}", f"/{tmp_path}/outside/{name}"):
                member = tarfile.TarInfo(path)
                member.size = len(stream)
                tar.addfile(member, io.BytesIO(stream))
    monkeypatch.setattr(CIFAR10, "url", f"{serve(archive.parent)}/{archive.name}")
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return archive


# matrix: 46
def test_it_is_downloaded_once_and_only_by_the_rank_that_may(served, tmp_path, capfd):
    section = Cifar10(root=str(tmp_path / "a/b"))
    first = build_datasets(section, may_download=True)
    served.unlink()
    second = build_datasets(section, may_download=False)
    assert np.array_equal(first.train.images, second.train.images)
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["cifar-10-batches-py"]
    assert sorted(path.name for path in (tmp_path / "a/b/cifar-10-batches-py").iterdir()) == sorted(cifar10_files())
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "a/data_batch_1").exists()
    assert capfd.readouterr().out == ""


def test_an_archive_that_was_tampered_with_is_not_unpacked(served, tmp_path, error_message):
    served.write_bytes(served.read_bytes() + b"\0")
    root = tmp_path / "data"
    message = error_message(load_cifar, Cifar10(root=str(root)), may_download=True)
    assert message.startswith(f"data.source.root: {root} has no CIFAR-10, and it could not be downloaded: ")
    assert list(root.iterdir()) == []


def test_without_a_network_the_message_says_so(tmp_path, monkeypatch, error_message):
    def unreachable(*arguments, **options):
        raise urllib.error.URLError("Name or service\nnot known")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    message = error_message(load_cifar, Cifar100(root=str(tmp_path)), may_download=True)
    assert message == (
        f"data.source.root: {tmp_path} has no CIFAR-100, and it could not be downloaded: <urlopen error Name or "
        f"service not known>; download it elsewhere and set data.source.root to the folder that has it"
    )


def test_a_root_that_cannot_be_created_is_a_one_line_error(tmp_path, error_message):
    (tmp_path / "file").touch()
    message = error_message(load_cifar, Cifar10(root=f"{tmp_path}/file/data"), may_download=True)
    assert "could not be downloaded: [Errno 20] Not a directory" in message


@pytest.mark.real_data
def test_the_class_folders_of_real_cifar10(real_data, tmp_path):
    for folder in real_data("cifar10").glob("*/*"):
        files = sorted(folder.iterdir())
        assert len(files) == {"train": 5000, "test": 1000}[folder.parent.name]
        few = tmp_path / folder.parent.name / folder.name
        few.mkdir(parents=True)
        for file in files[::10]:  # all 60,000 take a quarter of a minute
            (few / file.name).symlink_to(file)
    data = load_cifar(Cifar10(root=str(tmp_path)), may_download=False)
    assert (len(data.train), len(data.val)) == (5_000, 1_000)
    assert data.train.info.class_names == NAMES
    assert np.bincount(data.train.labels).tolist() == [500] * 10
    assert np.bincount(data.val.labels).tolist() == [100] * 10
    scaled = data.train.images / 255  # JPEG at quality 75, so near the constants and not equal
    assert np.abs(scaled.mean((0, 1, 2)) - data.train.info.mean).max() < 0.005
    assert np.abs(scaled.std((0, 1, 2)) - data.train.info.std).max() < 0.005

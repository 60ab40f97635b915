"""Fashion-MNIST's IDX files: their folders, and invalid headers."""

import gzip
import hashlib
import struct

import numpy as np
import pytest

from paceline.data.sources.fashion_mnist import load_fashion_mnist, read_idx
from paceline.recipe.schema.source import FashionMnist

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    train, test = (random.integers(0, 256, (count, 28, 28), dtype=np.uint8) for count in (30, 10))
    return dict(
        zip(FILES, (train, np.arange(30, dtype=np.uint8) % 10, test, np.arange(10, dtype=np.uint8)), strict=True)
    )


@pytest.fixture
def stored(tmp_path, arrays):
    """Return a function that writes the four files to a folder, gzipped or not."""

    def write(place="", zipped=True):
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            content = idx(array)
            (folder / f"{name}.gz" if zipped else folder / name).write_bytes(
                gzip.compress(content) if zipped else content
            )
        return folder

    return write


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["", "FashionMNIST/raw", "raw"])
def test_all_layouts_give_the_pixels(place, zipped, stored, arrays, tmp_path):
    stored(place, zipped)
    data = load_fashion_mnist(FashionMnist(root=str(tmp_path)), may_download=False)
    assert np.array_equal(data.train.images[..., 0], arrays["train-images-idx3-ubyte"])
    assert np.array_equal(data.val.images[..., 0], arrays["t10k-images-idx3-ubyte"])
    assert data.train.labels.tolist() == [*range(10)] * 3
    assert (data.train.images.shape, data.train.labels.dtype) == ((30, 28, 28, 1), np.int64)
    assert data.train.images.flags.writeable
    assert (data.val.info.class_names[0], data.val.info.class_names[9]) == ("T-shirt/top", "Ankle boot")


def test_class_names_are_torchvision_s(stored, tmp_path):
    from torchvision.datasets import FashionMNIST

    stored()
    data = load_fashion_mnist(FashionMnist(root=str(tmp_path)), may_download=False)
    assert data.train.info.class_names == tuple(FashionMNIST.classes)


IMAGES = np.zeros((3, 28, 28), dtype=np.uint8)
BAD = {
    "empty": (b"", "its header ends after 0 bytes"),
    "a cut header": (idx(IMAGES)[:10], "its header ends after 10 bytes"),
    "labels": (
        idx(np.zeros(5000, dtype=np.uint8)),
        "it is not an IDX file of 3-dimensional uint8 (its magic number is 0x00000801)",
    ),
    "html": (b"<!DOCTYPE html><html>", "magic number is 0x3c21444f"),
    "floats": (struct.pack(">4I", 0x0D03, 3, 28, 28), "magic number is 0x00000d03"),
    "another size": (
        idx(np.zeros((3, 32, 32), dtype=np.uint8)),
        "its header says 3x32x32, which is not Fashion-MNIST's",
    ),
    "too many": (struct.pack(">4I", 0x0803, 2**32 - 1, 28, 28), "its header says 4294967295x28x28"),
    "a byte short": (idx(IMAGES)[:-1], "its header says 2,352 bytes, and it holds only 2,351"),
    "a byte more": (idx(IMAGES) + b"\0", "its header says 2,352 bytes, and it holds more"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(("content", "problem"), BAD.values(), ids=BAD)
def test_a_file_of_another_type_or_shape_is_named(content, problem, zipped, stored, tmp_path, error_message):
    name = "train-images-idx3-ubyte.gz" if zipped else "train-images-idx3-ubyte"
    stored(zipped=zipped)
    (tmp_path / name).write_bytes(gzip.compress(content) if zipped else content)
    message = error_message(load_fashion_mnist, FashionMnist(root=str(tmp_path)), may_download=False)
    assert message.startswith(f"{tmp_path}/{name}: cannot be read: ")
    assert problem in message
    assert message.endswith("; remove it and fetch the dataset again")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: b"\0" + data[1:], lambda data: data[:40] + b"\0" * 40]
)
def test_a_damaged_gzip_file_is_named(damage, stored, arrays, tmp_path, error_message):
    path = stored() / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    message = error_message(load_fashion_mnist, FashionMnist(root=str(tmp_path)), may_download=False)
    assert message.startswith(f"{path}: cannot be read: ")


def test_a_decompression_bomb_is_read_only_up_to_the_size_in_its_header(tmp_path, error_message):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx(IMAGES) + bytes(2**26)))
    opened = []
    original = gzip.GzipFile.read

    def counted(self, size=-1):
        opened.append(size)
        return original(self, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gzip.GzipFile, "read", counted)
        assert "it holds more" in error_message(read_idx, path, (None, 28, 28))
    assert opened == [16, 3 * 28 * 28 + 1]


def test_labels_must_match_images_and_be_classes(stored, arrays, tmp_path, error_message):
    stored(zipped=False)
    section = FashionMnist(root=str(tmp_path))
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(idx(np.zeros(29, dtype=np.uint8)))
    assert "has 29 labels for 30 images" in error_message(load_fashion_mnist, section, may_download=False)
    path.write_bytes(idx(np.full(30, 10, dtype=np.uint8)))
    assert "label 10 is not one of 0 to 9" in error_message(load_fashion_mnist, section, may_download=False)


def test_a_root_without_one_of_the_files_names_the_expected_files(stored, tmp_path, error_message):
    (stored() / "t10k-labels-idx1-ubyte.gz").unlink()
    message = error_message(load_fashion_mnist, FashionMnist(root=str(tmp_path), download=False), may_download=True)
    assert message.startswith(f"data.source.root: {tmp_path} has no Fashion-MNIST (expected train-images-idx3-ubyte, ")
    assert message.endswith(", or data.source.download=true)")


def test_it_is_downloaded_once_and_only_by_the_rank_that_may(stored, serve, tmp_path, monkeypatch, capfd):
    from torchvision.datasets import FashionMNIST

    served = stored("served")
    sums = [(f"{name}.gz", hashlib.md5((served / f"{name}.gz").read_bytes()).hexdigest()) for name in FILES]
    monkeypatch.setattr(FashionMNIST, "mirrors", [f"{serve(served)}/"])
    monkeypatch.setattr(FashionMNIST, "resources", sums)
    section = FashionMnist(root=str(tmp_path / "data"))
    first = load_fashion_mnist(section, may_download=True)
    monkeypatch.setattr(FashionMNIST, "mirrors", [])
    second = load_fashion_mnist(section, may_download=False)
    assert np.array_equal(first.train.images, second.train.images)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["FashionMNIST"]
    assert capfd.readouterr().out == ""


def test_a_failed_download_is_one_line(tmp_path, monkeypatch, error_message):
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(FashionMNIST, "mirrors", [f"{(tmp_path / 'gone').as_uri()}/"])
    message = error_message(load_fashion_mnist, FashionMnist(root=str(tmp_path)), may_download=True)
    assert message.startswith(f"data.source.root: {tmp_path} has no Fashion-MNIST, and it could not be downloaded: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real_data
def test_the_real_files(real_data):
    data = load_fashion_mnist(FashionMnist(root=str(real_data("fashion-mnist"))), may_download=False)
    assert (len(data.train), len(data.val)) == (60_000, 10_000)
    assert np.bincount(data.val.labels).tolist() == [1000] * 10
    scaled = data.train.images / 255
    assert abs(scaled.mean() - data.train.info.mean[0]) < 5e-4
    assert abs(scaled.std() - data.train.info.std[0]) < 5e-4

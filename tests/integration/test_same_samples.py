"""One recipe gives the same samples, labels, draws and pixels from every source and loader, in every batch.

The native loader's pixels are equal up to rounding.
"""

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Source
from paceline.data.batch import Batch
from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.loaders.build import LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.choose import choose_loader
from paceline.data.loaders.sampler import build_sampler
from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.timing import LoaderName
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder, HuggingFace, Lmdb, Manifest, WebDataset

NUM_TRAIN, NUM_VAL, SIZE = 30, 11, 24
FILES = Data(augment=("random_resized_crop", "flip", "rotate", "cutout", "mixup", "cutmix"), cache="off")  # type: ignore[arg-type]
PIXELS = Data(augment=("pad_crop", {"name": "flip", "mode": "alternating"}, "rotate", "mixup"))  # type: ignore[arg-type]
REPEATED = Data(augment=("random_resized_crop", "flip", "three_augment", "mixup"), sampler="repeated", cache="off")  # type: ignore[arg-type]
MOST_OFF, MEAN_OFF = 20, 0.6
"""Largest and mean difference in gray levels of the native loader, which resizes luma and chroma.

torchvision resizes rounded and clipped colors. The smooth colors of these images differ by up to 8, and by 0.4 in the
mean (measured); a mistake in a crop or a draw differs by tens in the mean.
"""


def quiet(done: int, num: int) -> None: ...


def build_image(number: int) -> Image.Image:
    """Return smooth colors that differ between any two images and any two corners."""
    rows, columns = np.mgrid[0 : 40 + number % 7 * 5, 0 : 52 + number % 3 * 9].astype(np.float64)
    waves = [128 + 90 * np.sin(rows / (5 + number % 4) + shift) * np.cos(columns / 8 + number) for shift in range(3)]
    return Image.fromarray(np.stack(waves, 2).clip(0, 255).astype(np.uint8))


def encode(number: int) -> tuple[str, bytes]:
    """Return the file extension and content of an image: several kinds of JPEG, sometimes a PNG."""
    image, file = build_image(number), io.BytesIO()
    match number % 10:
        case 3:
            image.convert("L").save(file, "jpeg", quality=90)
        case 4:
            image.save(file, "png")
        case 5:
            image.save(file, "jpeg", quality=90, progressive=True)
        case 6:
            exif = Image.Exif()
            exif[0x0112] = 6
            image.save(file, "jpeg", quality=90, exif=exif)
        case kind:
            image.save(file, "jpeg", quality=90, subsampling=kind % 3)
    return "png" if number % 10 == 4 else "jpg", file.getvalue()


def samples(split: str) -> Iterator[tuple[str, int, bytes]]:
    """Yield (path, label, content) in the order of a folder: two classes, one after the other."""
    num, first = (NUM_TRAIN, 0) if split == "train" else (NUM_VAL, NUM_TRAIN)
    for position in range(num):
        label = int(position >= num // 2)
        ending, content = encode(first + position)
        yield f"{'ab'[label]}/{position:03}.{ending}", label, content


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for split in ("train", "val"):
        for path, _, content in samples(split):
            (root / split / path).parent.mkdir(parents=True, exist_ok=True)
            (root / split / path).write_bytes(content)
    return root


def from_folder(folder: Path, tmp_path: Path) -> Datasets:
    return build_datasets(Folder(root=str(folder)), may_download=False)


def from_manifest(folder: Path, tmp_path: Path) -> Datasets:
    for split in ("train", "val"):
        lines = [f"{split}/{path},{'ab'[label]}" for path, label, _ in samples(split)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["path,label", *lines]))
    lists = {split: str(tmp_path / f"{split}.csv") for split in ("train", "val")}
    return build_datasets(Manifest(**lists, root=str(folder)), may_download=False)


def from_pack(folder: Path, tmp_path: Path) -> Datasets:
    write_pack(from_folder(folder, tmp_path), tmp_path / "one.pack", PackOptions(), quiet, 2)
    return open_pack(tmp_path / "one.pack")


def from_shards(folder: Path, tmp_path: Path, monkeypatch) -> Datasets:
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1)
    write_pack(from_folder(folder, tmp_path), tmp_path / "shards", PackOptions(shard_bytes=20_000), quiet, 2)
    opened = open_pack(tmp_path / "shards")
    assert isinstance(opened.train, PackSource) and len(opened.train.files) > 2
    return opened


def from_lmdb(folder: Path, tmp_path: Path) -> Datasets:
    pytest.importorskip("lmdb", reason="the package lmdb is not installed: pip install lmdb")
    write_lmdb(from_folder(folder, tmp_path), tmp_path / "lmdb", quiet)
    return build_datasets(Lmdb(root=str(tmp_path / "lmdb")), may_download=False)


def from_tars(folder: Path, tmp_path: Path) -> Datasets:
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            for number, (path, label, content) in enumerate(samples(split)):
                for name, data in ((path.split(".")[1], content), ("cls", str(label).encode())):
                    about = tarfile.TarInfo(f"{number:06}.{name}")
                    about.size = len(data)
                    tar.addfile(about, io.BytesIO(data))
    tars = {split: str(tmp_path / f"{split}.tar") for split in ("train", "val")}
    return build_datasets(WebDataset(**tars), may_download=False)


def from_hugging_face(folder: Path, tmp_path: Path, monkeypatch) -> Datasets:
    hf = pytest.importorskip("datasets", reason="the package datasets is not installed: pip install datasets")
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["a", "b"])})
    splits = {}
    for split, name in (("train", "train"), ("val", "validation")):
        rows = list(samples(split))
        images = [{"bytes": content, "path": path} for path, _, content in rows]
        columns = {"image": images, "label": [label for _, label, _ in rows]}
        splits[name] = hf.Dataset.from_dict(columns, features=features)
    hf.DatasetDict(splits).save_to_disk(str(tmp_path / "hf"))
    return build_datasets(HuggingFace(root=str(tmp_path / "hf")), may_download=False)


SOURCES: dict[str, Callable[..., Datasets]] = {
    "folder": from_folder,
    "manifest": from_manifest,
    "pack": from_pack,
    "shards": from_shards,
    "lmdb": from_lmdb,
    "webdataset": from_tars,
    "huggingface": from_hugging_face,
}


PAIRS = [(source, loader) for source in SOURCES for loader in ("inline", "threads", "processes")]
AS_FILES = ("folder", "manifest", "webdataset", "huggingface")
PAIRS += [(source, "native") for source in ("pack", "shards", *AS_FILES)]


@pytest.fixture
def datasets(request, folder: Path, tmp_path: Path, monkeypatch) -> Datasets:
    """The same images from one of the sources."""
    own = {"monkeypatch": monkeypatch} if request.param in ("shards", "huggingface") else {}
    return SOURCES[request.param](folder, tmp_path, **own)


def options_of(loader: LoaderName) -> LoaderOptions:
    return LoaderOptions(0 if loader in ("inline", "device") else 2, pin_memory=False, loader=loader)


def train_batches(data: Data, source: Source, loader: LoaderName, first: int = 0) -> list[Batch]:
    """Return the batches of more than two epochs."""
    sampler = build_sampler(data.model_copy(update={"batch_size": 8}), source, lambda duration: 0)
    order = TrainOrder(seed=3, num_images=len(source), batch_size=8, sampler=sampler)
    built = build_train_loader(data, source, order, lambda step: SIZE, options_of(loader))
    found = list(built.batches(first, 8))
    built.close()
    return found


def eval_batches(data: Data, source: Source, loader: LoaderName) -> list[Batch]:
    built = build_eval_loader(data, source, EvalShard(len(source), 4), SIZE, options_of(loader))
    found = list(built.batches(0, -(-len(source) // 4)))
    built.close()
    return found


def assert_same(expected: list[Batch], found: list[Batch], loader: LoaderName) -> None:
    assert len(expected) == len(found) > 2
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one.indices, other.indices)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.draws, other.draws)
        assert one.bad == other.bad == ()
        if loader != "native":
            assert torch.equal(one.images, other.images)
            continue
        assert one.images.shape == other.images.shape and one.images.dtype == other.images.dtype
        off = (one.images.int() - other.images.int()).abs()
        assert off.max() <= MOST_OFF and off.float().mean() <= MEAN_OFF


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory) -> tuple[list[Batch], list[Batch]]:
    """The folder's batches, loaded inline, in training and in evaluation."""
    datasets = from_folder(folder, tmp_path_factory.mktemp("alone"))
    return train_batches(FILES, datasets.train, "inline"), eval_batches(FILES, datasets.val, "inline")


@pytest.mark.parametrize(("datasets", "loader"), PAIRS, indirect=["datasets"])
def test_every_source_and_loader_gives_the_batches_of_the_folder(datasets: Datasets, expected, loader) -> None:
    if loader == "native" and load_native() is None:
        pytest.skip(NATIVE_MISSING_MESSAGE)
    assert_same(expected[0], train_batches(FILES, datasets.train, loader), loader)
    assert_same(expected[0][5:], train_batches(FILES, datasets.train, loader, first=5), loader)
    assert_same(expected[1], eval_batches(FILES, datasets.val, loader), loader)


@pytest.mark.parametrize(
    ("datasets", "loader"), [pair for pair in PAIRS if pair[0] in ("folder", "pack")], indirect=["datasets"]
)
def test_repeated_images_are_augmented_alike_by_every_loader(datasets: Datasets, loader: LoaderName) -> None:
    if loader == "native":
        if load_native() is None:
            pytest.skip(NATIVE_MISSING_MESSAGE)
        # Not solarized, which turns rounding into white.
        data = REPEATED.model_copy(update={"augment": (*REPEATED.augment[:2], REPEATED.augment[3])})
    else:
        data = REPEATED
    expected = train_batches(data, datasets.train, "inline")
    assert_same(expected, train_batches(data, datasets.train, loader), loader)
    for batch in expected:
        assert len(set(batch.indices.tolist())) < len(batch) == len({image.numpy().tobytes() for image in batch.images})


@pytest.mark.skipif(load_native() is None, reason=NATIVE_MISSING_MESSAGE)
@pytest.mark.parametrize("datasets", AS_FILES, indirect=True)
def test_files_have_the_pixels_of_a_pack_with_the_native_loader(datasets: Datasets, folder: Path, tmp_path) -> None:
    assert choose_loader(FILES, datasets.train, device="cpu", cores=4, free_bytes=0).loader == "native"
    pack = from_pack(folder, tmp_path)
    expected = train_batches(FILES, pack.train, "native"), eval_batches(FILES, pack.val, "native")
    for cache in ("off", "new", "new"):  # the last time, it is there
        data = FILES.model_copy(update={"cache": cache if cache == "off" else str(tmp_path / cache)})
        assert_equal(expected[0], train_batches(data, datasets.train, "native"))
        assert_equal(expected[1], eval_batches(data, datasets.val, "native"))
    assert len(list((tmp_path / "new").glob("*/*.index"))) >= 2


def assert_equal(expected: list[Batch], found: list[Batch]) -> None:
    assert_same(expected, found, "native")
    assert all(torch.equal(one.images, other.images) for one, other in zip(expected, found, strict=True))


def test_a_pack_has_the_fingerprint_of_its_folder(folder: Path, tmp_path: Path) -> None:
    assert digest_datasets(from_pack(folder, tmp_path)) == digest_datasets(from_folder(folder, tmp_path))


def arrays() -> Datasets:
    rng = np.random.default_rng(0)

    def split(name: str, num: int) -> ArraySource:
        info = DatasetInfo("made", name, num, ("a", "b"), 3, (SIZE, SIZE), (0.5,) * 3, (0.25,) * 3)  # type: ignore[arg-type]
        images = rng.integers(0, 256, (num, SIZE, SIZE, 3), dtype=np.uint8)
        return ArraySource(info, images, np.arange(num, dtype=np.int64) % 2)

    return Datasets(split("train", NUM_TRAIN), split("val", NUM_VAL))


@pytest.mark.parametrize("loader", ["inline", "threads", "processes", "device"])
@pytest.mark.parametrize("packed", [False, True], ids=["in memory", "packed"])
def test_pixels_are_equal_in_memory_and_in_a_pack_with_every_loader(loader, packed: bool, tmp_path: Path) -> None:
    given = arrays()
    datasets = given
    if packed:
        write_pack(given, tmp_path / "pixels.pack", PackOptions(), quiet, 2)
        datasets = open_pack(tmp_path / "pixels.pack")
        assert isinstance(datasets.train, ArraySource)
    assert_same(train_batches(PIXELS, given.train, "inline"), train_batches(PIXELS, datasets.train, loader), loader)
    assert_same(eval_batches(PIXELS, given.val, "inline"), eval_batches(PIXELS, datasets.val, loader), loader)

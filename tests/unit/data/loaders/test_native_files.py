"""Image files in the native loader: the batches of a pack of them, with indexes or without, whatever changes."""

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.dataset import Datasets, Source
from paceline.core.errors import DataError, WatchError
from paceline.core.pixels import PixelFormat
from paceline.core.units import Duration
from paceline.data.batch import Batch
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.loaders import build, native_plan
from paceline.data.loaders.build import LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.jpeg_index import NoIndexCache
from paceline.data.loaders.native_files import FileImages
from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.pack.reader import open_pack
from paceline.data.sources.image_files import FileSource, ImageFileSource, LocatedFiles, build_files_info
from paceline.data.sources.subset import join_samples, select_samples
from paceline.recipe.schema.data import Data

pytestmark = pytest.mark.skipif(load_native() is None, reason=NATIVE_MISSING_MESSAGE)

NUM, BATCH, SIZE = 24, 6, 20
STEPS = 3 * NUM // BATCH
RECIPE = {"augment": ("random_resized_crop", "flip", "rotate"), "on_bad_image": "skip"}
KINDS: dict[int, dict[str, Any]] = {
    3: {"mode": "L"},
    4: {"format": "png"},
    5: {"progressive": True},
    6: {"turned": 6},
    7: {"mode": "CMYK"},
    8: {"restart_marker_rows": 1},
    9: {"subsampling": 0},
}


def encode(
    number: int, height: int, width: int, mode: str = "RGB", format: str = "jpeg", turned: int = 1, **how: Any
) -> bytes:
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [128 + 90 * np.sin(rows / (5 + number % 4) + at) * np.cos(columns / 8 + number) for at in range(3)]
    image, file, exif = Image.fromarray(np.stack(waves, 2).astype(np.uint8)), io.BytesIO(), Image.Exif()
    exif[0x0112] = turned
    image.convert(mode).save(file, format, exif=exif, **how)
    return file.getvalue()


def picture(number: int) -> bytes:
    return encode(number, 40 + number % 7 * 9, 52 + number % 5 * 11, **KINDS.get(number % 10, {}))


def source_of(root: Path) -> ImageFileSource:
    info = build_files_info("folder", "train", NUM, ("a", "b"), PixelFormat(3))
    paths = [f"{number:02}.jpg".encode() for number in range(NUM)]
    return ImageFileSource.from_paths(info, str(root), paths, np.arange(NUM, dtype=np.int32) % 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for number in range(NUM):
        (tmp_path / "images" / f"{number:02}.jpg").write_bytes(picture(number))
    return tmp_path / "images"


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Source:
    """A pack of the same images."""
    root = tmp_path_factory.mktemp("packed")
    for number in range(NUM):
        (root / f"{number:02}.jpg").write_bytes(picture(number))
    source = source_of(root)
    write_pack(Datasets(source, source), root / "a.pack", PackOptions(), lambda done, num: None, 2)
    return open_pack(root / "a.pack").train


@pytest.fixture(params=["off", "cached"])
def data(request, tmp_path: Path) -> Data:
    return Data(**RECIPE, cache="off" if request.param == "off" else str(tmp_path / "cache"))


def train_batches(
    data: Data, source: Source, first: int = 0, stop: int = STEPS, loader: Any = "native", **order: Any
) -> list[Batch]:
    options = LoaderOptions(2 if loader == "native" else 0, pin_memory=False, loader=loader)
    made = build_train_loader(
        data, source, TrainOrder(3, NUM, BATCH, **order), lambda step: SIZE + 4 * (step // 5), options
    )
    try:
        return list(made.batches(first, stop))
    finally:
        made.close()


def eval_batches(data: Data, source: Source, loader: Any = "native") -> list[Batch]:
    options = LoaderOptions(2 if loader == "native" else 0, pin_memory=False, loader=loader)
    made = build_eval_loader(data, source, EvalShard(len(source), 7), SIZE, options)
    try:
        return list(made.batches(0, -(-len(source) // 7)))
    finally:
        made.close()


def assert_equal(expected: list[Batch], found: list[Batch]) -> None:
    assert len(expected) == len(found) > 1
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one.indices, other.indices) and torch.equal(one.labels, other.labels)
        assert torch.equal(one.images, other.images) and torch.equal(one.draws, other.draws)
        assert [each.index for each in one.bad] == [each.index for each in other.bad]


def test_batches_equal_those_of_a_pack_new_indexed_and_resumed(data: Data, root: Path, packed: Source) -> None:
    expected, source = train_batches(data, packed), source_of(root)
    assert_equal(expected, train_batches(data, source))
    assert_equal(expected, train_batches(data, source))
    assert_equal(expected[7:], train_batches(data, source, first=7))
    assert_equal(eval_batches(data, packed), eval_batches(data, source))


def test_two_ranks_read_what_one_does(data: Data, root: Path, packed: Source) -> None:
    expected, source = train_batches(data, packed), source_of(root)
    parts = [train_batches(data, source, rank=rank, world_size=2) for rank in range(2)]
    for one, *ranks in zip(expected, *parts, strict=True):
        indices = np.concatenate([part.indices for part in ranks])
        images = torch.cat([part.images for part in ranks])
        assert sorted(indices.tolist()) == sorted(one.indices.tolist())
        assert torch.equal(images[indices.argsort()], one.images[one.indices.argsort()])


def test_selected_and_joined_files_are_those_of_a_selected_pack(data: Data, root: Path, packed: Source) -> None:
    source, chosen = source_of(root), np.array([22, 3, 1, 9, 15, 4, 16])
    expected = eval_batches(data, select_samples(packed, chosen))
    assert_equal(expected * 2, eval_batches(data, select_samples(source, chosen)) * 2)
    joined = join_samples(select_samples(source, chosen[:4]), select_samples(source, chosen[4:]))
    assert_equal(expected * 2, eval_batches(data, joined) * 2)


def turned(path: Path) -> None:
    path.write_bytes(encode(1, 52, 40, turned=8))


def of_another_size(path: Path) -> None:
    path.write_bytes(encode(2, 90, 33))


def of_the_same_size(path: Path) -> None:
    height, width = np.array(Image.open(path)).shape[:2]
    path.write_bytes(encode(3, height, width))


def to_png(path: Path) -> None:
    path.write_bytes(encode(2, 61, 43, format="png"))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def deleted(path: Path) -> None:
    path.unlink()


def to_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "change", [turned, of_another_size, of_the_same_size, to_png, truncated, emptied, deleted, to_a_pipe]
)
def test_a_changed_file_is_read_as_it_is_now(change: Callable[[Path], None], tmp_path: Path, root: Path) -> None:
    """The sizes that the loader remembers, the index and the size in the cache are those of the file before."""
    cached, off = (Data(**RECIPE, cache=cache) for cache in (str(tmp_path / "cache"), "off"))
    source = source_of(root)
    options = LoaderOptions(2, pin_memory=False, loader="native")
    made = build_train_loader(cached, source, TrainOrder(3, NUM, BATCH), lambda step: SIZE + 4 * (step // 5), options)
    list(made.batches(0, 4))
    change(root / "11.jpg")
    expected = train_batches(off, source, first=4)
    assert_equal(expected, list(made.batches(4, STEPS)))
    made.close()
    assert_equal(expected, train_batches(cached, source, first=4))
    bad = {each.index for batch in expected for each in batch.bad}
    assert bad == ({11} if change in (truncated, emptied, deleted, to_a_pipe) else set())
    inline = train_batches(off, source, first=4, loader="inline")
    assert [[each.reason for each in batch.bad] for batch in inline] == [
        [each.reason for each in batch.bad] for batch in expected
    ]


def test_an_unreadable_file_ends_the_run_at_its_batch_or_is_left_out_of_an_evaluation(root: Path) -> None:
    source, skip = source_of(root), Data(**RECIPE, cache="off")
    truncated(root / "11.jpg")
    found, inline = eval_batches(skip, source), eval_batches(skip, source, "inline")
    assert [batch.indices.tolist() for batch in found] == [batch.indices.tolist() for batch in inline]
    assert [batch.bad for batch in found] == [batch.bad for batch in inline]
    fail = Data(augment=RECIPE["augment"], cache="off")
    messages = []
    for loader in ("native", "inline"):
        with pytest.raises(DataError) as caught:
            train_batches(fail, source, loader=loader)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "11.jpg" in messages[0]


@dataclass(frozen=True)
class OnlyPython:
    """Files that only Python finds."""

    source: ImageFileSource

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def locate_files(self, indices: Any) -> LocatedFiles:
        located = self.source.locate_files(indices)
        return located._replace(files=[b"/missing" + name for name in located.names])


def test_what_only_python_can_open_is_decoded_by_the_core(data: Data, root: Path, packed: Source, monkeypatch) -> None:
    monkeypatch.setattr(build, "find_file_source", lambda source: OnlyPython(source))
    assert_equal(train_batches(data, packed), train_batches(data, source_of(root)))


@dataclass
class RecordingPool:
    """A pool that notes the paths that it gets."""

    pool: Any
    measured: list[list[int]]
    decoded: list[list[int]]

    def measure(self, files: list[bytes | None], *arguments: Any) -> Any:
        self.measured.append([int(file[-6:-4]) for file in files if file])
        return self.pool.measure(files, *arguments)

    def submit_jpegs(self, files: list[bytes | None], *arguments: Any) -> Any:
        self.decoded.append([int(file[-6:-4]) for file in files if file])
        return self.pool.submit_jpegs(files, *arguments)

    def close(self) -> None:
        self.pool.close()


@pytest.fixture
def pools(monkeypatch) -> Iterator[list[RecordingPool]]:
    core, made = load_native(), []
    assert core is not None

    def make(threads: int) -> RecordingPool:
        made.append(RecordingPool(core.Pool(threads), [], []))
        return made[-1]

    monkeypatch.setattr(build, "load_native", lambda: SimpleNamespace(Pool=make, move=core.move))
    monkeypatch.setattr(native_plan, "_IMAGES_PER_PLAN", 2 * BATCH)
    yield made


def test_each_file_is_measured_once_ahead_of_its_batch_and_never_with_an_index(
    tmp_path: Path, root: Path, pools: list[RecordingPool]
) -> None:
    data, source = Data(**RECIPE, cache=str(tmp_path / "cache")), source_of(root)
    options = LoaderOptions(2, pin_memory=False, loader="native")
    made = build_train_loader(data, source, TrainOrder(3, NUM, BATCH), lambda step: SIZE, options)
    batches = made.batches(0, STEPS)
    next(batches)
    assert [len(each) for each in pools[0].measured] == [2 * BATCH, 2 * BATCH]  # of four batches in all
    list(batches)
    made.close()
    measured = [index for each in pools[0].measured for index in each]
    assert sorted(measured) == list(range(NUM))
    train_batches(data, source)
    never_indexed = {number for number in range(NUM) if number % 10 in (4, 5, 7, 8)}
    assert {index for each in pools[1].measured for index in each} == never_indexed


def test_a_file_that_only_pillow_reads_goes_to_the_core_once_at_most(root: Path, pools: list[RecordingPool]) -> None:
    damaged = root / "11.jpg"
    truncated(damaged)
    train_batches(Data(**RECIPE, cache="off"), source_of(root))
    decoded = [index for each in pools[0].decoded for index in each]
    assert decoded.count(0) == 3 and decoded.count(11) < 3
    assert not {4, 14, 7, 17} & set(decoded)  # their headers say it


@dataclass(frozen=True)
class Endless:
    """A task that never ends."""

    seconds: float = 0.0
    done: bool = False

    def wait(self, timeout_s: float, /) -> bool:
        return False


def test_a_file_that_hangs_while_it_is_measured_is_named(root: Path) -> None:
    source: FileSource = source_of(root)
    images = FileImages(source, NoIndexCache(), Duration.parse("1s"))

    def measure(files: Any, offsets: Any, lengths: Any, sizes: Any, status: Any) -> Endless:
        status[:2] = 0
        return Endless()

    images.start(SimpleNamespace(measure=measure))  # type: ignore[arg-type]
    with pytest.raises(
        WatchError, match=r"data.worker_timeout: .* 1s.*header of .*09\.jpg .*raise data.worker_timeout"
    ):
        images.locate(np.array([7, 8, 9, 10]))


def test_the_bytes_of_the_files_are_counted(data: Data, root: Path) -> None:
    source = source_of(root)
    options = replace(LoaderOptions(2, pin_memory=False, loader="native"), clock=lambda: 0.0)
    num_bytes = sum(path.stat().st_size for path in root.iterdir())
    for _ in range(2):
        made = build_eval_loader(data, source, EvalShard(NUM, 7), SIZE, options)
        list(made.batches(0, 4))
        stats = made.stats()
        made.close()
        assert stats is not None and stats.bytes_read == num_bytes

"""The loader is the fastest that supports the recipe, or the one of the recipe, or a one-line error."""

import numpy as np
import pytest

from paceline.core.dataset import ArraySource, DatasetInfo, Sample, Source
from paceline.core.errors import RecipeError
from paceline.data.loaders import choose
from paceline.data.loaders.choose import LoaderChoice, choose_loader
from paceline.data.native import NATIVE_MISSING_MESSAGE
from paceline.data.pack.reader import PackSource
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.subset import SourceSubset
from paceline.recipe.schema.data import Data

INFO = DatasetInfo("made", "train", 8, ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
ARRAYS = ArraySource(INFO, np.zeros((8, 16, 16, 3), dtype=np.uint8), np.zeros(8, dtype=np.int64))
BYTES = 8 * 16 * 16 * 3
CROPS = ("random_resized_crop", "flip")


class Files:
    info = INFO

    def __len__(self) -> int:
        return 8

    def read(self, index: int) -> Sample:
        raise AssertionError

    def name_of(self, index: int) -> str:
        raise AssertionError


class Kinds:
    """The part of a pack's index that the choice reads."""

    def __init__(self, kind: int) -> None:
        self.splits = {"train": self}
        self.kinds = np.full(8, kind, dtype=np.uint8)

    def __len__(self) -> int:
        return 8


def files_named(*endings: str) -> ImageFileSource:
    paths = [f"{number}{ending}".encode() for number, ending in enumerate(endings)]
    return ImageFileSource.from_paths(INFO, "/images", paths, np.zeros(len(paths), dtype=np.int32))


JPEGS = files_named(".jpg", ".JPEG", ".jpe", ".png")
OTHERS = files_named(".jpg", ".png", ".png", ".jpg")
PACK = PackSource(INFO, Kinds(1), None)  # type: ignore[arg-type]
KEPT = PackSource(INFO, Kinds(2), None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def core(monkeypatch) -> None:
    """A native core that is not called."""
    monkeypatch.setattr(choose, "load_native", object)


def chosen(
    source: Source, device: str = "cpu", cores: int = 4, free_bytes: float = 4 * BYTES, **fields
) -> LoaderChoice:
    return choose_loader(Data(**fields), source, device=device, cores=cores, free_bytes=free_bytes)


@pytest.mark.parametrize(
    ("source", "device", "fields", "expected"),
    [
        (ARRAYS, "cpu", {}, ("inline", 0)),
        (ARRAYS, "cpu", {"augment": CROPS}, ("inline", 0)),
        (ARRAYS, "cuda", {}, ("device", 0)),
        (ARRAYS, "cuda", {"augment": ("pad_crop", "rand_augment")}, ("device", 0)),
        (ARRAYS, "cuda", {"augment": ("flip",), "augment_on": "host"}, ("inline", 0)),
        (ARRAYS, "cuda", {"augment": CROPS}, ("processes", 3)),
        (ARRAYS, "cuda", {"workers": 2}, ("processes", 2)),
        (ARRAYS, "cuda", {"workers": 0}, ("inline", 0)),
        (PACK, "cpu", {}, ("native", 3)),
        (PACK, "cuda", {"augment": CROPS}, ("native", 3)),
        (PACK, "cuda", {"workers": 7}, ("native", 7)),
        (PACK, "cuda", {"workers": 0}, ("inline", 0)),
        (PACK, "cuda", {"image_size": 4096, "eval_image_size": 4096, "workers": 1024}, ("native", 1024)),
        (PACK, "cuda", {"image_size": 4097}, ("processes", 3)),
        (PACK, "cuda", {"eval_image_size": 4097}, ("processes", 3)),
        (PACK, "cuda", {"workers": 1025}, ("processes", 1025)),
        (KEPT, "cuda", {}, ("processes", 3)),
        (JPEGS, "cuda", {"augment": CROPS}, ("native", 3)),
        (JPEGS, "cpu", {"workers": 0}, ("inline", 0)),
        (JPEGS, "cuda", {"workers": 7}, ("native", 7)),
        (JPEGS, "cuda", {"image_size": 4097}, ("processes", 3)),
        (JPEGS, "cuda", {"loader": "processes"}, ("processes", 3)),
        (OTHERS, "cuda", {}, ("processes", 3)),
        (OTHERS, "cuda", {"loader": "native"}, ("native", 3)),
        (SourceSubset(INFO, (JPEGS, OTHERS), np.array([0, 1, 2, 7])), "cuda", {}, ("native", 3)),
        (SourceSubset(INFO, (JPEGS, OTHERS), np.array([0, 3, 5, 6])), "cuda", {}, ("processes", 3)),
        (SourceSubset(INFO, (JPEGS, Files()), np.array([0, 1])), "cuda", {}, ("processes", 3)),
        (Files(), "cuda", {}, ("processes", 3)),
        (Files(), "cpu", {"workers": 0}, ("inline", 0)),
        (Files(), "cpu", {"workers": 40}, ("processes", 40)),
    ],
)
def test_auto_chooses_the_fastest_supported_loader(source: Source, device: str, fields, expected) -> None:
    assert chosen(source, device, **fields) == (*expected, "")


def test_the_native_loader_has_no_bicubic_interpolation() -> None:
    note = "data.loader: processes, as the faster native loader has no bicubic interpolation"
    for source in (PACK, JPEGS):
        assert chosen(source, interpolation="bicubic") == ("processes", 3, note)
    for source in (KEPT, OTHERS, Files()):
        assert chosen(source, interpolation="bicubic") == ("processes", 3, "")
    with pytest.raises(RecipeError, match=r"^data.loader: native resizes bilinearly, and data.interpolation is"):
        chosen(PACK, interpolation="bicubic", loader="native")


def test_a_data_set_larger_than_a_quarter_of_gpu_memory_stays_in_host_memory() -> None:
    assert chosen(ARRAYS, "cuda", free_bytes=4 * BYTES - 1) == ("inline", 0, "")
    augment = ("pad_crop", "rand_augment")
    assert chosen(ARRAYS, "cuda", free_bytes=4 * BYTES - 1, augment=augment) == ("processes", 3, "")


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (3, 2), (64, 16)])
def test_threads_leave_one_core_to_the_rank(cores: int, workers: int) -> None:
    assert chosen(PACK, cores=cores) == ("native", workers, "")
    assert chosen(Files(), cores=cores, loader="threads") == ("threads", workers, "")
    assert chosen(Files(), cores=cores, loader="processes") == ("processes", workers, "")


@pytest.mark.parametrize(("cores", "expected"), [(1, ("inline", 0)), (2, ("processes", 1)), (64, ("processes", 16))])
def test_the_number_of_processes_follows_the_cores(cores: int, expected) -> None:
    assert chosen(Files(), cores=cores) == (*expected, "")


@pytest.mark.parametrize("loader", ["threads", "processes"])
@pytest.mark.parametrize("source", [ARRAYS, PACK, Files()], ids=["arrays", "pack", "files"])
def test_threads_and_processes_support_every_source(loader: str, source: Source) -> None:
    assert chosen(source, loader=loader, workers=2) == (loader, 2, "")


def test_without_the_core_jpegs_are_read_by_processes_with_a_note(monkeypatch) -> None:
    monkeypatch.setattr(choose, "load_native", lambda: None)
    for source in (PACK, JPEGS):
        found = chosen(source)
        assert found[:2] == ("processes", 3) and NATIVE_MISSING_MESSAGE in found.note
    assert chosen(KEPT).note == chosen(Files()).note == chosen(OTHERS).note == chosen(PACK, workers=0).note == ""


def test_the_loader_of_the_recipe_is_used_if_it_is_supported() -> None:
    assert chosen(ARRAYS, loader="device") == ("device", 0, "")
    assert chosen(ARRAYS, "cuda", loader="device", free_bytes=BYTES) == ("device", 0, "")
    assert chosen(PACK, loader="native", workers=5) == ("native", 5, "")


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        (Files(), {"loader": "device"}, "device keeps pixels of one size in GPU memory, and digits has image files"),
        (ARRAYS, {"loader": "device", "augment": CROPS}, "random_resized_crop crops each image separately"),
        (ARRAYS, {"loader": "device", "augment": ("flip",), "augment_on": "host"}, "data.augment_on is host"),
        (ARRAYS, {"loader": "device"}, r"the data is 6\.14 kB, and the GPU has 6\.14 kB free \(set data.loader=auto\)"),
        (ARRAYS, {"loader": "native"}, "native decodes image files, and digits is stored as pixels"),
        (Files(), {"loader": "native"}, "native decodes packs and image files, and data.source is digits .*data pack"),
        (PACK, {"loader": "native", "image_size": 4097}, "images of up to 4,096 px, and data.image_size is 4,097"),
        (PACK, {"loader": "native", "eval_image_size": 5000}, "4,096 px, and data.eval_image_size is 5,000 .lower it"),
        (PACK, {"loader": "native", "workers": 1025}, "has up to 1,024 threads, and data.workers is 1,025"),
        (KEPT, {"loader": "native"}, "native decodes indexed JPEGs, .* 8 images"),
    ],
)
def test_an_unsupported_loader_raises_with_a_fix(source: Source, fields, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"^data\.loader: .*{message}") as caught:
        chosen(source, "cuda", free_bytes=BYTES - 1, **fields)
    assert "\n" not in str(caught.value) and "auto" in str(caught.value)


def test_native_without_the_core_raises_with_the_way_to_build_it(monkeypatch) -> None:
    monkeypatch.setattr(choose, "load_native", lambda: None)
    with pytest.raises(RecipeError) as caught:
        chosen(PACK, loader="native")
    assert str(caught.value) == f"data.loader: native: {NATIVE_MISSING_MESSAGE}; or set data.loader=auto"


def test_nvjpeg_is_never_automatic_and_needs_a_gpu_and_image_files() -> None:
    assert chosen(Files(), "cuda", loader="nvjpeg") == LoaderChoice("nvjpeg", 3)
    with pytest.raises(RecipeError, match=r"data\.loader: nvjpeg decodes on a GPU, and this run is on a CPU \(set"):
        chosen(Files(), "cpu", loader="nvjpeg")
    with pytest.raises(RecipeError, match=r"data\.loader: nvjpeg decodes image files, and digits is stored as pixels"):
        chosen(ARRAYS, "cuda", loader="nvjpeg")
    with pytest.raises(RecipeError, match=r"data\.loader: nvjpeg makes batches on the GPU, and data\.aug"):
        chosen(Files(), "cuda", loader="nvjpeg", augment=("flip",), augment_on="host")

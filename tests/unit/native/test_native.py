"""The native core as Python sees it: what it gives is right, and what it is given is checked."""

import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.data.native import VERSION, NativeExtension, load_native

BOX = (0.0, 0.0, 40.0, 50.0)


def crop(core: NativeExtension, record: bytes, **changes: Any) -> np.ndarray:
    out = np.zeros((3, 16, 16), np.uint8)
    asked: dict[str, Any] = {"box": BOX, "inside": True, "flip": False, "size": 16, "channels": 3, "out": out}
    core.decode_crop_into(record, **{**asked, **changes})
    return out


def test_it_is_there_wherever_there_is_a_compiler_and_python_s_headers() -> None:
    if not shutil.which("cc") or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no C compiler or no Python.h: the native core cannot be built here")
    assert load_native() is not None, "run make native"


def test_what_an_older_source_left_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data._native", SimpleNamespace(VERSION=VERSION - 1), raising=False)
    assert load_native() is None


def test_without_an_extension_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("paceline.data._native", raising=False)
    monkeypatch.setitem(sys.modules, "paceline.data._native", None)
    assert load_native() is None


def test_a_record_has_the_size_of_its_image(core: NativeExtension, records: list[bytes]) -> None:
    assert [core.size_of(record) for record in records[:2]] == [(40, 96, 3), (48, 90, 3)]


def test_what_cannot_be_indexed_is_a_value_error_with_the_reason(core: NativeExtension) -> None:
    for data in (b"", b"\xff\xd8", b"GIF89a" + bytes(100)):
        with pytest.raises(ValueError, match="not a JPEG"):
            core.index_jpeg(data)


def test_a_damaged_record_is_a_value_error_with_the_reason(core: NativeExtension, records: list[bytes]) -> None:
    for damaged in (b"", b"PJ1\0", b"PJ2\0" + records[0][4:], records[0][:40]):
        for decode in (core.size_of, lambda record: crop(core, record)):
            with pytest.raises(ValueError, match=core.reason(1)):
                decode(damaged)
        with pytest.raises(ValueError, match=core.reason(1)):
            core.decode_into(damaged, 3, bytearray(40 * 96 * 3))


def test_every_status_has_a_reason_and_other_numbers_have_none(core: NativeExtension) -> None:
    reasons = [core.reason(status) for status in range(11)]
    assert len(set(reasons)) == 11 and all(reasons) and "unknown status" not in reasons
    for number in (-1, 11, 2**70):
        with pytest.raises((ValueError, OverflowError)):
            core.reason(number)


@pytest.mark.parametrize("every", [0, 256, -1])
def test_seek_points_are_1_to_255_apart(core: NativeExtension, every: int) -> None:
    with pytest.raises(ValueError, match=f"every {every} is not in 1 to 255"):
        core.index_jpeg(b"", every)


def test_all_instructions_give_the_same_pixels_and_unknown_ones_are_refused(
    core: NativeExtension, records: list[bytes]
) -> None:
    best = core.isa()
    try:
        pixels = {}
        for name in {best, "scalar"}:
            core.choose_isa(name)
            assert core.isa() == name
            pixels[name] = [crop(core, record, box=(1.5, 2.25, 30.0, 41.0)) for record in records]
    finally:
        core.choose_isa(best)
    assert np.array_equal(pixels[best], pixels["scalar"]) and np.ptp(pixels[best][0]) > 100
    with pytest.raises(ValueError, match="'sse9' is neither"):
        core.choose_isa("sse9")
    with pytest.raises(TypeError):
        core.choose_isa(3)  # type: ignore[arg-type]


WRONG_CROPS = [
    ({"size": 0}, "size 0 is not in 1 to 4096"),
    ({"size": 4097}, "size 4097 is not in 1 to 4096"),
    ({"channels": 2}, "channels 2 is neither 1 nor 3"),
    ({"stage": 4}, "stage 4 is not in 0 to 3"),
    ({"size": 8}, "out has 768 items, not 192"),
    ({"out": bytes(768)}, "out cannot be borrowed to be written"),
    ({"out": np.zeros((3, 16, 32), np.uint8)[..., ::2]}, "out is not contiguous"),
    ({"box": (0.0, 0.0, float("nan"), 9.0)}, "region asked for"),
    ({"box": (0.0, 0.0, -1.0, 9.0)}, "region asked for"),
    ({"box": (1e300, 0.0, 9.0, 9.0)}, "region asked for"),
    ({"box": (-1e308, 0.0, float("inf"), 9.0)}, "region asked for"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_CROPS, ids=[message for _, message in WRONG_CROPS])
def test_a_crop_that_cannot_be_made_is_a_value_error(
    core: NativeExtension, records: list[bytes], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        crop(core, records[0], **changes)


def test_memory_of_another_type_is_a_type_error(core: NativeExtension, records: list[bytes]) -> None:
    for out in (np.zeros(768, np.int8), np.zeros(192, np.float32), [0] * 768, None):
        with pytest.raises(TypeError, match="out"):
            crop(core, records[0], out=out)
    with pytest.raises(TypeError, match="record"):
        core.decode_into(3, 3, bytearray(1))  # type: ignore[arg-type]


def test_decode_wants_the_size_of_the_image(core: NativeExtension, records: list[bytes]) -> None:
    out = np.zeros((40, 96, 3), np.uint8)
    core.decode_into(records[0], 3, out)
    assert np.ptp(out) > 100
    with pytest.raises(ValueError, match="out has 11520 items, not 3840"):
        core.decode_into(records[0], 1, out)
    with pytest.raises(ValueError, match="channels 4"):
        core.decode_into(records[0], 4, out)


def moved(core: NativeExtension, **changes: Any) -> np.ndarray:
    asked: dict[str, Any] = {
        "images": np.arange(4 * 3 * 5 * 6, dtype=np.uint8).reshape(4, 3, 5, 6),
        "indices": np.array([3, 0]),
        "tops": np.array([0, 4], np.int32),
        "lefts": np.array([2, 2], np.int32),
        "flips": np.array([False, True]),
        "padding": 2,
        "reflect": True,
        "shape": (3, 5, 6),
        "out": np.zeros((2, 3, 5, 6), np.uint8),
    }
    core.move(**{**asked, **changes})
    return asked["out"]


def test_move_pads_cuts_and_mirrors(core: NativeExtension) -> None:
    images = np.arange(4 * 3 * 5 * 6, dtype=np.uint8).reshape(4, 3, 5, 6)
    padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    out = moved(core)
    assert np.array_equal(out[0], padded[3, :, 0:5, 2:8])
    assert np.array_equal(out[1], padded[0, :, 4:9, 2:8][..., ::-1])


WRONG_MOVES = [
    ({"indices": np.array([4, 0])}, ValueError, r"indices\[0\] is 4, of 4 images"),
    ({"indices": np.array([0, -1])}, ValueError, r"indices\[1\] is -1"),
    ({"indices": np.array([0, 2**62])}, ValueError, r"indices\[1\]"),
    ({"indices": np.array([0, 1], np.int32)}, TypeError, "indices is of items of format 'i', not int64"),
    ({"tops": np.array([0, 5], np.int32)}, ValueError, "not in 0 to 4"),
    ({"lefts": np.array([-1, 0], np.int32)}, ValueError, "not in 0 to 4"),
    ({"lefts": np.array([0], np.int32)}, ValueError, "lefts has 1 items, not 2"),
    ({"flips": np.zeros(3, bool)}, ValueError, "flips has 3 items, not 2"),
    ({"padding": -1}, ValueError, "padding -1"),
    ({"padding": 5}, ValueError, "padding 5 reflects more"),
    ({"shape": (3, 5, 7)}, ValueError, "are no images"),
    ({"shape": (0, 5, 6)}, ValueError, "shape"),
    ({"shape": (2**31 - 1, 2**31 - 1, 2**31 - 1)}, ValueError, "shape"),
    ({"shape": (3, 5)}, TypeError, "length 3, not 2"),
    ({"out": np.zeros((2, 3, 5, 5), np.uint8)}, ValueError, "out has 150 items, not 180"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_MOVES)
def test_a_move_that_cannot_be_made_is_refused(
    core: NativeExtension, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        moved(core, **changes)


def test_many_threads_decode_at_once(core: NativeExtension, records: list[bytes]) -> None:
    """More of them than the module keeps memory for."""
    wanted = [crop(core, record) for record in records]
    with ThreadPoolExecutor(9) as threads:
        found = list(threads.map(lambda n: np.array_equal(crop(core, records[n % 8]), wanted[n % 8]), range(200)))
    assert found == [True] * 200

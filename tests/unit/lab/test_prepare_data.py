"""Data are prepared once, complete and of the right source, and refused if there is nothing to convert or no room."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import DataError, RecipeError
from paceline.core.run_dir import LOCK
from paceline.data.sources.build import build_datasets
from paceline.data.sources.fingerprint import digest_datasets
from paceline.lab import prepare_data as prepared
from paceline.lab.prepare_data import DataForm, PreparedData, prepare_data
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder, Synthetic

FORMS: tuple[DataForm, ...] = ("pack", "pack-256", "lmdb")


def write_photographs(root: Path, size: tuple[int, int] = (300, 280)) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (8, *size, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        path = root / ("train", "val")[number % 2] / ("cat", "dog")[number // 4] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(source=Folder(root=str(write_photographs(tmp_path / "photos"))))


def made(form: DataForm, data: Data, folder: Path, ticks: Iterator[float] | None = None) -> PreparedData:
    """Make it with a clock that advances by one second at each reading."""
    if form == "lmdb":
        pytest.importorskip("lmdb", reason="the package lmdb is not installed: pip install lmdb")
    clock = ticks or map(float, count())
    return prepare_data(form, data, folder, workers=1, now=lambda: next(clock))


def contents(section) -> list[tuple[bytes, int]]:
    train = build_datasets(section, may_download=False).train
    return [train.read(index) for index in range(len(train))]


def digest_of(section) -> str:
    return digest_datasets(build_datasets(section, may_download=False))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_made_holds_the_samples_of_the_source_in_its_order(form: DataForm, data: Data, tmp_path: Path) -> None:
    found = made(form, data, tmp_path / "data")
    assert found.seconds == 1.0 and not found.is_reused
    assert found.num_bytes > 0
    expected, there = contents(data.source), contents(found.section)
    assert [label for _, label in there] == [label for _, label in expected] and len(there) == 4
    if form == "lmdb":  # a pack gives other bytes of the same coefficients, or other pixels
        assert there == expected
    if form != "pack-256":
        assert digest_of(found.section) == digest_of(data.source)


def test_photographs_are_packed_as_they_are_or_with_short_sides_of_256_px(data: Data, tmp_path: Path) -> None:
    whole, small = (made(form, data, tmp_path / "data") for form in ("pack", "pack-256"))
    sizes = []
    for each in (whole, small):
        train = build_datasets(each.section, may_download=False).train
        sizes.append(min(train.heights.tolist() + train.widths.tolist()))
    assert sizes == [280, 256] and small.num_bytes < whole.num_bytes


@pytest.mark.parametrize("form", FORMS)
def test_what_is_whole_is_used_again_and_keeps_its_seconds(form: DataForm, data: Data, tmp_path: Path) -> None:
    first = made(form, data, tmp_path / "data")
    out = Path(first.section.root)
    written = out.stat().st_mtime_ns
    again = made(form, data, tmp_path / "data", ticks=iter(()))  # the clock is not read
    assert again.is_reused and (again.seconds, again.num_bytes) == (first.seconds, first.num_bytes)
    assert out.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", ["no record", "half a record", "begun", "of other images", "cut short"])
def test_what_is_not_known_to_be_whole_is_made_anew(damage: str, data: Data, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    out = Path(made("pack", data, folder).section.root)
    record = out.with_name(f"{out.name}.json")
    match damage:
        case "no record":
            record.unlink()
        case "half a record":
            record.write_text('{"made_from": ')
        case "begun":
            record.unlink()
            out.rename(out.with_name(f".{out.name}.part"))
        case "of other images":
            next((tmp_path / "photos" / "train").rglob("*.jpg")).rename(tmp_path / "photos" / "train" / "cat" / "x.jpg")
        case "cut short":
            out.write_bytes(out.read_bytes()[:-1])
    found = made("pack", data, folder)
    assert not found.is_reused and found.seconds == 1.0
    assert digest_of(found.section) == digest_of(data.source)
    assert made("pack", data, folder).is_reused
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, "source.pack", "source.pack.json"]


def test_pixels_in_memory_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^data\.source\.name: synthetic is held in memory .* \(use a folder"):
        made("pack", Data(source=Synthetic()), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_too_little_room_is_reported_before_anything_is_written(data: Data, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepared.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(DataError, match=r"data: has 1 kB free, and another format of the data takes up to .*--run-dir"):
        made("pack", data, tmp_path / "data")
    assert [each.name for each in (tmp_path / "data").iterdir()] == [LOCK]


HOLD = """
import sys
from pathlib import Path
from paceline.core.experiments.task_lock import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_another_process_is_making_is_waited_for_and_not_made_again(data: Data, tmp_path: Path) -> None:
    """What it has made by the time it ends is used; the clock of the conversion is not read."""
    folder = tmp_path / "data"
    first = made("pack", data, folder)
    record = folder / "source.pack.json"
    whole = record.read_text()
    record.unlink()
    command = [sys.executable, "-c", HOLD, str(folder / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"

        def the_other_ends() -> None:
            record.write_text(whole)
            other.kill()

        again = prepare_data("pack", data, folder, workers=1, now=lambda: pytest.fail("made"), on_wait=the_other_ends)
    assert again.is_reused and again.section == first.section

"""Runs on a folder of JPEGs are the same run with the index cache, without it and from a pack, however they end."""

import io
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason=NATIVE_MISSING_MESSAGE)

LIMIT_S = 120
STEPS = 12
ARGS = (
    "train",
    "folder",
    "model.name=resnet18_cifar",
    "model.width=0.1",
    "data.image_size=32",
    "data.batch_size=12",
    "data.workers=2",
    "data.on_bad_image=skip",
    "schedule.warmup=0ep",
    "train.epochs=3",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "log.report=off",
    "checkpoint.every=1st",
    "checkpoint.keep=99",
    "parallel.threads=1",
    "--json",
)
BAD = "train/b/11.jpg"
SAVED: dict[int, dict[str, Any]] = {
    3: {"mode": "L"},
    4: {"format": "png"},
    5: {"progressive": True},
    6: {"turned": 6},
    7: {"mode": "CMYK"},
    8: {"restart_marker_rows": 1},
}


def save(path: Path, number: int, mode: str = "RGB", format: str = "jpeg", turned: int = 1, **how: Any) -> None:
    rows, columns = np.mgrid[0 : 40 + number % 7 * 9, 0 : 52 + number % 5 * 11].astype(np.float64)
    waves = [128 + 90 * np.sin(rows / (5 + number % 4) + at) * np.cos(columns / 8 + number) for at in range(3)]
    image, file, exif = Image.fromarray(np.stack(waves, 2).astype(np.uint8)), io.BytesIO(), Image.Exif()
    exif[0x0112] = turned
    image.convert(mode).save(file, format, exif=exif, **how)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.getvalue())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training images of many kinds, one of them truncated, and 12 to validate."""
    folder = tmp_path_factory.mktemp("jpeg") / "images"
    for number in range(60):
        split = "train" if number < 48 else "val"
        save(folder / f"{split}/{'ab'[number % 2]}/{number:02}.jpg", number, **SAVED.get(number % 10, {}))
    bad = folder / BAD
    bad.write_bytes(bad.read_bytes()[:-300])
    return folder


@pytest.fixture(scope="module")
def args(images: Path) -> tuple[str, ...]:
    """A run on these images."""
    return (*ARGS, f"data.source.root={images}")


@pytest.fixture(scope="module")
def uncached(args: tuple[str, ...], ranks_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one rank without the cache."""
    folder = tmp_path_factory.mktemp("uncached")
    assert ranks_in(folder)(*args, "data.cache=off", "--run-dir", "off").result["loader"]["loader"] == "native"
    return folder / "off"


def result_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def samples(run: Path, lines_of, ranks: int = 1) -> list[list[tuple[int, int]]]:
    """Return (sample, checksum of its pixels) of each step, sorted."""
    by_step: dict[int, list[tuple[int, int]]] = {}
    for rank in range(ranks):
        for row in lines_of(run / f"steps.rank{rank}.jsonl"):
            by_step.setdefault(row["step"], []).extend(zip(row["samples"], row["crc32"], strict=True))
    assert len(by_step) == STEPS
    return [sorted(by_step[step]) for step in sorted(by_step)]


def test_a_run_is_the_same_with_the_cache_without_it_resumed_and_from_a_pack(
    args: tuple[str, ...], images: Path, uncached: Path, ranks, paceline, tmp_path: Path, cut, lines_of
) -> None:
    cache, off = tmp_path / "cache", result_of(uncached)
    for name in ("new", "again"):
        found = ranks(*args, f"data.cache={cache}", "--run-dir", name).result
        assert found["weights_sha256"] == off["weights_sha256"] and found["eval"] == off["eval"]
        assert samples(tmp_path / name, lines_of) == samples(uncached, lines_of)
    assert len(list(cache.glob("*/*.index"))) >= 2  # of both splits
    run = cut(uncached, tmp_path / "cut", 1)
    # With a cache that the run has not begun with.
    found = ranks(*args, f"data.cache={tmp_path / 'other'}", "--run-dir", run.name, "--resume").result
    assert found["weights_sha256"] == off["weights_sha256"]
    shutil.copytree(images, tmp_path / "images")
    (tmp_path / "images" / BAD).unlink()
    assert paceline("data", "pack", "images", "packed.pack").code == 0
    few = ("train.epochs=1", "checkpoint.every=1ep")
    whole = ranks(*ARGS, *few, "data.source.root=images", f"data.cache={cache}", "--run-dir", "whole").result
    packed = (*ARGS, *few, "data.source={name: pack, root: packed.pack}")
    assert ranks(*packed, "--run-dir", "packed-run").result["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("cached", [True, pytest.param(False, marks=pytest.mark.long)])
def test_two_ranks_read_the_pixels_of_one(
    args: tuple[str, ...], uncached: Path, ranks, tmp_path: Path, lines_of, cached: bool
) -> None:
    ranks(*args, f"data.cache={tmp_path / 'cache' if cached else 'off'}", "--run-dir", "2", ranks=2).result  # noqa: B018
    assert samples(uncached, lines_of) == samples(tmp_path / "2", lines_of, ranks=2)


def test_a_run_that_is_killed_in_its_first_epoch_resumes_as_if_it_had_not_been(
    args: tuple[str, ...], uncached: Path, paceline, ranks, tmp_path: Path, lines_of
) -> None:
    cached = (*args, f"data.cache={tmp_path / 'cache'}", "--run-dir", "killed")
    process = paceline.start(*cached)
    deadline_s = time.monotonic() + LIMIT_S
    while len(list((tmp_path / "killed/checkpoints").glob("step-*"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    done = len(list((tmp_path / "killed/checkpoints").iterdir()))
    assert 2 <= done < STEPS
    resumed, whole = ranks(*cached, "--resume").result, result_of(uncached)
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["eval"] == whole["eval"]
    assert samples(tmp_path / "killed", lines_of) == samples(uncached, lines_of)


def test_a_cache_that_cannot_be_written_is_reported_once_and_ends_no_run(
    args: tuple[str, ...], ranks, tmp_path: Path, lines_of
) -> None:
    (tmp_path / "taken").write_bytes(b"")
    result = ranks(*args, "train.epochs=1", f"data.cache={tmp_path / 'taken'}", "--run-dir", "run").result
    warned = [row["message"] for row in lines_of(tmp_path / "run/warnings.jsonl") if "data.cache" in row["message"]]
    assert result["steps"] == STEPS / 3
    assert len(warned) == 2 and all("taken" in message for message in warned)  # of the training and the validation set

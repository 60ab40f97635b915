"""Runs on a folder of JPEGs are the same run with the index cache, without it and from a pack, however they end."""

import io
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
    "schedule.warmup=1ep",
    "train.epochs=3",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "checkpoint.every=1st",
    "checkpoint.keep=99",
    "parallel.threads=1",
    "--json",
)
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


@pytest.fixture
def args(tmp_path: Path) -> tuple[str, ...]:
    """A run on 48 training images of many kinds, one of them truncated."""
    for number in range(60):
        split = "train" if number < 48 else "val"
        save(tmp_path / f"images/{split}/{'ab'[number % 2]}/{number:02}.jpg", number, **SAVED.get(number % 10, {}))
    bad = tmp_path / "images/train/b/11.jpg"
    bad.write_bytes(bad.read_bytes()[:-300])
    return (*ARGS, f"data.source.root={tmp_path / 'images'}")


def samples(run: Path, lines_of, ranks: int = 1) -> list[list[tuple[int, int]]]:
    """Return (sample, checksum of its pixels) of each step, sorted."""
    by_step: dict[int, list[tuple[int, int]]] = {}
    for rank in range(ranks):
        for row in lines_of(run / f"steps.rank{rank}.jsonl"):
            by_step.setdefault(row["step"], []).extend(zip(row["samples"], row["crc32"], strict=True))
    assert len(by_step) == STEPS
    return [sorted(by_step[step]) for step in sorted(by_step)]


def test_a_run_is_the_same_with_the_cache_without_it_resumed_and_from_a_pack(
    args: tuple[str, ...], ranks, paceline, tmp_path: Path, lines_of
) -> None:
    cache = tmp_path / "cache"
    off = ranks(*args, "data.cache=off", "--run-dir", "off").result
    assert off["loader"]["loader"] == "native" and not cache.exists()
    for name in ("new", "again"):
        found = ranks(*args, f"data.cache={cache}", "--run-dir", name).result
        assert found["weights_sha256"] == off["weights_sha256"] and found["eval"] == off["eval"]
        assert samples(tmp_path / name, lines_of) == samples(tmp_path / "off", lines_of)
    assert len(list(cache.glob("*/*.index"))) >= 2  # of both splits
    for step in (1,):  # with a cache that the run has not begun with
        run = tmp_path / f"cut-{step}"
        shutil.copytree(tmp_path / "off", run)
        (run / "result.json").unlink()
        for path in (run / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        found = ranks(*args, f"data.cache={tmp_path / f'cache-{step}'}", "--run-dir", run.name, "--resume").result
        assert found["weights_sha256"] == off["weights_sha256"]
    (tmp_path / "images/train/b/11.jpg").unlink()
    assert paceline("data", "pack", "images", "packed.pack").code == 0
    whole = ranks(*args, f"data.cache={cache}", "--run-dir", "whole").result
    packed = (*(each for each in args if "root" not in each), "data.source={name: pack, root: packed.pack}")
    assert ranks(*packed, "--run-dir", "packed-run").result["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("cached", [True, False])
def test_two_ranks_read_the_pixels_of_one(args: tuple[str, ...], ranks, tmp_path: Path, lines_of, cached: bool) -> None:
    cache = f"data.cache={tmp_path / 'cache' if cached else 'off'}"
    for num in (1, 2):
        ranks(*args, cache, "--run-dir", str(num), ranks=num).result  # noqa: B018
    assert samples(tmp_path / "1", lines_of) == samples(tmp_path / "2", lines_of, ranks=2)


def test_a_run_that_is_killed_in_its_first_epoch_resumes_as_if_it_had_not_been(
    args: tuple[str, ...], paceline, ranks, tmp_path: Path, lines_of
) -> None:
    whole = ranks(*args, "data.cache=off", "--run-dir", "whole").result
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
    resumed = ranks(*cached, "--resume").result
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["eval"] == whole["eval"]
    assert samples(tmp_path / "killed", lines_of) == samples(tmp_path / "whole", lines_of)


def test_a_cache_that_cannot_be_written_is_reported_once_and_ends_no_run(
    args: tuple[str, ...], ranks, tmp_path: Path, lines_of
) -> None:
    (tmp_path / "taken").write_bytes(b"")
    result = ranks(*args, f"data.cache={tmp_path / 'taken'}", "--run-dir", "run").result
    warned = [row["message"] for row in lines_of(tmp_path / "run/warnings.jsonl") if "data.cache" in row["message"]]
    assert result["steps"] == STEPS
    assert len(warned) == 2 and all("taken" in message for message in warned)  # of the training and the validation set

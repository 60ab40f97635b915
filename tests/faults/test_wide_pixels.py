"""Proof run on 16-bit images of five channels: loaders, ranks, a kill and a resumed run leave the same weights."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

NUM_TRAIN, NUM_VAL = 60, 20
ARGS = (
    "train",
    "digits",
    "data.source={name: folder, root: data, channels: 5, pixels: uint16}",
    "data.image_size=12",
    "data.batch_size=12",
    "data.augment=[random_resized_crop,flip,rotate,random_erasing,mixup]",
    "model.norm=none",
    "model.width=0.1",
    "optim.lr=0.01",
    "train.epochs=2",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "log.report=off",
    "checkpoint.every=1st",
    "checkpoint.keep=99",
    "parallel.threads=1",
    "--json",
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write scikit-learn's digits with five 16-bit channels: two class folders of .npy files and TIFFs."""
    tifffile = pytest.importorskip("tifffile", reason="not installed: pip install 'paceline[images]'")
    pytest.importorskip("imagecodecs", reason="not installed: pip install 'paceline[images]'")
    digits, gains = load_digits(), np.linspace(0.2, 1, 5)
    for number in range(NUM_TRAIN + NUM_VAL):
        folder = tmp_path / "data" / ("train" if number < NUM_TRAIN else "val") / str(digits.target[number] % 2)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number][..., None] / 16 * gains * 65535).round().astype(np.uint16)
        if number % 2:
            np.save(folder / f"{number:03}.npy", pixels)
        else:
            options = {"photometric": "minisblack", "planarconfig": "contig", "compression": "zlib"}
            tifffile.imwrite(folder / f"{number:03}.tif", pixels, **options)
    return tmp_path / "data"


def samples(run: Path, num_ranks: int, lines_of) -> list[list[tuple[int, int]]]:
    """Return (sample, checksum of its pixels) of each step, ranks in order."""
    parts = [lines_of(run / f"steps.rank{rank}.jsonl") for rank in range(num_ranks)]
    return [
        [pair for row in step for pair in zip(row["samples"], row["crc32"], strict=True)]
        for step in zip(*parts, strict=True)
    ]


@pytest.mark.usefixtures("data")
def test_loaders_ranks_a_kill_and_a_resumed_run_leave_the_same_weights(ranks, paceline, tmp_path, lines_of) -> None:
    whole = {num: ranks(*ARGS, "data.workers=0", "--run-dir", f"whole-{num}", ranks=num).result for num in (1, 2)}
    taken = samples(tmp_path / "whole-1", 1, lines_of)
    assert len({sample for step in taken[:5] for sample, _ in step}) == NUM_TRAIN
    assert samples(tmp_path / "whole-2", 2, lines_of) == taken
    losses = [[row["loss"] for row in lines_of(tmp_path / f"whole-{num}/steps.jsonl")] for num in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)

    for loader in ("threads", "processes"):
        args = (*ARGS, f"data.loader={loader}", "data.workers=2", "--run-dir", loader)
        assert ranks(*args).result["weights_sha256"] == whole[1]["weights_sha256"]
        assert samples(tmp_path / loader, 1, lines_of) == taken

    run = tmp_path / "killed"
    process = paceline.start(*ARGS, "data.workers=0", "--ranks", "2", "--run-dir", run.name)
    deadline_s = time.monotonic() + 120
    while not list(run.glob("checkpoints/step-*")) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (run / "result.json").exists(), "it ended before the kill"
    resumed = ranks(*ARGS, "data.workers=0", "--run-dir", run.name, "--resume", ranks=2).result
    assert resumed["weights_sha256"] == whole[2]["weights_sha256"]
    assert resumed["eval"] == whole[2]["eval"]


@pytest.mark.usefixtures("data")
def test_a_resumed_run_keeps_its_statistics_and_a_pack_trains_the_same(ranks, paceline, tmp_path) -> None:
    short = (*ARGS, "train.epochs=1", "data.workers=0")
    whole = ranks(*short, "--run-dir", "whole").result
    recorded = json.loads((tmp_path / "whole/dataset.json").read_text())
    expected = np.stack([np.load(path) for path in sorted((tmp_path / "data/train").rglob("*.npy"))]) / 65535
    assert recorded["mean"] == pytest.approx(expected.mean((0, 1, 2)), rel=0.1)  # of half of the images

    packed = paceline("data", "pack", "digits", "data.pack", ARGS[2])
    assert packed.code == 0, packed.err
    pack = [*short[:2], "data.source={name: pack, root: data.pack}", *short[3:]]
    assert ranks(*pack, "--run-dir", "pack").result["weights_sha256"] == whole["weights_sha256"]

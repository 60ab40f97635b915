"""Hard-example mining draws the same samples on one and two ranks, with any loader, and after a resume."""

import shutil
from pathlib import Path

from safetensors.torch import load_file

from paceline.training.checkpoint import find_damage

ARGS = (
    *("train", "digits", "data.batch_size=96", "train.epochs=3", "checkpoint.every=7st", "checkpoint.keep=9"),
    *("data.sampler={name: hard, warmup: 1, share: 0.8}", "data.augment=[pad_crop,flip]", "log.samples=true"),
    *("model.norm=none", "model.width=0.1", "train.precision=fp64", "optim.lr=0.02", "parallel.threads=1"),
)
WEIGHTS = "image_weights.safetensors"


def cut(run: Path, name: str, step: int) -> Path:
    """Return a copy of `run` that ends after `step`."""
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    (copy / "result.json").unlink()
    for path in (copy / "checkpoints").iterdir():
        if int(path.name[-2:]) > step:
            shutil.rmtree(path)
    return copy


def test_the_samples_are_the_same_on_two_ranks_with_workers_and_after_a_resume(
    paceline, tmp_path: Path, lines_of
) -> None:
    whole = paceline(*ARGS, "--run-dir", "whole-1", "--json").result
    paceline(*ARGS, "--ranks", "2", "--run-dir", "whole-2", "--json").result  # noqa: B018
    steps = whole["steps"] // 3
    at = 7 * -(-(steps + 1) // 7)  # within the second epoch
    assert steps < at < 2 * steps
    cut(tmp_path / "whole-1", "cut", at)
    workers = ("data.loader=processes", "data.workers=2")
    resumed = paceline(*ARGS, *workers, "--run-dir", "cut", "--resume", "--json").result
    assert resumed["weights_sha256"] == whole["weights_sha256"]

    traces = {}
    for name, ranks in (("whole-1", 1), ("whole-2", 2), ("cut", 1)):
        parts = [lines_of(tmp_path / name / f"steps.rank{rank}.jsonl") for rank in range(ranks)]
        traces[name] = [
            [pair for row in rows for pair in zip(row["samples"], row["crc32"], strict=True)]
            for rows in zip(*parts, strict=True)
        ]
        weights = load_file(tmp_path / name / "checkpoints" / f"step-{3 * steps:08}" / WEIGHTS)
        traces[f"{name} weights"] = {key: each.tolist() for key, each in weights.items()}
    assert traces["whole-2"] == traces["cut"] == traces["whole-1"]
    assert traces["whole-2 weights"] == traces["cut weights"] == traces["whole-1 weights"]
    assert traces["whole-1 weights"]["step"] == 2 * steps
    epochs = [traces["whole-1"][first : first + steps] for first in range(0, 3 * steps, steps)]
    seen = [len({sample for step in epoch for sample, _ in step}) for epoch in epochs]
    assert seen[0] == 96 * steps > max(seen[1:])
    assert [row["step"] for row in lines_of(tmp_path / "cut" / "hard_images.jsonl")] == [steps, 2 * steps]

    checkpoint = tmp_path / "cut" / "checkpoints" / f"step-{at:08}"
    content = bytearray((checkpoint / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (checkpoint / WEIGHTS).write_bytes(content)
    assert WEIGHTS in find_damage(checkpoint)  # so it is not resumed from

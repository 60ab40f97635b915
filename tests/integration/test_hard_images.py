"""Hard-example mining draws the same samples on one and two ranks, with any loader, and after a resume."""

from pathlib import Path

from safetensors.torch import load_file

from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training.checkpoint import find_damage
from paceline.training.process import Invocation
from paceline.training.run import run

STEPS, SAVED = 8, 11  # steps per epoch, and a checkpoint within the second epoch
ARGS = (
    *("data.source.num_images=96", "data.source.num_val_images=12", "data.source.image_size=8", "data.batch_size=12"),
    *("train.epochs=3", "checkpoint.every=11st", "checkpoint.keep=9", "log.samples=true", "log.tensorboard=off"),
    *("data.sampler={name: hard, after: 1, share: 0.8}", "data.augment=[pad_crop,flip]", "parallel.threads=1"),
    *("model.norm=none", "model.width=0.1", "train.precision=fp64", "log.report=off", "measure.telemetry=off"),
)
WEIGHTS = "image_weights.safetensors"


def train(folder: Path, *more: str, resume: bool = False) -> str:
    """Train one rank in this process; return the digest of the weights."""
    recipe = load("synthetic", Patch.parse([*ARGS, *more])).recipe
    result = run(recipe, World.single(), RunDir(folder), resume=resume, invocation=Invocation())
    assert result.weights_sha256
    return result.weights_sha256


def test_the_samples_are_the_same_on_two_ranks_with_workers_and_after_a_resume(
    paceline, tmp_path: Path, cut, lines_of
) -> None:
    weights_sha256 = train(tmp_path / "whole-1")
    paceline("train", "synthetic", *ARGS, "--ranks", "2", "--run-dir", "whole-2", "--json").result  # noqa: B018
    resumed = cut(tmp_path / "whole-1", tmp_path / "cut", SAVED)
    assert train(resumed, "data.loader=processes", "data.workers=2", resume=True) == weights_sha256

    samples, weights = {}, {}
    for name, ranks in (("whole-1", 1), ("whole-2", 2), ("cut", 1)):
        parts = [lines_of(tmp_path / name / f"steps.rank{rank}.jsonl") for rank in range(ranks)]
        samples[name] = [
            [pair for row in rows for pair in zip(row["samples"], row["crc32"], strict=True)]
            for rows in zip(*parts, strict=True)
        ]
        tensors = load_file(tmp_path / name / "checkpoints" / f"step-{3 * STEPS:08}" / WEIGHTS)
        weights[name] = {key: each.tolist() for key, each in tensors.items()}
    assert samples["whole-2"] == samples["cut"] == samples["whole-1"]
    assert weights["whole-2"] == weights["cut"] == weights["whole-1"]
    assert weights["whole-1"]["step"] == 2 * STEPS
    drawn = [[sample for pairs in samples["cut"] for sample, _ in pairs][first : first + 96] for first in (0, 96, 192)]
    num_different = [len(set(epoch)) for epoch in drawn]
    assert num_different[0] == 96 > max(num_different[1:])
    assert [row["step"] for row in lines_of(resumed / "hard_images.jsonl")] == [STEPS, 2 * STEPS]

    checkpoint = resumed / "checkpoints" / f"step-{SAVED:08}"
    content = bytearray((checkpoint / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (checkpoint / WEIGHTS).write_bytes(content)
    assert WEIGHTS in find_damage(checkpoint)  # so it is not resumed from

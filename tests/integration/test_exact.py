"""A run is a function of its recipe: the same samples, augmentation and losses on any number of ranks."""

from pathlib import Path

import pytest

WORDS = (
    "train",
    "synthetic",
    "model.norm=none",
    "model.width=0.1",
    "data.source.num_images=300",
    "data.source.num_val_images=37",
    "data.batch_size=24",
    "data.augment=[pad_crop,flip,rotate]",
    "optim.lr=0.02",
    "train.epochs=2",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "parallel.threads=1",
)
LAUNCH = ("torch.distributed.launch", "--standalone", "--nproc_per_node=2", "-m", "paceline")
"""torchrun by the name it had before, by which it writes --local-rank=N in front of the words too."""


def trace(run: Path, ranks: int, lines_of) -> list[list[tuple[int, int]]]:
    """Return (sample, checksum of its augmented pixels) of each global step, ranks in order."""
    parts = [lines_of(run / f"steps.rank{rank}.jsonl") for rank in range(ranks)]
    assert all([record["step"] for record in part] == list(range(24)) for part in parts)
    return [
        [pair for record in step for pair in zip(record["samples"], record["crc32"], strict=True)]
        for step in zip(*parts, strict=True)
    ]


@pytest.fixture(scope="module")
def run_alone(paceline_in, tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return paceline_in(folder)(*WORDS, "--run-dir", "alone", "--json").result, folder / "alone"


@pytest.fixture
def alone(run_alone, lines_of):
    result, run = run_alone
    return result, trace(run, 1, lines_of), lines_of(run / "steps.jsonl")


def test_one_two_and_three_ranks_and_torchrun_are_one_run(
    paceline, paceline_anew, tmp_path: Path, lines_of, alone
) -> None:
    result, samples, steps = alone
    assert result["eval"]["images"] == 37
    assert len({sample for step in samples[:12] for sample, _ in step}) == 288
    shas = {}
    # 12 images on each of 2 ranks are the same run as 24 over all of them.
    per_rank = [word.replace("data.batch_size=24", "data.rank_batch_size=12") for word in WORDS]
    for name, ranks, program in (("two", 2, ()), ("three", 3, ()), ("torchrun", 2, LAUNCH)):
        words = WORDS if program else (*(per_rank if ranks == 2 else WORDS), "--ranks", str(ranks))
        start = paceline_anew if program else paceline
        other = start(*words, "--run-dir", name, "--json", program=program).result
        assert (other["world_size"], other["recipe_hash"]) == (ranks, result["recipe_hash"])
        assert trace(tmp_path / name, ranks, lines_of) == samples
        losses = [record["loss"] for record in lines_of(tmp_path / name / "steps.jsonl")]
        assert losses == pytest.approx([record["loss"] for record in steps], abs=1e-4)
        assert other["eval"]["images"] == 37
        assert other["eval"] == pytest.approx(result["eval"], abs=1e-4)
        shas[name] = other["weights_sha256"]
    assert shas["torchrun"] == shas["two"]


def test_decoding_workers_change_no_pixel(paceline, tmp_path: Path, lines_of, alone) -> None:
    _, samples, _ = alone
    paceline(*WORDS, "data.workers=2", "--run-dir", "ahead", "--json").result  # noqa: B018
    assert trace(tmp_path / "ahead", 1, lines_of) == samples


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batch_norm_over_all_ranks_is_one_run_however_ranks_are_joined(
    paceline, tmp_path: Path, lines_of, strategy: str
) -> None:
    words = [*WORDS, "model.norm=sync_batch", "train.precision=fp64", "train.clip_norm=1", "train.ema=on"]
    words += ["train.epochs=1", "optim.layer_decay=0.8", 'train.class_weights={"1": 5, "4": 2}']
    words += [
        "data.augment=[pad_crop,{name: flip, mode: alternating},mixup]",
        "train.eval_train=on",
        "train.accuracy=on",
    ]
    found, counted = {}, {}
    for ranks in (1, 2):
        run = ["--run-dir", f"on-{ranks}", "--ranks", str(ranks), "--json", f"parallel.strategy={strategy}"]
        result = paceline(*words, *run).result
        steps = lines_of(tmp_path / f"on-{ranks}" / "steps.jsonl")
        found[ranks] = ([record["loss"] for record in steps], result["eval"], result["ema"], result["train_eval"])
        (judged,) = lines_of(tmp_path / f"on-{ranks}" / "evals.jsonl")
        counted[ranks] = [(each["top1"], each["top5"]) for each in steps] + [
            (judged["batch_top1"], judged["batch_top5"])
        ]
    # float64 rounds at 1e-16; batch norm of a narrow network makes more of it at every step.
    assert found[2][0] == pytest.approx(found[1][0], abs=1e-8)
    assert counted[1] == counted[2] and len(counted[1]) == 13 and 0 < counted[1][-1][0] < counted[1][-1][1] <= 1
    for one, two in zip(found[1][1:], found[2][1:], strict=True):
        assert two == pytest.approx(one, abs=1e-6)

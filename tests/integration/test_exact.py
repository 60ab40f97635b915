"""A run is a function of its recipe: the samples, augmentations and losses are the same on any number of ranks."""

from pathlib import Path

import pytest

ARGS = (
    *("train", "synthetic", "model.norm=none", "model.width=0.1", "data.source.num_images=300"),
    *("data.source.num_val_images=37", "data.source.image_size=16", "data.batch_size=24", "data.workers=0"),
    *("data.augment=[pad_crop,flip,rotate]", "optim.lr=0.02", "train.epochs=2", "log.every=1st", "log.samples=true"),
    *("log.tensorboard=off", "log.report=off", "log.worst=0", "measure.telemetry=off", "parallel.threads=1"),
)
LAUNCH = ("torch.distributed.launch", "--standalone", "--nproc_per_node=2", "-m", "paceline")
"""torchrun by its former name, which passes --local-rank=N before the script's arguments."""


def samples_and_pixels(run: Path, ranks: int, lines_of) -> list[list[tuple[int, int]]]:
    """Return (sample, checksum of its augmented pixels) of each global step, in the order of ranks."""
    parts = [lines_of(run / f"steps.rank{rank}.jsonl") for rank in range(ranks)]
    assert all([record["step"] for record in part] == list(range(24)) for part in parts)
    return [
        [pair for record in step for pair in zip(record["samples"], record["crc32"], strict=True)]
        for step in zip(*parts, strict=True)
    ]


@pytest.fixture(scope="module")
def single_rank_run(paceline_in, tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return paceline_in(folder)(*ARGS, "--run-dir", "alone", "--json").result, folder / "alone"


@pytest.fixture
def single_rank(single_rank_run, lines_of):
    result, run = single_rank_run
    return result, samples_and_pixels(run, 1, lines_of), lines_of(run / "steps.jsonl")


def test_one_two_and_three_ranks_and_torchrun_train_the_same_run(
    paceline, paceline_anew, tmp_path: Path, lines_of, single_rank
) -> None:
    result, samples, steps = single_rank
    assert result["eval"]["images"] == 37
    assert len({sample for step in samples[:12] for sample, _ in step}) == 288
    shas = {}
    # 12 images on each of 2 ranks are the same run as 24 on all of them.
    per_rank = [word.replace("data.batch_size=24", "data.rank_batch_size=12") for word in ARGS]
    for name, ranks, program in (("two", 2, ()), ("three", 3, ()), ("torchrun", 2, LAUNCH)):
        args = ARGS if program else (*(per_rank if ranks == 2 else ARGS), "--ranks", str(ranks))
        start = paceline_anew if program else paceline
        other = start(*args, "--run-dir", name, "--json", program=program).result
        assert (other["world_size"], other["recipe_hash"]) == (ranks, result["recipe_hash"])
        assert samples_and_pixels(tmp_path / name, ranks, lines_of) == samples
        losses = [record["loss"] for record in lines_of(tmp_path / name / "steps.jsonl")]
        assert losses == pytest.approx([record["loss"] for record in steps], abs=1e-4)
        assert other["eval"]["images"] == 37
        assert other["eval"] == pytest.approx(result["eval"], abs=1e-4)
        shas[name] = other["weights_sha256"]
    assert shas["torchrun"] == shas["two"]


def test_worker_processes_do_not_change_a_pixel(paceline, tmp_path: Path, lines_of, single_rank) -> None:
    _, samples, _ = single_rank
    paceline(*ARGS, "data.workers=2", "--run-dir", "ahead", "--json").result  # noqa: B018
    assert samples_and_pixels(tmp_path / "ahead", 1, lines_of) == samples


SYNC = (
    *(*ARGS, "model.norm=sync_batch", "train.precision=fp64", "train.clip_norm=1", "train.ema=on", "train.epochs=1"),
    *("optim.layer_decay=0.8", 'train.class_weights={"1": 5, "4": 2}', "train.eval_train=on", "train.accuracy=on"),
    "data.augment=[pad_crop,{name: flip, mode: alternating},mixup]",
)


def results_of(program, lines_of, ranks: int, strategy: str) -> tuple[tuple, list[tuple[float, float]]]:
    """Return losses and evaluations of a run, and the top-1 and top-5 accuracy of its batches."""
    args = (*SYNC, f"parallel.strategy={strategy}", "--ranks", str(ranks))
    result = program(*args, "--run-dir", f"on-{ranks}", "--json").result
    steps = lines_of(program.folder / f"on-{ranks}" / "steps.jsonl")
    (evaluation,) = lines_of(program.folder / f"on-{ranks}" / "evals.jsonl")
    accuracies = [(each["top1"], each["top5"]) for each in steps]
    accuracies.append((evaluation["batch_top1"], evaluation["batch_top5"]))
    return ([record["loss"] for record in steps], result["eval"], result["ema"], result["train_eval"]), accuracies


@pytest.fixture(scope="module")
def sync_on_one(paceline_in, tmp_path_factory, lines_of):
    """Return the results of one rank, on which a strategy has no effect."""
    return results_of(paceline_in(tmp_path_factory.mktemp("sync")), lines_of, 1, "ddp")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sync_batch_norm_trains_the_same_on_one_and_two_ranks(paceline, lines_of, sync_on_one, strategy: str) -> None:
    one, accuracies = sync_on_one
    two, accuracies_on_two = results_of(paceline, lines_of, 2, strategy)
    # float64 rounds at 1e-16, and batch norm of a narrow model amplifies that at every step.
    assert two[0] == pytest.approx(one[0], abs=1e-8)
    assert accuracies_on_two == accuracies and len(accuracies) == 13 and 0 < accuracies[-1][0] < accuracies[-1][1] <= 1
    for on_one, on_two in zip(one[1:], two[1:], strict=True):
        assert on_two == pytest.approx(on_one, abs=1e-6)

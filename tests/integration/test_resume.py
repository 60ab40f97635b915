"""A run that was killed and resumed has the weights, logs and samples of an uninterrupted one."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

QUIET = ("log.tensorboard=off", "log.report=off", "log.worst=0", "measure.telemetry=off", "parallel.threads=1")
ARGS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=240", "data.source.num_val_images=24"),
    *("data.source.image_size=16", "data.batch_size=12", "data.augment=[pad_crop,flip]", "schedule.name=plateau"),
    *("train.epochs=3", "checkpoint.every=7st", "log.every=1st", "log.samples=true", *QUIET),
)


def kill_after_a_checkpoint(paceline, run: Path, *args: str) -> None:
    process = paceline.start(*args, "--run-dir", str(run), "--json")
    deadline = time.monotonic() + 120
    while not list((run / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)


def without_times(rows: list[dict]) -> list[dict]:
    times = ("trained_s", "train_s", "epoch_s", "images_per_s")
    return [{k: v for k, v in row.items() if k not in times and not k.endswith("_share")} for row in rows]


def samples_and_pixels(run: Path, ranks: int, lines_of) -> list[list[tuple[int, int]]]:
    """Return (sample, checksum of its augmented pixels) of each global step, in the order of ranks."""
    parts = [lines_of(run / f"steps.rank{rank}.jsonl") for rank in range(ranks)]
    return [
        [pair for row in rows for pair in zip(row["samples"], row["crc32"], strict=True)]
        for rows in zip(*parts, strict=True)
    ]


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_a_resumed_run_equals_an_uninterrupted_one(paceline, tmp_path: Path, lines_of, ranks: str) -> None:
    args = (*ARGS, "--ranks", ranks)
    uninterrupted = paceline(*args, "--run-dir", "whole", "--json").result
    kill_after_a_checkpoint(paceline, tmp_path / "killed", *args)
    assert not (tmp_path / "killed" / "result.json").exists()
    resumed = paceline(*args, "--run-dir", "killed", "--resume", "--json").result
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    assert (resumed["steps"], resumed["images_seen"]) == (60, 720)
    assert resumed["eval"] == uninterrupted["eval"] and resumed["best"] == uninterrupted["best"]
    for name in ("steps.jsonl", "evals.jsonl", *(f"steps.rank{rank}.jsonl" for rank in range(int(ranks)))):
        one, other = lines_of(tmp_path / "whole" / name), lines_of(tmp_path / "killed" / name)
        assert without_times(other) == without_times(one) and one
    final = [
        json.loads((tmp_path / name / "checkpoints" / "step-00000060" / "manifest.json").read_text())
        for name in ("whole", "killed")
    ]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert final[0][name] == final[1][name]


STRIKES_BACK = (
    *("train", "synthetic", "data.source.num_images=360", "data.source.num_val_images=24"),
    *("data.source.image_size=16", "data.batch_size=24", "data.sampler=repeated", "train.epochs=2"),
    "data.augment=[pad_crop,three_augment,{name: mixup, until: 1ep},{name: cutmix, p: 0.5, until: 20st}]",
    *("model.norm=none", "model.width=0.1", "train.loss.name=bce", "train.label_smoothing=0.1"),
    *("train.precision=fp64", "train.clip_agc=0.1", "optim={name: lamb, lr: 0.005}"),
    *("schedule={name: cosine, warmup: 1ep}", "checkpoint.every=4st", "log.every=1st", "log.samples=true", *QUIET),
)


def test_repeated_augmentation_with_mixing_that_ends_is_exact_on_two_ranks_and_after_a_kill(
    paceline, tmp_path: Path, lines_of
) -> None:
    """BCE, repeated augmentation, 3-Augment, mixup and cutmix until the last epoch, and adaptive clipping."""
    whole = [
        paceline(*STRIKES_BACK, "--ranks", ranks, "--run-dir", f"whole-{ranks}", "--json").result for ranks in "12"
    ]
    on_two = (*STRIKES_BACK, "--ranks", "2")
    kill_after_a_checkpoint(paceline, tmp_path / "killed-2", *on_two)
    assert not (tmp_path / "killed-2" / "result.json").exists()
    resumed = paceline(*on_two, "--run-dir", "killed-2", "--resume", "--json").result
    assert resumed["weights_sha256"] == whole[1]["weights_sha256"]
    assert resumed["eval"] == whole[1]["eval"]
    losses, samples = {}, {}
    for name in ("whole-1", "whole-2", "killed-2"):
        samples[name] = samples_and_pixels(tmp_path / name, int(name[-1]), lines_of)
        losses[name] = [row["loss"] for row in lines_of(tmp_path / name / "steps.jsonl")]
    assert samples["whole-1"] == samples["whole-2"] == samples["killed-2"] and len(samples["whole-1"]) == 30
    assert losses["killed-2"] == losses["whole-2"]
    # Two ranks sum gradients in another order.
    assert losses["whole-2"] == pytest.approx(losses["whole-1"], rel=1e-9)
    epoch = [pair for step in samples["whole-1"][:15] for pair in step]
    assert len({sample for sample, _ in epoch}) == -(-len(epoch) // 3)
    assert len(set(epoch)) > 0.95 * len(epoch)  # almost every version is another image


def test_balanced_draws_are_those_of_one_rank_on_two_ranks_and_after_a_kill(paceline, tmp_path: Path, lines_of) -> None:
    args = ("train", "digits", "data.batch_size=96", "data.sampler=balanced", "data.augment=[pad_crop]", *QUIET)
    args = (*args, "model.width=0.1", "train.steps=24", "train.eval_every=off", "checkpoint.every=5st")
    args = (*args, "log.every=1st", "log.samples=true")
    paceline(*args, "--run-dir", "one", "--ranks", "1", "--json").result  # noqa: B018
    kill_after_a_checkpoint(paceline, tmp_path / "two", *args, "--ranks", "2")
    resumed = paceline(*args, "--run-dir", "two", "--ranks", "2", "--resume", "--json").result
    one, two = (samples_and_pixels(tmp_path / name, ranks, lines_of) for name, ranks in (("one", 1), ("two", 2)))
    assert one == two and len(one) == resumed["steps"] == 24
    epoch = [pair for step in one[:14] for pair in step]
    assert len({sample for sample, _ in epoch}) < 0.75 * len(epoch)  # drawn with replacement
    assert len(set(epoch)) > 0.95 * len(epoch)  # and shifted differently each time, in one of 81 ways


def test_the_logs_of_a_resumed_run_equal_those_of_an_uninterrupted_one(paceline, tmp_path: Path, cut, lines_of) -> None:
    """The intervals of log, evaluation and checkpoint do not divide one another, so a record spans the interruption."""
    args = (*ARGS, "train.epochs=1", "checkpoint.every=3st", "log.every=4st", "train.eval_every=3st")
    args = (*args, "checkpoint.keep=9", "log.tensorboard=on", "log.report=on", "--ranks", "2")
    paceline(*args, "--run-dir", "whole", "--json").result  # noqa: B018
    cut(tmp_path / "whole", tmp_path / "cut", 9)
    paceline(*args, "--run-dir", "cut", "--resume", "--json").result  # noqa: B018
    for name in ("steps.jsonl", "evals.jsonl"):
        one, other = lines_of(tmp_path / "whole" / name), lines_of(tmp_path / "cut" / name)
        assert without_times(other) == without_times(one) and len(one) > 4
    points = [scalars(tmp_path / name / "tensorboard") for name in ("whole", "cut")]
    assert points[0] == points[1] and len(points[0]) > 10


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(folder)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag != "images_per_s" and not tag.startswith("stages/")]
    return {(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}


VIT = (
    *("train", "synthetic", "model.name=timm:vit_tiny_patch16_224", "model.width=1"),
    "model.args={depth: 2, embed_dim: 48, num_heads: 2}",
    *("data.source.num_images=48", "data.source.num_val_images=8", "data.batch_size=4", "data.augment=[pad_crop,flip]"),
    *("checkpoint.every=4st", "checkpoint.keep=9", *QUIET),
)


def sized(pixels: int) -> tuple[str, str]:
    return f"data.source.image_size={pixels}", f"data.image_size={pixels}"


def test_a_vit_fine_tuned_at_160_px_resumes_exactly_on_one_rank_and_two(
    paceline, tmp_path: Path, cut, lines_of
) -> None:
    """Its weights were trained at 96 px, so that the position embeddings are resampled, once and not on resume."""
    trained = paceline(*VIT, *sized(96), "train.steps=2", "--run-dir", "pretrained", "--json").result
    args = (*VIT, *sized(160), "model.weights=pretrained", "train.epochs=1", "log.every=1st", "optim.lr=0.01")
    losses = []
    for ranks in ("1", "2"):
        whole, part = tmp_path / f"whole-{ranks}", tmp_path / f"cut-{ranks}"
        run = paceline(*args, "--ranks", ranks, "--run-dir", whole.name, "--json")
        assert "resampled to the image size: pos_embed" in run.err
        cut(whole, part, 4)
        resumed = paceline(*args, "--ranks", ranks, "--run-dir", part.name, "--resume", "--json").result
        assert resumed["weights_sha256"] == run.result["weights_sha256"]
        assert resumed["provenance"]["started_from"] == run.result["provenance"]["started_from"]
        assert resumed["provenance"]["started_from"]["sha256"] == trained["weights_sha256"]
        rows = [without_times(lines_of(each / "steps.jsonl")) for each in (whole, part)]
        assert rows[0] == rows[1] and len(rows[0]) == 12
        losses.append([row["loss"] for row in rows[0]])
        weights = load_file(whole / "checkpoints" / "step-00000012" / "model.safetensors")
        assert weights["pos_embed"].shape == (1, 1 + 10 * 10, 48)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # the ranks' gradients are summed in another order


def test_a_run_that_reached_its_target_takes_no_more_steps(paceline, tmp_path: Path) -> None:
    args = (*ARGS, "train.stop.top1=0.001", "train.eval_every=3st", "checkpoint.every=3st", "--run-dir", "run")
    first = paceline(*args, "--json").result
    assert (first["status"], first["steps"]) == ("target_reached", 3)
    (tmp_path / "run" / "result.json").unlink()
    resumed = paceline(*args, "--resume", "--json").result
    assert (resumed["steps"], resumed["status"]) == (3, "target_reached")
    assert resumed["weights_sha256"] == first["weights_sha256"]


def test_a_run_resumed_on_other_ranks_has_the_same_samples(paceline, tmp_path: Path, lines_of) -> None:
    args = (*ARGS, "train.epochs=1", "model.norm=none")
    paceline(*args, "--run-dir", "whole", "--json").result  # noqa: B018
    kill_after_a_checkpoint(paceline, tmp_path / "cut", *args, "--ranks", "2")
    paceline(*args, "--run-dir", "cut", "--resume", "--json", "--ranks", "3").result  # noqa: B018
    uninterrupted = lines_of(tmp_path / "whole" / "steps.rank0.jsonl")
    parts = [lines_of(tmp_path / "cut" / f"steps.rank{rank}.jsonl") for rank in range(3)]
    for step in range(15, 20):  # certainly after the interruption
        last = [next(record for record in part if record["step"] == step) for part in parts]
        assert [pair for record in last for pair in record["crc32"]] == uninterrupted[step]["crc32"]
        assert [sample for record in last for sample in record["samples"]] == uninterrupted[step]["samples"]


def test_resuming_a_completed_run_changes_nothing(paceline, tmp_path: Path) -> None:
    first = paceline("train", "train.steps=3", "model.width=0.1", *QUIET, "--run-dir", "run", "--json")
    written = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    for ranks in ("1", "2", "4"):
        resumed = paceline("train", "run", "--resume", "--json", "--ranks", ranks)
        assert resumed.result == first.result
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == written


def test_a_changed_recipe_is_refused_with_the_changed_field(paceline) -> None:
    args = ("train", "train.steps=3", "model.width=0.1", *QUIET, "--run-dir", "run")
    assert paceline(*args).code == 0
    paceline(*args, "--resume", "optim.lr=0.5").assert_error("--resume: run", "optim.lr=0.1 (now 0.5)")
    paceline(*args).assert_error("--run-dir: run already holds a run", "--resume")
    assert paceline(*args, "--resume", "log.every=1st").code == 0


def test_an_evaluation_aborted_at_the_last_step_is_repeated_and_saved(paceline, tmp_path: Path) -> None:
    """The first process saved step 20 without an evaluation; the resumed one takes no step, evaluates, and saves."""
    args = (*ARGS, "train.epochs=1", "checkpoint.every=20st", "train.eval_every=20st", "--run-dir", "run")
    paceline(*args, "--json").result  # noqa: B018
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000020"
    uninterrupted = json.loads((checkpoint / "state.json").read_text())["train"]
    _remove_evaluation(checkpoint)
    (tmp_path / "run" / "result.json").unlink()
    rows = (tmp_path / "run" / "evals.jsonl").read_text().splitlines()
    resumed = paceline(*args, "--resume", "--json").result
    assert resumed["steps"] == 20 and resumed["eval"] is not None
    after = json.loads((checkpoint / "state.json").read_text())["train"]
    assert (
        (after["last_step"], after["best_step"]) == (uninterrupted["last_step"], uninterrupted["best_step"]) == (20, 20)
    )
    assert len((tmp_path / "run" / "evals.jsonl").read_text().splitlines()) == len(rows) == 1


def _remove_evaluation(checkpoint: Path) -> None:
    """Remove the evaluation from a checkpoint, and update its digest."""
    state = json.loads((checkpoint / "state.json").read_text())
    state["train"] |= {"last": None, "last_step": -1, "best": None, "best_step": -1}
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["state.json"] = hashlib.sha256((checkpoint / "state.json").read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("launch", ["ours", "another"])
def test_requeued_slurm_ranks_resume_only_their_own_run(paceline, tmp_path: Path, launch: str) -> None:
    args = (*ARGS, "schedule.name=cosine", "train.eval_every=off", "train.epochs=0.1", "--run-dir", "run", "--json")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    first = paceline(*args, **slurm).result
    resumed = paceline(*args, **{**slurm, "SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7" if launch == "ours" else "8"})
    if launch == "ours":
        assert resumed.result == first
    else:
        resumed.assert_error("--run-dir: run already holds a run")


def test_resume_without_a_name_uses_the_newest_run_of_the_recipe(paceline, tmp_path: Path) -> None:
    args = ("train", "model.width=0.1", *QUIET, "train.steps=3", "--json")
    first = paceline(*args).result
    assert paceline("train", "digits", "--resume", "--json").result == first
    paceline("train", "synthetic", "--resume").assert_error("--resume: runs/ has no run of synthetic")


def test_resuming_a_completed_run_reports_it_first(paceline) -> None:
    args = ("train", "model.width=0.1", "parallel.threads=1", "train.steps=3", "--run-dir", "run")
    assert "already complete" not in paceline(*args).out
    first, second, _, fourth = paceline(*args, "--resume").out.splitlines()[:4]
    assert ": starting 1 rank on " in first and second == "run: was already complete, so nothing was done"
    assert fourth.startswith("✓ trained digits")

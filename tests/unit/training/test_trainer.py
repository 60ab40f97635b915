"""The engine: micro-batches add up to the batch, cadences fall where they should, and evaluation counts exactly."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.errors import NonFiniteLossError, PacelineError
from paceline.core.interrupts import Interrupts
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.world import World
from paceline.data.transfer import DeviceTransfer
from paceline.recipe.load import Patch, load
from paceline.training.evaluator import SplitEvaluator
from paceline.training.loss import CrossEntropy
from paceline.training.process import Invocation
from paceline.training.run import run
from paceline.training.state import StepInterval

SMALL = (
    *("data.source.num_images=96", "data.source.num_val_images=37", "data.source.image_size=8", "model.width=0.1"),
    *("data.batch_size=12", "optim.lr=0.01", "train.steps=10", "log.every=1st", "log.tensorboard=off"),
    *("log.report=off", "log.explain=off", "parallel.threads=1"),
)


def trained(tmp_path: Path, name: str, *overrides: str) -> RunDir:
    recipe = load("synthetic", Patch.parse([*SMALL, *overrides])).recipe
    rundir = RunDir(tmp_path / name)
    run(recipe, World.single(), rundir, invocation=Invocation())
    return rundir


def losses(rundir: RunDir) -> list[float]:
    return [record["loss"] for record in read_lines(rundir.steps)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return the run without overrides, to read."""
    return trained(tmp_path_factory.mktemp("plain"), "run")


@pytest.fixture(scope="module")
def plain_without_norms(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return the run without norms, in which the micro-batches of a batch are independent, to read."""
    return trained(tmp_path_factory.mktemp("plain"), "run", "model.norm=none")


def test_micro_batches_add_up_to_the_batch(tmp_path: Path, plain_without_norms: RunDir) -> None:
    whole = plain_without_norms
    parts = trained(tmp_path, "parts", "model.norm=none", "train.accumulate=3")
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)
    assert len(losses(whole)) == 10


def test_torchs_default_precision_is_fp32_on_a_cpu(tmp_path: Path, plain: RunDir) -> None:
    default = trained(tmp_path, "default", "train.precision=torch_default")
    assert losses(default) == losses(plain)
    weights = [(each.checkpoints / "step-00000010" / "model.safetensors").read_bytes() for each in (default, plain)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_clipping_micro_batches_clips_their_mean(tmp_path: Path, plain_without_norms: RunDir, precision: str) -> None:
    overrides = ("model.norm=none", "train.clip_norm=0.1", f"train.precision={precision}")
    whole, parts = trained(tmp_path, "whole", *overrides), trained(tmp_path, "parts", *overrides, "train.accumulate=3")
    free = plain_without_norms
    if precision != "fp32":
        free = trained(tmp_path, "free", "model.norm=none", f"train.precision={precision}")
    # bfloat16 has 8 bits: micro-batches round their gradients one by one.
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5 if precision == "fp32" else 0.05)
    assert losses(free)[1:] != pytest.approx(losses(whole)[1:], abs=1e-3)


def test_mixing_micro_batches_is_mixing_the_batch(tmp_path: Path, plain_without_norms: RunDir) -> None:
    overrides = ("model.norm=none", "data.augment=[flip, mixup, cutmix]", "train.label_smoothing=0.1")
    whole, parts = trained(tmp_path, "whole", *overrides), trained(tmp_path, "parts", *overrides, "train.accumulate=3")
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)
    assert losses(whole)[0] != pytest.approx(losses(plain_without_norms)[0], abs=1e-3)


def test_augmenting_on_the_device_changes_no_bit(tmp_path: Path) -> None:
    overrides = (
        "data.augment=[pad_crop, {name: flip, mode: alternating}, {name: cutout, size: 4}, rand_augment, mixup]",
    )
    shas = [
        trained(tmp_path, where, *overrides, f"data.augment_on={where}").read_result().weights_sha256
        for where in ("host", "device")
    ]
    assert shas[0] == shas[1]


def test_the_same_recipe_gives_the_same_bits(tmp_path: Path, plain: RunDir) -> None:
    one, other = plain.read_result(), trained(tmp_path, "other").read_result()
    assert one.weights_sha256 == other.weights_sha256
    assert trained(tmp_path, "third", "seed=1").read_result().weights_sha256 != one.weights_sha256


def test_turning_the_clock_off_changes_no_bit(tmp_path: Path, plain: RunDir) -> None:
    on, off = plain.read_result(), trained(tmp_path, "off", "measure.clock=off").read_result()
    assert off.weights_sha256 == on.weights_sha256
    assert on.stages and not off.stages


def test_bfloat16_trains_close_to_float32(tmp_path: Path, plain: RunDir) -> None:
    full, half = plain, trained(tmp_path, "half", "train.precision=bf16")
    # Later losses drift apart as any two roundings do; the first are what bfloat16's 8 bits leave of float32's 24.
    assert losses(half)[:3] == pytest.approx(losses(full)[:3], rel=0.02)
    assert losses(half) != losses(full)


def test_float64_differs_from_float32_by_rounding_alone(tmp_path: Path, plain: RunDir) -> None:
    single, double = plain, trained(tmp_path, "double", "train.precision=fp64")
    assert losses(double)[:3] == pytest.approx(losses(single)[:3], rel=1e-5)
    assert losses(double) != losses(single)


def test_evaluation_and_checkpoints_fall_on_their_cadence_and_on_the_end(tmp_path: Path) -> None:
    rundir = trained(tmp_path, "run", "train.eval_every=4st", "checkpoint.every=3st", "checkpoint.keep=9")
    assert [record["step"] for record in read_lines(rundir.evals)] == [4, 8, 10]
    assert sorted(path.name[-2:] for path in rundir.checkpoints.iterdir()) == ["03", "06", "09", "10"]
    assert all(record["images"] == 37 for record in read_lines(rundir.evals))


def test_off_means_never(tmp_path: Path) -> None:
    rundir = trained(tmp_path, "run", "train.eval_every=off", "checkpoint.every=off")
    assert not list(read_lines(rundir.evals)) and not list(rundir.checkpoints.iterdir())
    assert rundir.read_result().eval is None


def test_the_stages_add_up_to_the_counted_wall_clock(tmp_path: Path) -> None:
    result = trained(tmp_path, "run", "measure.warmup_steps=2").read_result()
    account = result.account
    assert account is not None and account.counted_steps == result.steps - 2
    parts = [account.start_up_s, account.compile_s, account.warmup_s, account.stages_s, account.finish_s]
    assert sum(stage.host_s for stage in result.stages.values()) == pytest.approx(account.stages_s)
    assert sum([*parts, *account.pauses.values(), account.residual_s]) == pytest.approx(account.wall_s)
    # What is between two stages is a few lines of Python.
    assert 0.9 < sum(stage.share for stage in result.stages.values()) < 1
    names = {"data_wait", "h2d", "device_augment", "forward", "loss", "backward", "optimizer", "other"}
    assert set(result.stages) == names
    assert result.images_seen == 120 and result.steps == 10


def test_a_target_ends_the_run_and_is_saved(tmp_path: Path) -> None:
    rundir = trained(tmp_path, "run", "train.stop.top1=0.001", "train.stop.patience=2", "train.eval_every=2st")
    result = rundir.read_result()
    assert (result.status, result.steps) == ("target_reached", 4)
    assert result.time.to_target_s is not None
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-00000004"]


def cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


SQRT = ("optim.lr=0.001", "optim.lr_scaling=sqrt", "optim.base_batch_size=3")  # 0.001 * sqrt(12 / 3) = 0.002
LINEAR = ("optim.lr=0.001", "optim.lr_scaling=linear", "optim.base_batch_size=3")  # 0.001 * 12 / 3 = 0.004


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (SQRT, [0.002] * 10),
        ((*SQRT, "schedule.warmup=4st"), [0.0005, 0.001, 0.0015, 0.002] + [0.002] * 6),
        ((*LINEAR, "schedule.warmup=2st", "schedule.warmup_start=0.25"), [0.0025, 0.004] + [0.004] * 8),
        ((*LINEAR, "schedule.name=step", "schedule.milestones=[5st]", "schedule.factor=0.2"), [4e-3] * 5 + [8e-4] * 5),
        (("schedule.name=cosine",), [0.01 * cosine(step / 10) for step in range(10)]),
        (("schedule.name=linear", "schedule.warmup=2st"), [0.005, 0.01] + [0.01 * (1 - step / 8) for step in range(8)]),
        (("schedule.name=polynomial",), [0.01 * (1 - step / 10) ** 2 for step in range(10)]),
        (
            ("schedule.name=one_cycle", "schedule.peak_at=4st", "schedule.start=0", "schedule.final=0"),
            [0.01 * (1 - cosine(step / 4)) for step in range(4)] + [0.01 * cosine(step / 6) for step in range(6)],
        ),
        (
            ("schedule.name=plateau", "schedule.threshold=1", "schedule.patience=1", "train.eval_every=4st"),
            [0.01] * 8 + [0.002] * 2,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_the_learning_rate_of_every_step_follows_the_schedule(
    tmp_path: Path, overrides: tuple[str, ...], expected
) -> None:
    records = read_lines(trained(tmp_path, "run", *overrides).steps)
    assert [record["lr"] for record in records] == pytest.approx(expected)


def test_skipped_steps_are_counted_and_do_not_advance_the_schedule(tmp_path: Path, monkeypatch) -> None:
    forward = CrossEntropy.forward
    calls = []

    def sometimes_bad(self, logits, targets):
        calls.append(1)
        return forward(self, logits, targets) * (torch.nan if len(calls) in (3, 4) else 1.0)

    monkeypatch.setattr(CrossEntropy, "forward", sometimes_bad)
    overrides = ("schedule.name=linear", "train.ema=on")
    rundir = trained(tmp_path, "run", *overrides, "train.on_nonfinite=skip")
    result, records = rundir.read_result(), list(read_lines(rundir.steps))
    assert (result.steps, result.skipped_steps, result.eval.images) == (10, 2, 37)
    rates = [record["lr"] for record in records]
    assert rates == pytest.approx([0.01 * (1 - update / 10) for update in (0, 1, 2, 3, 4, 5, 6, 7)])
    assert [record["step"] for record in records] == [1, 2, 5, 6, 7, 8, 9, 10]
    calls.clear()
    with pytest.raises(NonFiniteLossError, match=r"step 3: the loss is NaN or infinite on rank 0 of 1, at lr 0.008"):
        trained(tmp_path, "other", *overrides)
    assert not list((tmp_path / "other" / "checkpoints").glob("*"))


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.ema.decay=0.9", "train.eval_train=on"),
        ("optim.name=schedule_free", "optim.lr=0.1"),
        ("optim.name=muon", "model.name=speednet94", "data.source.image_size=28", "train.precision=bf16"),
        ("model.drop_path=0.2", "model.zero_init_residual=true", "optim.name=novograd", "optim.grad_averaging=true"),
        ("optim.name=lars", "train.precision=bf16_master", "train.clip_norm=1"),
        ("optim.name=lamb", "data.progressive.start_size=4", "data.progressive.multiple=2", "data.eval_views=6"),
        ("optim.name=rmsprop", "schedule.name=polynomial", "train.cudnn_benchmark=off"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_an_interrupted_run_ends_with_the_same_bits_and_report(tmp_path: Path, cut, overrides: tuple[str, ...]) -> None:
    overrides = (*overrides, "checkpoint.every=4st", "checkpoint.keep=9", "train.eval_every=5st", "optim.lr=0.01")
    whole = trained(tmp_path, "whole", *overrides)
    part = RunDir(cut(whole.path, tmp_path / "part", 4))
    run(load(str(part.path)).recipe, World.single(), part, resume=True, invocation=Invocation())
    one, other = whole.read_result(), part.read_result()
    assert other.weights_sha256 == one.weights_sha256
    assert (other.eval, other.ema, other.train_eval, other.gap) == (one.eval, one.ema, one.train_eval, one.gap)
    assert losses(part) == losses(whole)


def test_a_non_finite_loss_ends_the_run_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        NonFiniteLossError,
        match=r"^train: step \d+: the loss is NaN or infinite on rank 0 of 1, at lr 1e\+20; last good checkpoint: none",
    ):
        trained(tmp_path, "run", "optim.lr=1e20", "model.norm=none")


def test_log_rows_have_what_readers_need(tmp_path: Path) -> None:
    rundir = trained(tmp_path, "run", "log.every=5st", "train.eval_every=10st")
    records = list(read_lines(rundir.steps))
    assert [record["step"] for record in records] == [5, 10]
    assert set(records[0]) == {"step", "epoch", "images_seen", "loss", "lr", "images_per_s", "trained_s"}
    assert records[1]["images_seen"] == 120 and records[1]["epoch"] == 10 / 8
    header, row = rundir.metrics.read_text().splitlines()
    result, speed = "images,top1,top5,loss,ece,mean_class_accuracy", "train_s,epoch_s,images_per_s"
    assert header == f"step,epoch,images_seen,trained_s,{result},{speed}"
    assert row.startswith("10,1.25,120,")
    (judged,) = read_lines(rundir.evals)
    assert 0 < judged["train_s"] < judged["trained_s"]
    assert judged["epoch_s"] == pytest.approx(judged["train_s"] * 8 / 10)  # 10 steps were trained, 8 are an epoch
    assert judged["images_per_s"] == pytest.approx(120 / judged["train_s"])
    copied = rundir.read_result().host_to_device
    assert copied is not None and (copied.batch_bytes, copied.copied_bytes) == (12 * (3 * 8 * 8 + 8), 0)


def test_accuracy_on_the_training_batches_is_that_of_their_logits_and_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: of the logits and targets that the loss was given, every micro-batch of every step."""
    overrides = ("data.augment=[flip, mixup]", "train.accumulate=3", "log.every=5st")
    overrides = (*overrides, "train.eval_every=10st")
    off = trained(tmp_path, "off", *overrides)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = CrossEntropy.forward

    def kept(self: CrossEntropy, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append((logits.detach().clone(), targets.clone()))
        return forward(self, logits, targets)

    monkeypatch.setattr(CrossEntropy, "forward", kept)
    on = trained(tmp_path, "on", *overrides, "train.accuracy=on")
    assert on.read_result().weights_sha256 == off.read_result().weights_sha256
    is_right = [logits.argmax(1) == targets.argmax(1) for logits, targets in seen]
    by_step = [torch.cat(is_right[3 * step : 3 * step + 3]).double().mean().item() for step in range(10)]
    records, (judged,) = list(read_lines(on.steps)), read_lines(on.evals)
    assert [each["top1"] for each in records] == pytest.approx([sum(by_step[:5]) / 5, sum(by_step[5:]) / 5])
    assert judged["batch_top1"] == pytest.approx(sum(by_step) / 10)
    assert judged["batch_top1"] <= judged["batch_top5"] <= 1
    assert "top1" not in next(iter(read_lines(off.steps)))


def test_a_logged_loss_is_the_mean_since_the_last_record(tmp_path: Path, plain: RunDir) -> None:
    every, fifth = losses(plain), losses(trained(tmp_path, "five", "log.every=5st"))
    assert fifth == pytest.approx([float(np.mean(every[:5])), float(np.mean(every[5:]))], rel=1e-5)


def test_tensorboards_own_reader_finds_the_numbers(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rundir = trained(tmp_path, "run", "log.tensorboard=on")
    events = reading.EventAccumulator(str(rundir.tensorboard)).Reload()
    scalars = [event.value for event in events.Scalars("train/loss")]
    assert scalars == pytest.approx(losses(rundir), rel=1e-5)
    assert {"train/lr", "images_per_s", "val/top1", "val/top5", "val/loss"} <= set(events.Tags()["scalars"])


def test_the_sample_trace_has_every_step(tmp_path: Path) -> None:
    rundir = trained(tmp_path, "run", "log.samples=true")
    lines = [json.loads(line) for line in rundir.samples(0).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10))
    assert all(len(line["samples"]) == len(line["crc32"]) == 12 for line in lines)


def test_a_cadence_of_zero_is_never_due() -> None:
    assert [step for step in range(1, 11) if StepInterval(3, 10).is_due(step)] == [3, 6, 9, 10]
    assert not any(StepInterval(0, 10).is_due(step) for step in range(1, 11))


def test_normalisation_is_per_channel() -> None:
    place = DeviceTransfer(torch.device("cpu"), torch.float32, (0.1, 0.2, 0.3), (0.5, 0.25, 0.125), torch.channels_last)
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1), torch.tensor([0.5, 0.25, 0.125]).view(1, 3, 1, 1)
    normalised = place.normalize(images)
    assert torch.allclose(normalised, (images / 255 - mean) / std, atol=1e-5)
    assert normalised.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("train.precision=fp16", "train.precision=bf16"),
        ("train.precision=fp16_master", "train.precision=bf16_master"),
        ("train.precision=tf32", "train.precision=fp32"),
        ("train.cudnn_benchmark=on", "train.cudnn_benchmark=auto"),
        ("parallel.strategy=dataparallel", "parallel.strategy=ddp"),
        ("model.drop_path=0.1 model.name=speednet94 data.source.image_size=28", "model.drop_path=0"),
        ("optim.name=schedule_free train.ema=on", "off"),
    ],
)
def test_a_setting_without_effect_is_refused_with_a_fix_and_writes_nothing(tmp_path, override, instead) -> None:
    with pytest.raises(PacelineError, match=r"^[a-z_.]+: .*\(.*\)$") as caught:
        trained(tmp_path, "run", *override.split())
    assert instead in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_skipped_batch_of_infinite_activations_leaves_the_evaluation_finite(tmp_path: Path, monkeypatch) -> None:
    normalise, calls = DeviceTransfer.normalize, []

    def sometimes_bad(self, images):
        calls.append(1)
        return normalise(self, images) * (torch.inf if len(calls) == 3 else 1.0)

    monkeypatch.setattr(DeviceTransfer, "normalize", sometimes_bad)
    result = trained(tmp_path, "run", "train.on_nonfinite=skip", "train.ema=on").read_result()
    assert result.skipped_steps == 1
    assert math.isfinite(result.eval.loss) and math.isfinite(result.ema.loss)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return the run that is evaluated after each step, to read."""
    return trained(tmp_path_factory.mktemp("evaluated"), "run", "train.eval_every=1st")


@pytest.mark.parametrize("every", ["off", "1ep", "1h"])
def test_a_preempted_run_is_saved_at_that_step(tmp_path: Path, evaluated: RunDir, every: str) -> None:
    interrupts = Interrupts()
    interrupts.request("SIGTERM")
    overrides = (*SMALL, "train.eval_every=1st", f"checkpoint.every={every}")
    rundir = RunDir(tmp_path / "run")
    recipe = load("synthetic", Patch.parse(list(overrides))).recipe
    left = run(recipe, World.single(), rundir, invocation=Invocation(interrupts=interrupts))
    assert (left.status, left.steps, left.eval) == ("preempted", 1, None)
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-00000001"]
    ended = run(recipe, World.single(), rundir, resume=True, invocation=Invocation())
    assert (ended.status, ended.steps) == ("completed", 10)
    assert [record["step"] for record in read_lines(rundir.evals)] == [*range(1, 11)]
    assert ended.weights_sha256 == evaluated.read_result().weights_sha256


def test_a_request_during_an_evaluation_trains_no_further_step(tmp_path: Path, monkeypatch) -> None:
    """The evaluation has one batch, which is under way when the request comes, so that its result stands."""
    interrupts, place = Interrupts(), SplitEvaluator.__call__

    def stopped_evaluation(self, model):
        found = place(self, model)
        interrupts.request("SIGINT")
        return found

    monkeypatch.setattr(SplitEvaluator, "__call__", stopped_evaluation)
    rundir = RunDir(tmp_path / "run")
    recipe = load("synthetic", Patch.parse([*SMALL, "train.eval_every=2st"])).recipe
    left = run(recipe, World.single(), rundir, invocation=Invocation(interrupts=interrupts))
    assert (left.status, left.steps, left.provenance["stopped_by"]) == ("preempted", 2, "SIGINT")
    assert [record["step"] for record in read_lines(rundir.evals)] == [2]
    monkeypatch.undo()
    ended = run(recipe, World.single(), rundir, resume=True, invocation=Invocation())
    assert ended.weights_sha256 == trained(tmp_path, "whole", "train.eval_every=2st").read_result().weights_sha256


def test_a_cadence_in_time_saves_in_between_and_at_the_end(tmp_path: Path) -> None:
    rundir = trained(tmp_path, "run", "checkpoint.every=0.001s", "checkpoint.keep=99")
    assert len(list(rundir.checkpoints.iterdir())) == 10
    rundir = trained(tmp_path, "other", "checkpoint.every=1h")
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-00000010"]

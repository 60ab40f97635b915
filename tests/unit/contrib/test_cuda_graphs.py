"""A replayed step equals an eager one bitwise; runs that cannot be captured have a note."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.contrib import cuda_graphs
from paceline.contrib.cuda_graphs import (
    EAGER_STEPS,
    CudaGraphStep,
    build_graph_pool,
    keep_lr_on_device,
    plan_capture,
    reads_lr_on_device,
)
from paceline.core.errors import NonFiniteLossError, RecipeError
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.world import World
from paceline.data.augment.build import build_device_transforms
from paceline.data.batch import Batch
from paceline.data.transfer import DeviceTransfer
from paceline.measure.clock import NullClock
from paceline.models import resnet_cifar
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.training import run
from paceline.training.distill import Teacher, build_criterion
from paceline.training.ema import build_weight_average
from paceline.training.loss import CrossEntropy
from paceline.training.lr_schedule import DecayShape, LrSchedule, LrWarmup, half_cosine
from paceline.training.metrics_logger import BatchAccuracy
from paceline.training.nonfinite import GradientProbe, ImmediateCheck
from paceline.training.optim.build import build_optimizer, layers_for_decay, set_lr
from paceline.training.precision import build_precision
from paceline.training.process import Invocation
from paceline.training.state import TrainState
from paceline.training.trainer import EagerStep, OptimizerUpdate

from .cpu_graphs import Recorded, RecordedGraphs

CPU = torch.device("cpu")
STEPS = 8
SMALL = (
    *("data.source.num_images=48", "data.source.num_val_images=6", "data.source.image_size=8", "model.width=0.05"),
    *("data.batch_size=8", f"train.steps={STEPS}", "log.every=1st", "log.tensorboard=off", "parallel.threads=1"),
    *("schedule.name=cosine", "schedule.warmup=4st", "train.capture=on", "data.augment_on=device"),
    *("measure.telemetry=off", "measure.warmup_steps=1", "checkpoint.every=off", "data.augment=[pad_crop, flip]"),
    *("log.report=off", "log.explain=off"),
)
OPTIMIZERS = ("sgd", "adam", "adamw", "novograd", "lars", "lamb", "muon", "schedule_free")


class NeverCaptured(RecordedGraphs):
    """Graphs none of which can be captured: every step is a plain one, by the same numbers on the device."""

    def new_graph(self) -> Recorded:
        raise RuntimeError("no graph today")


def recipe_of(*overrides: str) -> Recipe:
    return load("synthetic", Patch.parse([*SMALL, *overrides])).recipe


def step_of(
    recipe: Recipe, graphs: RecordedGraphs, accuracy: BatchAccuracy | None = None
) -> tuple[nn.Module, CudaGraphStep]:
    """Return a small network and the step that moves it as `recipe` says."""
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(2)]
    model = nn.Sequential(*features, nn.Flatten(), nn.Linear(32, 5), nn.Linear(5, 4))
    precision, strategy = build_precision(recipe.train.precision, CPU), SingleDevice()
    precision.cast_model(model)
    named = precision.optimized_parameters(model)
    optimizer = build_optimizer(recipe.optim, named, "cpu", layers_for_decay(recipe.optim, model))
    average = build_weight_average(recipe.train.ema, model, optimizer, named)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    schedule = LrSchedule(recipe.optim.lr, LrWarmup(3, 0.0), DecayShape(3, STEPS, 0.0, half_cosine))
    reporter: Any = SimpleNamespace(error=lambda step: NonFiniteLossError(f"step {step.number}"))
    clip_norm = recipe.train.clip_norm
    max_norm = math.inf if clip_norm == "off" else clip_norm
    undo, probe, guard = None, GradientProbe(model), ImmediateCheck(reporter)
    update = OptimizerUpdate(
        parameters, optimizer, schedule, precision, strategy, guard, undo, probe, average, max_norm
    )
    place = DeviceTransfer(CPU, precision.dtype, (0.5,) * 3, (0.25,) * 3, torch.channels_last)
    finish = build_device_transforms(recipe.data, place, 4, on_device=True)
    weights = None if recipe.train.class_weights == "off" else torch.tensor([0.5, 2.0, 1.0, 0.25]).double()
    teacher = Teacher(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4)).eval(), None, {})
    precision.cast_model(teacher.model)
    loss = CrossEntropy(recipe.train.label_smoothing, weights)
    criterion = build_criterion(loss, recipe.train.distill, None if recipe.train.distill == "off" else teacher)
    accumulate = recipe.train.accumulate
    plain = EagerStep(
        model,
        criterion,
        precision,
        strategy,
        place,
        finish,
        update,
        NullClock(),
        accumulate,
        accuracy,
    )
    warn = ignore if isinstance(graphs, NeverCaptured) else pytest.fail
    return model, CudaGraphStep(plain, warn, pool=graphs)


def ignore(message: str) -> None:
    """Take what a step that cannot be captured says."""


def batch_of(number: int, size: int, num_draws: int) -> Batch:
    random = np.random.default_rng(number)
    images = torch.from_numpy(random.integers(0, 256, (8, 3, size, size), dtype=np.uint8))
    labels = torch.from_numpy(random.integers(0, 4, 8))
    return Batch(images, labels, np.arange(8), torch.from_numpy(random.random((8, num_draws))))


def course(recipe: Recipe, graphs: RecordedGraphs, sizes: tuple[int, ...] = (8,) * STEPS) -> list[Tensor]:
    """Take steps on images of `sizes`; return all losses, and the state at the end, as the model and others hold it."""
    model, step = step_of(recipe, graphs)
    plain: Any = step._eager_step
    num_draws = sum(each.num_draws for each in plain.transforms.augments) + 4 * (plain.transforms.mix is not None)
    state, losses = TrainState(), []
    for number, size in enumerate(sizes):
        torch.default_generator.manual_seed(number)
        losses.append(step(batch_of(number, size, num_draws), state))
        state.advance(8)
    kept = [each for values in plain.update.optimizer.state.values() for each in values.values()]
    average = plain.update.average.tensors() if plain.update.average else {}
    return [*losses, *model.state_dict().values(), *average.values(), *kept]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 15
    assert [index for index, pair in enumerate(zip(one, other, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize(
    "overrides",
    [
        *((f"optim.name={name}", "schedule.name=constant") for name in OPTIMIZERS),
        ("train.accumulate=2", "data.augment=[pad_crop, mixup, cutmix]", "train.clip_norm=0.5"),
        ("train.precision=bf16", "train.label_smoothing=0.1"),
        ("train.precision=bf16_master", "optim.weight_decay=0.01"),
        ("optim.layer_decay=0.7", "optim.name=adamw", "train.ema=on"),
        ("train.class_weights=balanced", "train.label_smoothing=0.1", "data.augment=[pad_crop, mixup]"),
        ("optim.momentum=0", "data.augment=[{name: cutout, size: 4}, {name: rotate, degrees: 20}]"),
        ("train.distill={teacher: x, temperature: 2}", "data.augment=[mixup]", "train.accumulate=2"),
        ("train.distill={teacher: x, kind: hard}", "train.precision=bf16"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_replayed_step_equals_the_eager_step_bitwise(overrides: tuple[str, ...]) -> None:
    recipe, graphs = recipe_of(*overrides), RecordedGraphs()
    assert_equal(course(recipe, NeverCaptured()), course(recipe, graphs))
    assert len(graphs.made) == 1


def test_a_replayed_step_counts_what_is_classified_correctly() -> None:
    found = []
    for graphs in (NeverCaptured(), RecordedGraphs()):
        accuracy = BatchAccuracy(4, CPU)
        _, step = step_of(recipe_of("data.augment=[flip, mixup]", "optim.lr=0.5"), graphs, accuracy)
        plain: Any = step._eager_step
        num_draws = sum(each.num_draws for each in plain.transforms.augments) + 4 * (plain.transforms.mix is not None)
        state = TrainState()
        for number in range(STEPS):
            torch.default_generator.manual_seed(number)
            step(batch_of(number, 8, num_draws), state)
            state.advance(8)
        found.append(accuracy.pop_counts().tolist())
    assert found[0] == found[1]
    assert len(graphs.made) == 1 and sum(found[0]) == 8 * STEPS > found[0][0]


@pytest.mark.parametrize("overrides", [("train.ema=on",), ("train.ema.decay=0.9", "train.ema.every=2")])
def test_a_replayed_step_updates_the_average_as_an_eager_one(overrides: tuple[str, ...]) -> None:
    recipe, graphs = recipe_of(*overrides), RecordedGraphs()
    assert_equal(course(recipe, NeverCaptured()), course(recipe, graphs))
    assert len(graphs.made) == 1


def test_every_size_of_images_warms_up_and_has_a_graph_of_its_own() -> None:
    recipe = recipe_of()
    for sizes, num_graphs in (
        ((8,) * EAGER_STEPS, 0),
        ((8, 8, 8, 8, 10, 10, 10), 1),
        ((8, 8, 8, 8, 10, 10, 10, 10, 8), 2),
    ):
        graphs = RecordedGraphs()
        assert_equal(course(recipe, NeverCaptured(), sizes), course(recipe, graphs, sizes))
        assert len(graphs.made) == num_graphs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_on_the_device_gives_the_weights_of_one_on_the_host(name: str) -> None:
    """2e-6 of a weight: the rate is rounded to float32, and multiplying by it rounds once more in each of six steps."""
    section = load("synthetic", Patch.parse([f"optim.name={name}"])).recipe.optim

    def weights(*, on_device: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 5), nn.Linear(5, 2))
        optimizer = build_optimizer(section, model.named_parameters(), "cpu")
        assert reads_lr_on_device(optimizer)
        if on_device:
            keep_lr_on_device(optimizer)
        for lr in (0.0, 0.01, 0.03, 0.02, 0.005, 0.001):
            model(torch.ones(2, 3, 4, 4)).square().sum().backward()
            if on_device:
                for group in optimizer.param_groups:
                    group["lr"].fill_(lr * group["lr_factor"])
            else:
                set_lr(optimizer.param_groups, lr)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    on_host, on_device = weights(on_device=False), weights(on_device=True)
    torch.testing.assert_close(on_device, on_host, rtol=2e-6, atol=2e-6)
    assert not torch.equal(on_host, torch.zeros_like(on_host))


def trained(folder: Path, *overrides: str, resume: bool = False) -> RunDir:
    rundir = RunDir(folder)
    run.run(recipe_of(*overrides), World.single(), rundir, resume=resume, invocation=Invocation())
    return rundir


def losses(rundir: RunDir) -> list[float]:
    return [record["loss"] for record in read_lines(rundir.steps)]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[RecordedGraphs], RecordedGraphs]:
    """Return a function that gives a run on a CPU graphs to find, as one on a GPU finds CUDA's."""

    def give(graphs: RecordedGraphs) -> RecordedGraphs:
        monkeypatch.setattr(cuda_graphs, "build_graph_pool", lambda device: graphs)
        return graphs

    return give


def test_a_captured_run_equals_an_eager_one_and_reports_the_capture_time(tmp_path: Path, found) -> None:
    overrides = ("model.drop_path=0.3", "data.image_size=12", "data.progressive.start_size=8", "train.steps=12")
    overrides += ("data.progressive.multiple=4", "data.progressive.begin=1st", "data.progressive.end=6st")
    found(NeverCaptured())
    plain = trained(tmp_path / "plain", *overrides)
    graphs = found(RecordedGraphs())
    rundir = trained(tmp_path / "captured", *overrides)
    assert losses(rundir) == losses(plain) and len(losses(plain)) == 12
    result = rundir.read_result()
    assert result.weights_sha256 == plain.read_result().weights_sha256
    assert len(graphs.made) == 2  # of 8 and of 12 pixels
    assert result.account is not None and result.account.pauses["capture"] > 0
    assert result.stages["captured_step"].host_s > 0 and result.stages["forward"].host_s > 0


def test_a_resumed_run_is_captured_again_and_ends_with_the_same_bits(tmp_path: Path, found) -> None:
    graphs = found(RecordedGraphs())
    overrides = ("train.ema.decay=0.9", "checkpoint.every=5st", "train.steps=10", "optim.name=adamw")
    cut = trained(tmp_path / "cut", *overrides)
    sha256 = cut.read_result().weights_sha256
    (newest,) = [path for path in cut.checkpoints.iterdir() if path.name.endswith("10")]
    for path in (*newest.iterdir(), newest, cut.path / "result.json"):
        path.rmdir() if path.is_dir() else path.unlink()
    again = trained(tmp_path / "cut", *overrides, resume=True)
    assert again.read_result().weights_sha256 == sha256
    assert len(graphs.made) == 2


def test_a_model_that_synchronizes_trains_eagerly_with_a_warning(
    tmp_path: Path, found, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = found(RecordedGraphs())
    forward = resnet_cifar.ResNet.forward

    def synchronizing_forward(self: resnet_cifar.ResNet, images: Tensor) -> Tensor:
        assert images.is_meta or images.mean().item() < 1e9
        return forward(self, images)

    expected = trained(tmp_path / "expected", "train.capture=off")
    monkeypatch.setattr(resnet_cifar.ResNet, "forward", synchronizing_forward)
    rundir = trained(tmp_path / "run")
    assert len(graphs.made) == 1
    (warning,) = [record["message"] for record in read_lines(rundir.warnings)]
    assert warning == (
        "train.capture: the step cannot be captured, so steps run eagerly: RuntimeError: operation not permitted when "
        "stream is capturing (set train.capture=off)"
    )
    # The rate is in float32 on the device: the last bits of a step.
    assert losses(rundir) == pytest.approx(losses(expected), rel=1e-4)


def test_the_warning_has_the_error_of_the_step_and_not_of_the_capture(
    tmp_path: Path, found, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndsAsCuda(Recorded):
        def capture(self, work: Callable[[], Tensor]) -> Tensor:
            try:
                return super().capture(work)
            except RuntimeError:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 - as torch

    class Graphs(RecordedGraphs):
        def new_graph(self) -> Recorded:
            return EndsAsCuda()

    forward = resnet_cifar.ResNet.forward

    def synchronizing_forward(self: resnet_cifar.ResNet, images: Tensor) -> Tensor:
        try:
            {}["not kept yet"]
        except KeyError:  # the first error of all, which is none
            assert images.is_meta or images.mean().item() < 1e9
        return forward(self, images)

    found(Graphs())
    monkeypatch.setattr(resnet_cifar.ResNet, "forward", synchronizing_forward)
    (warning,) = [record["message"] for record in read_lines(trained(tmp_path / "run").warnings)]
    assert "run eagerly: RuntimeError: operation not permitted when stream is capturing (set" in warning


def test_a_loss_that_is_no_number_ends_a_captured_run_as_it_ends_a_plain_one(tmp_path: Path, found) -> None:
    graphs = found(RecordedGraphs())
    overrides = ("optim.lr=1e30", "schedule.warmup_shape=constant", "schedule.warmup_start=1e-33")
    with pytest.raises(NonFiniteLossError, match=r"^train: step 6: the loss is NaN or infinite on rank 0 of 1, at lr"):
        trained(tmp_path / "run", *overrides)
    assert len(graphs.made) == 1


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("parallel.strategy=dataparallel",), "dataparallel copies the model anew in each step"),
        (("train.on_nonfinite=skip",), "train.on_nonfinite=skip lets the host check each step before its update"),
        (("train.precision=fp64",), "the learning rate is on the device in float32, and the weights are fp64"),
        (
            ("train.precision=fp16_master",),
            "the loss scale of fp16_master depends on what the host reads after each step",
        ),
        (("train.precision=bf16_pure",), "bf16_pure keeps no weights in float32"),
        (("optim.name=rmsprop",), "RMSprop reads its learning rate on the host"),
        (("optim.implementation=foreach",), "SGD reads its learning rate on the host"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_runs_that_cannot_be_captured_have_a_note(found, overrides: tuple[str, ...], reason: str) -> None:
    found(RecordedGraphs())
    recipe = recipe_of(*overrides)
    optimizer = build_optimizer(recipe.optim, nn.Linear(3, 2).named_parameters(), "cpu")
    note = f"train.capture: steps run eagerly, since {reason} (set train.capture=off)"
    assert plan_capture(recipe.train, recipe.parallel, World.single(), CPU, optimizer) == (None, note)


def test_several_ranks_are_not_captured_and_one_has_no_note(found) -> None:
    found(RecordedGraphs())
    recipe = recipe_of()
    optimizer = build_optimizer(recipe.optim, nn.Linear(3, 2).named_parameters(), "cpu")
    capture, note = plan_capture(recipe.train, recipe.parallel, World(0, 2, 0, 2), CPU, optimizer)
    assert capture is None and "ranks wait for each other inside a step" in note
    capture, note = plan_capture(recipe.train, recipe.parallel, World.single(), CPU, optimizer)
    assert capture is not None and note == ""


def test_a_run_on_a_cpu_notes_that_it_is_not_captured(tmp_path: Path) -> None:
    assert build_graph_pool(CPU) is None
    rundir = trained(tmp_path / "run", "train.steps=1")
    notes = json.loads((rundir.path / "plan.json").read_text())["notes"]
    assert "train.capture: steps run eagerly, since a CPU has no graphs to replay (set train.capture=off)" in notes


@pytest.mark.parametrize(("mode", "instead"), [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no")])
def test_a_mode_of_torch_compile_with_graphs_of_its_own_is_refused(mode: str, instead: str) -> None:
    with pytest.raises(RecipeError, match=rf"train\.compile: {mode} captures graphs .*set train\.compile={instead}"):
        recipe_of(f"train.compile={mode}")


def test_the_graphs_of_these_tests_are_as_strict_as_cudas() -> None:
    """A capture leaves nothing behind, and what the host would give anew at each step stands still in a replay."""
    weight, on_device, on_host = torch.zeros(3), torch.ones(()), [1.0]

    def work() -> Tensor:
        for _ in range(10):
            weight.add_(torch.full((3,), on_host[0]) * on_device)
        return weight.sum()

    graph = Recorded()
    found = graph.capture(work)
    assert weight.tolist() == [0.0] * 3
    on_host[0] = 5.0
    on_device.fill_(2.0)
    graph.replay()
    assert (weight.tolist(), found.item()) == ([20.0] * 3, 60.0)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Recorded().capture(lambda: weight * weight.sum().item())

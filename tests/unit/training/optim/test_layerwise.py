"""`optim.layer_decay`: every layer learns at its own rate, with any optimizer; what has no effect is refused."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from timm import create_model
from timm.optim import param_groups_layer_decay
from torch import nn

from paceline.core.errors import RecipeError
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.optim import Adam, AdamW, Lamb, Lars, Muon, NovoGrad, OwnOptim, RmsProp, ScheduleFree, Sgd
from paceline.training.optim.build import (
    build_optimizer,
    describe_layer_decay,
    layers_for_decay,
)
from paceline.training.process import Invocation
from paceline.training.run import run

EVERY = (Sgd, Adam, AdamW, RmsProp, NovoGrad, Lars, Lamb, Muon, ScheduleFree)
DECAY = 0.5
WORDS = (
    *("data.source.num_images=32", "data.source.num_val_images=8", "data.source.image_size=8", "data.batch_size=8"),
    *("model.width=0.1", "parallel.device=cpu", "parallel.threads=1", "log.tensorboard=off", "data.workers=0"),
    *("measure.telemetry=off", "train.epochs=1", "train.ema=on", "checkpoint.every=2st", "optim.layer_decay=0.7"),
    *("log.report=off", "log.explain=off"),
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    filters = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)]
    return nn.Sequential(*filters, nn.Flatten(), nn.Linear(5 * 16, 2)).double()


def build(section, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(section, model.named_parameters(), "cpu", layers_for_decay(section, model))


def moved(section, steps: int = 1) -> dict[str, torch.Tensor]:
    """Return how far each parameter of a small network goes."""
    model = net()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build(section, model)
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_every_parameter_has_the_scale_and_the_decay_of_weights_that_timm_gives_it(name: str) -> None:
    model = create_model(name, num_classes=5)
    section = AdamW(lr=1.0, weight_decay=0.1, decay_norm_and_bias=False, layer_decay=0.65)
    groups = param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.65)
    theirs = {each: (group["lr_scale"], group["weight_decay"]) for group in groups for each in group["params"]}
    ours = {
        each: (group["lr"], group["weight_decay"])
        for group in build(section, model).param_groups
        for each in group["params"]
    }
    assert len(ours) == len(list(model.parameters())) > 50
    assert ours == theirs


@pytest.mark.parametrize("variant", EVERY)
def test_a_first_step_goes_as_far_as_the_rate_of_its_layer_says(variant) -> None:
    section = variant(weight_decay=0.01)
    whole, scaled = moved(section), moved(section.model_copy(update={"layer_decay": DECAY}))
    for name, way in whole.items():
        depth = {"0": 2, "1": 2, "2": 1, "3": 1, "5": 0}[name[0]]
        assert way.abs().max() > 0
        # A step is a difference of weights about 1, which float64 rounds at 1e-16, and the least is 1e-6 long.
        torch.testing.assert_close(scaled[name], way * DECAY**depth, rtol=1e-8, atol=1e-15)


@pytest.mark.parametrize("variant", EVERY)
def test_layers_that_learn_alike_move_as_without_layers(variant) -> None:
    section = variant(weight_decay=0.01)
    whole, alike = moved(section, steps=4), moved(section.model_copy(update={"layer_decay": 1.0}), steps=4)
    assert [name for name, way in whole.items() if not torch.equal(way, alike[name])] == []


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_the_kernels_asked_for_are_those_of_every_layer(implementation: str) -> None:
    groups = build(Sgd(layer_decay=DECAY, implementation=implementation), net()).param_groups
    assert len(groups) == 3
    assert all(bool(group["fused"]) == (implementation == "fused") for group in groups)


def test_a_users_own_optimizer_gets_the_groups_of_layers() -> None:
    optimizer = build(OwnOptim(name="torch.optim:NAdam", lr=0.4, layer_decay=DECAY), net())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.4]


def test_rates_of_norms_and_of_layers_multiply() -> None:
    optimizer = build(Sgd(lr=0.4, norm_and_bias_lr=3.0, layer_decay=DECAY), net())
    found = [(group["layer"], len(group["params"]), group["lr"]) for group in optimizer.param_groups]
    # Of each layer a weight, then the bias and the norm's two; the classifier has no norm.
    rates = [(0, 1, 0.1), (1, 1, 0.2), (2, 1, 0.4), (0, 3, 0.3), (1, 3, 0.6), (2, 1, 1.2)]
    assert [each[:2] for each in found] == [each[:2] for each in rates]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in rates], rel=1e-15)


def test_layers_that_are_not_trained_count_and_have_no_group() -> None:
    model = net()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    section = Sgd(lr=0.4, layer_decay=DECAY)
    optimizer, layers = build(section, model), layers_for_decay(section, model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.4]
    told = "optim.layer_decay: 2 layers of 3 learn, at 0.5 (layer 1) to 1 (layer 2) times the rate"
    assert describe_layer_decay(section, optimizer, layers) == told


def test_without_layers_nothing_is_told() -> None:
    model = net()
    assert layers_for_decay(Sgd(), model) == {}
    assert describe_layer_decay(Sgd(), build(Sgd(), model), {}) == ""


def test_a_network_that_trains_its_last_layer_alone_is_refused() -> None:
    frozen = net().requires_grad_(False)
    frozen[-1].requires_grad_(True)
    for model in (frozen, nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))):
        with pytest.raises(RecipeError, match=r"^optim.layer_decay: 0.5 has no effect.*\(set optim.layer_decay=off\)$"):
            layers_for_decay(Sgd(layer_decay=DECAY), model)


def train(folder: Path, *words: str, resume: bool = False) -> tuple[RunResult, str]:
    """Train in `folder`; return the result, and all that the plan tells."""
    recipe = load("synthetic", Patch.parse([*WORDS, *words])).recipe
    told: list[str] = []

    class Told:
        def started(self, plan, step) -> None:
            told.extend(plan.notes)

        def __getattr__(self, name):
            return lambda *given: None

    result = run(recipe, World.single(), RunDir(folder), resume=resume, invocation=Invocation(listeners=[Told()]))
    return result, "\n".join(told)


@pytest.mark.parametrize("name", ["adamw", "muon", "schedule_free"])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path: Path, name: str) -> None:
    words = [f"optim.name={name}", "schedule.name=constant", 'train.class_weights={"1": 3}']
    words += ["train.ema=off"] if name == "schedule_free" else []
    whole, told = train(tmp_path / "whole", *words)
    assert re.search(r"optim.layer_decay: 10 layers of 10 learn, at 0.0404 \(layer 0\) to 1 \(layer 9\)", told)
    assert "train.class_weights: from " in told
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    (tmp_path / "parts" / "result.json").unlink()
    saves = sorted((tmp_path / "parts" / "checkpoints").glob("step-*"))
    assert len(saves) == 2
    shutil.rmtree(saves[-1])
    resumed, _ = train(tmp_path / "parts", *words, resume=True)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert (resumed.eval, resumed.ema) == (whole.eval, whole.ema) and whole.ema is not None
    other, _ = train(tmp_path / "other", *words, "optim.layer_decay=off")
    assert other.weights_sha256 != whole.weights_sha256

"""An optimizer goes on with the same bits, wherever it keeps its numbers; what cannot be kept is told."""

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.schema import optim as schema
from paceline.recipe.schema.optim import Constant, OwnOptim
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, load_tensor_group, model_tensors, read_state
from paceline.training.lr_schedule import build_lr_schedule
from paceline.training.optim.build import build_optimizer
from paceline.training.optim.extra_state import ExtraOptimizerState
from paceline.training.precision import Precision
from paceline.training.saver import TrainingState
from paceline.training.state import TrainState


class Counting(torch.optim.Optimizer):
    """SGD that keeps numbers of every kind in groups and state, and moves by all of them."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "k": 0, "longest": 0.0, "last": [0, None], "past": []})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["share"] = group.get("share", torch.ones(())) * 0.5
            group["past"] = [*group["past"], group["k"]]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["word"] = "even" if state["step"] % 2 == 0 else "odd"
                state["wide"] = state.get("wide", torch.zeros((), dtype=torch.float64)) + 1 / 3
                group["longest"] = max(group["longest"], parameter.grad.abs().max().item())
                factor = group["k"] * state["step"] * len(group["past"]) * group["longest"] * state["wide"].item()
                parameter.add_(parameter.grad * group["share"], alpha=-group["lr"] * factor)
            group["last"] = [group["k"], None]


class Keeping(torch.optim.SGD):
    """SGD that keeps, wherever it is told to, something else than numbers."""

    def __init__(self, groups, lr, where, what):
        super().__init__(groups, lr)
        self.where, self.what = where, {"deque": deque([1]), "infinity": float("inf"), "number": 1}[what]

    def step(self):
        match self.where:
            case "state":
                self.state[self.param_groups[0]["params"][0]]["past"] = self.what
            case "group":
                self.param_groups[0]["past"] = self.what
            case "nowhere":
                self.state["all"] = {"past": self.what}


def run(section, seed: int) -> TrainingState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = build_optimizer(section, model.named_parameters(), "cpu")
    schedule = build_lr_schedule(Constant(), SimpleNamespace(peak_lr=0.1, steps=lambda duration: 0))
    extra_state = ExtraOptimizerState.from_optimizer(optimizer, section.name)
    precision = Precision("cpu", torch.float32)
    return TrainingState(model, optimizer, schedule, precision, None, SingleDevice(), extra_state)


def train(live: TrainingState, first: int) -> None:
    for step in range(first, first + 3):
        torch.manual_seed(step)
        live.optimizer.zero_grad()
        live.model(torch.randn(8, 4)).square().mean().backward()
        live.optimizer.step()


def saved(live: TrainingState, folder: Path) -> Path:
    return CheckpointStorage(folder, KeepPolicy(1)).save(3, 3, live.state_dict(TrainState(), {}))


def weights(live: TrainingState) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model_tensors(live.model).items()}


@pytest.mark.parametrize("name", ["torch.optim:NAdam", "torch.optim:ASGD", "timm.optim:AdamP", "timm.optim:Adan",
                                  "timm.optim:Lamb", "timm.optim:Lars", "timm.optim:NvNovoGrad",
                                  "timm.optim:Adafactor", f"{__name__}:Counting"])  # fmt: skip
@pytest.mark.parametrize("decay", [True, False], ids=["one group", "two groups"])
def test_an_own_optimizer_goes_on_with_the_same_bits(tmp_path: Path, name: str, decay: bool) -> None:
    pytest.importorskip(name.partition(".")[0], reason="not installed")
    section = OwnOptim(name=name, lr=0.01, weight_decay=0.1, decay_norm_and_bias=decay)
    whole, other = run(section, 0), run(section, 1)
    train(whole, 0)
    path = saved(whole, tmp_path)
    train(whole, 3)
    other.model.load_state_dict(load_tensor_group(path, "model"))
    other.load_state_dict(path)
    train(other, 3)
    assert all(torch.equal(each, weights(other)[key]) for key, each in weights(whole).items())
    again = saved(whole, tmp_path / "a"), saved(other, tmp_path / "b")
    assert read_state(again[0]) == read_state(again[1])  # what was counted on, too


def test_numbers_are_written_as_json_with_their_types(tmp_path: Path) -> None:
    live = run(OwnOptim(name=f"{__name__}:Counting", lr=0.01), 0)
    train(live, 0)
    text = (saved(live, tmp_path) / "state.json").read_text()
    held = json.loads(text)["optimizer"]
    assert held["state"]["3"] == {"step": 3, "word": "odd"}
    (group,) = held["groups"]
    assert (group["k"], group["last"], group["past"]) == (3, [3, None], [1, 2, 3])
    assert set(group) == {"k", "longest", "last", "past"}, "options that have not moved are the recipe's"


@pytest.mark.parametrize(
    ("where", "what", "says"),
    [
        ("state", "deque", "keeps 'past' as deque, which a checkpoint cannot hold (keep a tensor, a finite number or"),
        ("group", "infinity", "keeps 'past' as float, which a checkpoint cannot hold (keep a tensor, a finite number"),
        ("nowhere", "number", "keeps 'all' in its state, which is no parameter (keep it in the state of one, or in a"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_told_in_one_line(where, what, says) -> None:
    name = f"{__name__}:Keeping"
    live = run(OwnOptim(name=name, lr=0.1, args={"where": where, "what": what}), 0)
    live.state_dict(TrainState(), {})
    train(live, 0)
    with pytest.raises(RecipeError) as caught:
        live.state_dict(TrainState(), {})
    assert str(caught.value).startswith(f"optim.name: {name} {says}")


OURS = {
    "momentum_buffer": schema.Sgd,
    "step exp_avg exp_avg_sq": schema.AdamW,
    "step square_avg": schema.RmsProp,
    "mean square": schema.NovoGrad,
    "momentum": schema.Lars,
    "mean square updates": schema.Lamb,
    "iterate lr_max iterates": schema.ScheduleFree,
}


@pytest.mark.parametrize(("keys", "variant"), OURS.items())
def test_a_checkpoint_of_any_other_optimizer_holds_tensors_of_parameters_alone(tmp_path: Path, keys, variant) -> None:
    live, other = run(variant(), 0), run(variant(), 1)
    train(live, 0)
    other.load_state_dict(saved(live, tmp_path))
    train(other, 3)
    for each in (live, other):
        snapshot = each.state_dict(TrainState(), {})
        assert "optimizer" not in snapshot.values
        numbers, names = zip(*(name.split(".") for name in snapshot.tensors["optimizer"]), strict=True)
        assert set(numbers) <= set("0123") and set(names) == set(keys.split())


def test_an_option_that_does_not_move_may_be_anything() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": net.parameters(), "lr_factor": 1.0, "how": lambda each: each, "of": deque([1])}], 0.1
    )
    extra_state = ExtraOptimizerState.from_optimizer(optimizer, "torch.optim:SGD")
    assert extra_state.values() == {}
    optimizer.param_groups[0]["of"].append(2)
    with pytest.raises(RecipeError, match="keeps 'of' as deque"):
        extra_state.values()

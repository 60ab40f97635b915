"""Checkpoints: whole or not at all, damage found, nothing unpickled, names without wrappers."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import CheckpointError
from paceline.train.checkpoint import (
    Checkpoints,
    Snapshot,
    load_model,
    load_optimizer,
    load_part,
    model_tensors,
    optimizer_tensors,
    read_state,
    verify,
    weights_sha256,
)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        torch.optim.SGD(model.parameters(), 0.1),
        torch.optim.AdamW(model.parameters(), 0.01),
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **parts: object) -> Snapshot:
    moved = optimizer_tensors(optimizer or optimizers(model)[0])
    return Snapshot({"model": model_tensors(model), "optimizer": moved, **parts}, {"train": {"hits": 1}})


def save(folder: Path, step: int = 1, best_step: int = -1, keep: int = 3, model: nn.Module | None = None) -> Path:
    return Checkpoints(folder, keep).save(step, best_step, snapshot(model or net()))


def sha256(model: nn.Module) -> str:
    return weights_sha256(model_tensors(model))


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["sgd with momentum", "sgd", "adamw"])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path, kind: int) -> None:
    model = net()
    optimizer = optimizers(model)[kind]
    torch.manual_seed(3)
    train(model, optimizer, 3)
    path = Checkpoints(tmp_path, 3).save(3, 3, snapshot(model, optimizer))
    torch.manual_seed(4)
    train(model, optimizer, 3)

    other = net(seed=9)
    resumed = optimizers(other)[kind]
    load_model(path, other)
    load_optimizer(resumed, load_part(path, "optimizer"))
    torch.manual_seed(4)
    train(other, resumed, 3)
    assert sha256(other) == sha256(model)


def test_the_digest_sees_parameters_and_buffers() -> None:
    model = net()
    before = sha256(model)
    assert sha256(net()) == before
    model[1].running_mean[0] += 1
    assert sha256(model) != before
    assert sha256(net(seed=1)) != before


def test_values_and_further_parts_come_back(tmp_path: Path) -> None:
    average = {"0.weight": torch.randn(4, 3, 3, 3), "updates": torch.tensor(7)}
    path = Checkpoints(tmp_path, 3).save(1, 1, snapshot(net(), average=average))
    assert read_state(path) == {"format_version": 2, "train": {"hits": 1}}
    loaded = load_part(path, "average")
    assert loaded.keys() == average.keys() and all(torch.equal(loaded[name], average[name]) for name in average)
    assert load_part(path, "precision") == {}
    verify(path)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_in_part(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(*(compiled(child) for child in model))


WRAPPERS = [compiled, compiled_in_part, nn.DataParallel, DistributedDataParallel]
WRAPPERS += [lambda model: DistributedDataParallel(compiled(model))]
WRAPPERS += [lambda model: compiled(DistributedDataParallel(compiled_in_part(model)))]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["compiled", "parts", "dp", "ddp", "ddp of compiled", "all"])
@pytest.mark.usefixtures("group_of_one")
def test_names_are_the_models_own_whatever_wraps_it(tmp_path: Path, wrap) -> None:
    wrapped = wrap(net())
    tensors = model_tensors(wrapped)
    assert list(tensors) == list(net().state_dict())
    path = Checkpoints(tmp_path, 3).save(1, 1, Snapshot({"model": tensors, "optimizer": {}}, {}))
    plain, other = net(seed=1), wrap(net(seed=2))
    load_model(path, plain)
    load_model(path, other)
    assert sha256(plain) == sha256(other) == sha256(net())


class Inside(nn.Module):
    """A model with a part called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_a_part_that_is_called_module_keeps_its_name() -> None:
    assert list(model_tensors(Inside())) == ["module.weight", "module.bias"]


def test_no_temporary_is_left_and_one_left_by_a_kill_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".step-00000005.tmp").mkdir()
    assert Checkpoints(tmp_path, 3).newest() is None
    path = save(tmp_path, step=5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000005"]
    assert Checkpoints(tmp_path, 3).newest() == path


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, best_step=2, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "average.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    path = Checkpoints(tmp_path, 3).save(1, 1, snapshot(net(), average={"a": torch.ones(3)}))
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_model(path, net())
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_manifest_that_lists_nothing_vouches_for_nothing(tmp_path: Path) -> None:
    path = save(tmp_path)
    for text in ("{}", "[]", "null"):
        (path / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest.json does not list"):
            verify(path)


def test_tensors_that_the_manifest_does_not_list_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / "average.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"does not list average.safetensors"):
        verify(path)


def test_the_optimizers_state_comes_back_in_the_layout_of_its_parameters() -> None:
    model = net().to(memory_format=torch.channels_last)
    optimizer = optimizers(model)[0]
    train(model, optimizer, 1)
    resumed = optimizers(model)[0]
    load_optimizer(resumed, {name: each.contiguous() for name, each in optimizer_tensors(optimizer).items()})
    for parameter, values in resumed.state.items():
        assert values["momentum_buffer"].stride() == parameter.stride()
    assert len(resumed.state) == 6


def test_the_optimizers_state_keeps_its_precision_beside_narrower_weights() -> None:
    model = nn.Linear(3, 3, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    exact = {"0.momentum_buffer": torch.full((3, 3), 1.0 + 2**-20)}
    load_optimizer(optimizer, exact)
    assert torch.equal(optimizer_tensors(optimizer)["0.momentum_buffer"], exact["0.momentum_buffer"])


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    path = save(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        load_model(path, nn.Sequential(nn.Linear(2, 2)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("version", "fix"), [(99, "update paceline"), (1, "train it again"), (None, "train it again")])
def test_another_format_is_refused(tmp_path: Path, version: int | None, fix: str) -> None:
    path = save(tmp_path)
    (path / "state.json").write_text(json.dumps({"format_version": version}))
    with pytest.raises(CheckpointError, match=rf"has format {version}, this paceline reads 2 \({fix}\)"):
        read_state(path)


def test_a_pickle_in_place_of_the_weights_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (canary,)  # type: ignore[return-value]

    path = save(tmp_path / "run")
    (path / "model.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        load_model(path, net())
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        load_part(path, "model")
    assert not canary.exists()

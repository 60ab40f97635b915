"""Batch norm over ranks where there is one, and how a model's layers are replaced."""

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.parallel.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm

CPU = torch.device("cpu")


class SharedNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.1, momentum=None))
        self.head = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(images).mean((2, 3)))


def test_every_batch_norm_is_replaced_and_nothing_else_changes() -> None:
    model = SharedNorms()
    model.stem[1].eval()
    model.stem[1].weight.requires_grad_(False)
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    names = list(model.state_dict())
    assert convert_sync_batch_norm(model, CPU) is model
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert list(model.state_dict()) == names and after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    norms = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    assert [(norm.eps, norm.momentum, norm.affine, norm.training) for norm in norms] == [
        (0.1, None, True, False),
        (1e-5, 0.1, False, True),
    ]
    assert not any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in model.modules())


def test_a_model_that_is_a_batch_norm_is_replaced() -> None:
    norm = nn.BatchNorm2d(3)
    made = convert_sync_batch_norm(norm, CPU)
    assert isinstance(made, SyncBatchNorm) and made.weight is norm.weight


def test_one_rank_equals_torchs_batch_norm_bitwise() -> None:
    torch.manual_seed(0)
    model = SharedNorms()
    other = SharedNorms()
    other.load_state_dict(model.state_dict())
    convert_sync_batch_norm(other, CPU)
    for is_training in (True, True, False):
        images = torch.randn(6, 3, 2, 2)
        outputs = [each.train(is_training)(images) for each in (model, other)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    gradients = [[each.grad for each in network.parameters()] for network in (model, other)]
    assert len(gradients[0]) == 6 and all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


class Activated(nn.BatchNorm2d):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).relu()


def test_a_subclass_that_does_more_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Activated(3)))
    with pytest.raises(
        RecipeError,
        match=r"^model.norm: sync_batch cannot replace 1.0 \(Activated\), which does more .* \(set model.norm=",
    ):
        convert_sync_batch_norm(model, CPU)
    assert type(model[0]) is nn.BatchNorm2d


def test_gpus_use_torchs_sync_batch_norm() -> None:
    model = convert_sync_batch_norm(SharedNorms(), torch.device("cuda", 0))
    assert len([module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]) == 2

"""Checkpointed activations: gradients, running statistics and random numbers have the same bits as without."""

import pytest
import torch
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.models.activations import checkpoint_activations
from paceline.models.build import build_model
from paceline.models.structure import find_blocks
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.model import Model


def trained(name: str, size: int, *, is_checkpointed: bool, **fields: object) -> list[Tensor | None]:
    """Return loss, gradients and buffers after two steps."""
    section = Model(name=name, checkpoint_activations=is_checkpointed, **fields)
    torch.manual_seed(0)
    model = build_model(section, num_classes=5, channels=3, image_size=size).train()
    checkpoint_activations(section, model)
    torch.manual_seed(1)
    images = torch.randn(2, 3, size, size)
    for _ in range(2):
        loss = model(images).square().sum()
        loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters()), *model.buffers()]


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        ("resnet18_cifar", 8),
        ("torchvision:resnet18", 8),
        ("torchvision:densenet121", 61),
        ("torchvision:swin_t", 15),
        ("timm:vit_tiny_patch16_224", 12),
        ("timm:resnet18", 8),
        ("timm:convnext_atto", 12),
    ],
)
def test_bits_are_equal_and_all_blocks_are_checkpointed(name: str, num_blocks: int) -> None:
    has_drop_path = name not in ("torchvision:densenet121", "torchvision:resnet18")
    fields = {"drop_path": 0.2} if has_drop_path else {}  # which draws random numbers
    size = 16 if name == "resnet18_cifar" else 64  # it has four times as many pixels as others in each layer
    plain = trained(name, size, is_checkpointed=False, **fields)
    again = trained(name, size, is_checkpointed=True, **fields)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    with torch.device("meta"):
        model = build_model(Model(name=name), num_classes=5, channels=3, image_size=64)
    assert len(find_blocks(model)) == num_blocks


def test_fewer_tensors_are_kept_for_the_backward_pass() -> None:
    def kept_bytes(is_checkpointed: bool) -> int:
        section, sizes = Model(name="timm:test_vit", checkpoint_activations=is_checkpointed), []
        model = build_model(section, num_classes=5, channels=3, image_size=96)
        checkpoint_activations(section, model)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda kept: sizes.append(kept.nbytes) or kept, lambda kept: kept
        ):
            model(torch.randn(4, 3, 96, 96))
        return sum(sizes)

    assert kept_bytes(True) < kept_bytes(False) / 4


def test_a_model_without_blocks_and_what_does_not_work_with_it_are_one_line() -> None:
    section = Model(name="torchvision:vgg11", checkpoint_activations=True)
    with torch.device("meta"):
        model = build_model(section, num_classes=5, channels=3)
    with pytest.raises(
        RecipeError, match=r"^model.checkpoint_activations: true has no effect on torchvision:vgg11, which"
    ):
        checkpoint_activations(section, model)
    for setting in ("train.compile=default", "parallel.strategy=dataparallel"):
        words = ["model.checkpoint_activations=true", setting]
        with pytest.raises(RecipeError, match=rf"^model.checkpoint_activations: true does not work with {setting} "):
            load("synthetic", Patch.parse(words))

"""Models that do not fit are refused before anything is allocated."""

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.models.validate import (
    check_memory_format,
    check_model,
    choose_memory_format,
    find_overflowing_convolutions,
)
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model


def plan(*, batch: int = 4, size: int = 32, start_size: int = 32, eval_size: int = 32) -> Plan:
    """Return a plan of one rank that computes `batch` images at once."""
    return Plan(
        world_size=1,
        batch_size=batch,
        rank_batch=batch,
        micro_batch=batch,
        eval_batch=batch,
        train_images=batch,
        val_images=batch,
        num_classes=3,
        channels=3,
        image_size=size,
        eval_image_size=eval_size,
        train_sizes=((0, size),) if start_size == size else ((0, start_size), (1, size)),
        steps_per_epoch=1,
        dropped_images=0,
        total_steps=1,
        eval_every=0,
        checkpoint_every=0,
        checkpoint_every_s=0.0,
        checkpoint_keep_every=0,
        check_replicas_every=0,
        log_every=0,
        peak_lr=0.1,
        lr_sentence="",
    )


@pytest.mark.parametrize("name", ["resnet18_cifar", "speednet96", "torchvision:resnet18", "torchvision:regnet_y_400mf"])
def test_a_network_that_fits_passes_and_draws_nothing(name):
    before = torch.get_rng_state()
    check_model(Model(name=name), plan())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "options", "taken", "reason"),
    [
        ("speednet94", {"size": 8, "start_size": 8}, "4x3x8x8", "Output size is too small"),
        ("speednet94", {"start_size": 8}, "4x3x8x8", "Output size is too small"),
        ("speednet94", {"batch": 2, "eval_size": 7}, "2x3x7x7", "Output size is too small"),
        ("torchvision:resnet18", {"batch": 1}, "1x3x32x32", "Expected more than 1 value per channel when training"),
        ("timm:vit_tiny_patch16_224", {"eval_size": 48}, "4x3x48x48", "Input height (48) doesn't match model (32)"),
    ],
)
def test_images_that_do_not_fit_are_one_line(name, options, taken, reason):
    with pytest.raises(RecipeError) as caught:
        check_model(Model(name=name), plan(**options))
    size = 224 if ":" in name else 32
    assert str(caught.value).startswith(f"model.name: {name}, made for {size} px, cannot take a batch of {taken}: ")
    assert "data.image_size" in str(caught.value)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["timm:vit_tiny_patch16_224", "timm:swin_tiny_patch4_window7_224", "torchvision:vit_b_16"]
)
def test_a_transformer_is_built_for_the_size_of_the_images(name):
    check_model(Model(name=name), plan(size=64, start_size=64, eval_size=64))


def test_channels_last_is_refused_only_by_name_and_only_without_convolutions():
    section = Model(name="timm:flat", memory_format="channels_last")
    with pytest.raises(RecipeError) as caught:
        check_memory_format(section, nn.Linear(3, 3))
    assert str(caught.value) == (
        "model.memory_format: channels_last has no effect on timm:flat, which has no 2-D convolution "
        "(set model.memory_format=contiguous)"
    )
    check_memory_format(section, nn.Conv2d(3, 3, 1))
    check_memory_format(Model(name="timm:flat"), nn.Linear(3, 3))


def test_the_layout_is_checked_with_the_rest():
    with pytest.raises(RecipeError, match=r"^model\.memory_format: channels_last has no effect on timm:naflexvit"):
        check_model(Model(name="timm:naflexvit_base_patch16_gap", memory_format="channels_last"), plan())


def conv(inputs: int = 15, **options: Any) -> nn.Conv2d:
    """Return a 1x1 convolution with a stride of 2, by default."""
    return nn.Conv2d(inputs, 16, **{"kernel_size": 1, "stride": 2, "device": "meta", **options})


OVERFLOWS = [conv(), conv(1), conv(stride=(1, 2)), conv(stride=3), conv(padding="valid")]
SOUND = [
    conv(16), conv(stride=1), conv(kernel_size=3, padding=1), conv(kernel_size=(1, 3)), conv(padding=1),
    conv(8, groups=8), nn.Linear(3, 3),
]  # fmt: skip


@pytest.mark.parametrize("layer", OVERFLOWS, ids=str)
def test_a_gradient_that_overflows_its_buffer_is_named(layer: nn.Module) -> None:
    assert find_overflowing_convolutions(nn.Sequential(nn.ReLU(), nn.Sequential(layer))) == ("1.0",)


@pytest.mark.parametrize("layer", SOUND, ids=str)
def test_other_gradients_are_sound(layer: nn.Module) -> None:
    assert find_overflowing_convolutions(nn.Sequential(layer)) == ()


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("width", "name", "device", "layout"),
    [
        (0.2344, "auto", CPU, torch.contiguous_format),  # 15 channels
        (0.25, "auto", CPU, torch.channels_last),  # 16 channels
        (0.05, "auto", GPU, torch.channels_last),
        (0.05, "channels_last", CPU, torch.channels_last),  # refused where it is trained
        (1.0, "contiguous", CPU, torch.contiguous_format),
    ],
)
def test_auto_is_contiguous_on_a_cpu_where_a_gradient_overflows(width, name, device, layout) -> None:
    section = Model(name="resnet18_cifar", width=width, memory_format=name)
    before = torch.get_rng_state()
    assert choose_memory_format(section, device, num_classes=10, channels=3) is layout
    assert torch.equal(torch.get_rng_state(), before)


def test_channels_last_and_compiling_are_refused_where_a_gradient_overflows() -> None:
    narrow = Model(name="resnet18_cifar", width=0.1)
    asked = narrow.model_copy(update={"memory_format": "channels_last"})
    check_model(narrow, plan(), fp32_on_cpu=True)
    check_model(asked, plan(), half_on_cpu="bf16")
    check_model(asked, plan())
    where = r"corrupts memory on a CPU, in the gradient of \S+, a 1x1 convolution of 6 channels"
    with pytest.raises(RecipeError, match=rf"^model\.memory_format: channels_last {where}.*memory_format=auto\)$"):
        check_model(asked, plan(), fp32_on_cpu=True)
    with pytest.raises(RecipeError, match=rf"^train\.compile: default {where}.*set train\.compile=off\)$"):
        check_model(narrow, plan(), fp32_on_cpu=True, compile_mode="default")
    frozen = asked.model_copy(update={"freeze": "backbone"})
    check_model(frozen, plan(), fp32_on_cpu=True)
    wide = Model(name="resnet18_cifar", width=0.25, memory_format="channels_last")
    check_model(wide, plan(), fp32_on_cpu=True, compile_mode="default")


def test_a_model_that_cannot_be_built_is_channels_last() -> None:
    section = Model(name="torchvision:no_such_network")
    assert choose_memory_format(section, CPU, num_classes=10, channels=3) is torch.channels_last


def test_strides_over_a_map_are_refused_in_16_bits_on_a_cpu() -> None:
    """From 8 px torchvision's ResNets come to maps of 1 px before their last stride."""
    small = plan(size=8, start_size=8, eval_size=8)
    refused = r"train\.precision: bf16 on a CPU .* stride of 2 meets a map of 1 px \(set train\.precision=fp32"
    with pytest.raises(RecipeError, match=refused):
        check_model(Model(name="torchvision:resnet18"), small, half_on_cpu="bf16")
    check_model(Model(name="torchvision:resnet18"), small)  # nothing is left of the look
    check_model(Model(name="torchvision:resnet18"), plan(eval_size=8), half_on_cpu="bf16")  # judging has no gradient
    check_model(Model(name="resnet18_cifar", width=0.1), small, half_on_cpu="bf16")
    check_model(Model(name="timm:tf_efficientnet_b0"), plan(), half_on_cpu="bf16")  # pads before it convolves

"""`model.lora` adds peft's adapters to the layers that a model calls; merged, they give a plain model's weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.models import lora
from paceline.models.build import build_model
from paceline.models.lora import add_adapters, describe_adapters, merge_adapters
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model

pytest.importorskip("peft", reason="not installed: pip install 'paceline[lora]'")
VIT = "timm:test_vit"


def plan_of(num_classes: int = 5, size: int = 32) -> Plan:
    sizes = {"num_classes": num_classes, "channels": 3, "image_size": size}
    return Plan(**{name: sizes.get(name, 0) for name in Plan.__dataclass_fields__})  # type: ignore[arg-type]


def section_of(name: str = VIT, **fields: Any) -> Model:
    return Model(name=name, lora=fields)


def vit(section: Model | None = None, seed: int = 0) -> nn.Module:
    """Return a new model, with adapters if a section is given."""
    torch.manual_seed(0)
    model = build_model(Model(name=VIT), num_classes=5, channels=3, image_size=32)
    if section:
        add_adapters(section, model, plan_of(), seed)
    return model.eval()


def images() -> Tensor:
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def randomized(model: nn.Module) -> nn.Module:
    """Return the model with random numbers in the second matrix of each adapter."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def test_only_adapters_and_the_classifier_are_trained_and_logits_do_not_change_at_first() -> None:
    plain, adapted = vit(), vit(section_of(rank=4))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    adapters = {name for name in trained if ".lora_A." in name or ".lora_B." in name}
    assert trained - adapters == {"head.weight", "head.bias"} and len(adapters) == 2 * 4 * 6
    assert torch.equal(plain(images()), adapted(images()))


@pytest.mark.parametrize("fields", [{"rank": 4}, {"rank": 3, "alpha": 7, "targets": ("*.qkv", "*.fc?")}])
def test_the_merged_model_is_peft_s_and_has_the_same_logits(fields: dict[str, Any]) -> None:
    section = section_of(**fields)
    adapted, plain = randomized(vit(section)), vit()
    expected = adapted(images())
    merged = merge_adapters(section.lora, adapted.state_dict())
    plain.load_state_dict(merged)
    assert (plain(images()) - expected).abs().max() < 1e-5  # another order of sums
    assert (vit()(images()) - expected).abs().max() > 1e-2
    layers = [(name, each) for name, each in adapted.named_modules() if hasattr(each, "get_delta_weight")]
    assert layers
    for name, layer in layers:
        layer.merge()
        assert (layer.base_layer.weight - merged[f"{name}.weight"]).abs().max() < 1e-6


def test_a_layer_whose_name_is_the_end_of_another_is_meant_alone() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.block = nn.Linear(12, 6), nn.ModuleDict({"proj": nn.Linear(6, 6)})
            self.head = nn.Linear(6, 5)

        def forward(self, pixels: Tensor) -> Tensor:
            return self.head(self.block["proj"](self.proj(pixels.flatten(1))).relu())

    model, section = Nested(), section_of("parts:Nested", targets=("proj",))
    add_adapters(section, model, plan_of(size=2), 0)
    assert {name.partition(".lora_")[0] for name in model.state_dict() if ".lora_" in name} == {"proj"}


def test_initial_adapters_come_from_the_seed_alone() -> None:
    def firsts(seed: int, global_seed: int) -> list[Tensor]:
        model = vit()
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        add_adapters(section_of(), model, plan_of(), seed)
        assert torch.equal(torch.get_rng_state(), state)
        return [parameter for name, parameter in model.named_parameters() if ".lora_A." in name]

    one = firsts(3, 0)
    assert all(map(torch.equal, one, firsts(3, 7))) and not any(map(torch.equal, one, firsts(4, 0)))
    bound = 1 / 64**0.5  # Kaiming uniform with a = sqrt(5), of 64 inputs
    assert 0.9 * bound < one[0].abs().max() <= bound


def test_the_note_counts_what_is_trained() -> None:
    section = section_of(rank=2)
    note, adapted = describe_adapters(section, vit(), plan_of()), vit(section)
    numbers = [(each.requires_grad, each.numel()) for each in adapted.parameters()]
    trained, total = sum(number for is_trained, number in numbers if is_trained), sum(number for _, number in numbers)
    assert "24 layers" in note and f"{trained:,} parameters of {total:,}" in note


@pytest.mark.parametrize(("name", "size"), [("torchvision:vit_b_32", 224), ("torchvision:swin_t", 224)])
def test_layers_whose_weights_are_used_without_calling_them_get_no_adapter(name: str, size: int) -> None:
    """torch's MultiheadAttention and torchvision's Swin would not compute an adapter beside their projections."""
    with torch.device("meta"):
        model = build_model(Model(name=name), num_classes=5, channels=3, image_size=size)
    assert "layers of torchvision" in describe_adapters(section_of(name), model, plan_of(size=size))
    pattern = "*.out_proj" if "vit" in name else "*.qkv"
    with pytest.raises(RecipeError, match=r"model\.lora\.targets: '\*\.\w+' matches '.*mlp"):
        describe_adapters(section_of(name, targets=(pattern,)), model, plan_of(size=size))


def test_errors_name_field_and_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=r"model\.lora\.targets: '\*\.qkw' .*qkv"):
        vit(section_of(targets=("*.qkw",)))
    resnet = build_model(Model(width=0.125), num_classes=5, channels=3)
    with pytest.raises(RecipeError, match=r"model\.lora: resnet18_cifar .*model\.lora=off"):
        add_adapters(section_of("resnet18_cifar"), resnet, plan_of(), 0)
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"model\.lora: .*paceline\[lora\]"):
        vit(section_of())

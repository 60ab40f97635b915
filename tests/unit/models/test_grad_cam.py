"""Maps of images: CAM for a linear head, the deciding corner for every family, and nothing changed in the model."""

import math

import pytest
import timm
import torch
from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer

from paceline.core.errors import RecipeError
from paceline.models.activations import checkpoint_activations
from paceline.models.grad_cam import FeatureGrid, choose_layer, grad_cam, occlusion_maps
from paceline.recipe.schema.model import Model

SIZE = 32


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: these models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pooled(channels: int = 3) -> nn.Sequential:
    """Return a model of convolutions that change features in place, average pooling, and a linear layer."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def timm_vit(**options: object) -> nn.Module:
    model = timm.models.vision_transformer.VisionTransformer
    return model(img_size=SIZE, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=2, **options)


FAMILIES = {
    "convolutions": (pooled, "1"),
    "timm ViT": (timm_vit, "blocks.1.norm1"),
    "timm ViT, registers": (lambda: timm_vit(reg_tokens=4), "blocks.1.norm1"),
    "timm ViT, average pooling": (lambda: timm_vit(global_pool="avg", class_token=False), "norm"),
    "DeiT": (
        lambda: timm.models.deit.VisionTransformerDistilled(
            img_size=SIZE, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=2
        ),
        "blocks.1.norm1",
    ),
    "timm Swin": (
        lambda: timm.models.swin_transformer.SwinTransformer(
            img_size=SIZE, patch_size=2, embed_dim=16, depths=(1, 1), num_heads=(1, 2), window_size=4, num_classes=2
        ),
        "norm",
    ),
    "torchvision ViT": (
        lambda: VisionTransformer(
            image_size=SIZE, patch_size=4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=2
        ),
        "encoder.layers.encoder_layer_1.ln_1",
    ),
    "torchvision Swin": (
        lambda: SwinTransformer([2, 2], 16, [1, 1], [1, 2], [4, 4], num_classes=2, stochastic_depth_prob=0.1),
        "permute",
    ),
}


def corner_batch(number: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise [N, 3, 32, 32] with a patch in the lower right corner, whose color is the class, and labels."""
    images = 0.2 * torch.randn(number, 3, SIZE, SIZE, generator=draw)
    labels = torch.arange(number) % 2
    for label in (0, 1):
        images[labels == label, label, 24:, 24:] += 2.0
    return images, labels


@pytest.mark.parametrize("family", FAMILIES)
def test_the_map_of_a_class_lies_where_its_images_differ(family: str) -> None:
    build, expected_layer = FAMILIES[family]
    torch.manual_seed(0)
    model, draw = build(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        images, labels = corner_batch(16, draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    model.requires_grad_(False)
    images, labels = corner_batch(8, draw)
    assert (model.eval()(images).argmax(dim=1) == labels).all(), "the model has learned"
    layer = choose_layer(model, images[:2])
    assert layer[0] == expected_layer
    if layer[1].layout == "tokens":
        maps = occlusion_maps(model, images, labels[:, None], is_multi_label=False)[:, 0]
    else:
        maps = grad_cam(model, images, labels[:, None], layer)[:, 0]
    side = maps.shape[-1]
    share = maps[:, side // 2 :, side // 2 :].sum(dim=(1, 2)) / maps.sum(dim=(1, 2))
    assert share.mean() > 0.6, share  # of a quarter of the area


def test_a_linear_head_on_pooled_features_gives_cam() -> None:
    torch.manual_seed(0)
    model, images = pooled().requires_grad_(False), torch.randn(3, 3, SIZE, SIZE)
    classes = torch.tensor([[0, 1], [1, 0], [1, 1]])
    layer = choose_layer(model, images)
    features = model.eval()[:2](images)
    cam = torch.einsum("nmc,nchw->nmhw", model[4].weight[classes], features).relu() / features[0, 0].numel()
    torch.testing.assert_close(grad_cam(model, images, classes, layer), cam)


def test_the_model_its_mode_and_the_random_state_stay_as_they_are() -> None:
    model, images = pooled(), torch.randn(2, 3, SIZE, SIZE)
    model.train()[1].eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    modes, state = [each.training for each in model.modules()], torch.get_rng_state()
    with torch.inference_mode():
        grad_cam(model, images, torch.tensor([[0], [1]]), choose_layer(model, images))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert [each.training for each in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None and each.requires_grad for each in model.parameters())
    assert not any(each._forward_hooks for each in model.modules())


@pytest.mark.parametrize("layer", ["auto", "layer3.0.conv1"])
def test_checkpointed_activations_do_not_change_a_map(layer: str) -> None:
    """Backward computes the blocks after the layer again, or the block that it is in."""
    model = timm.create_model("resnet18", num_classes=5, zero_init_last=False).eval()
    images, classes = torch.randn(2, 3, 64, 64), torch.tensor([[0, 1], [2, 0]])
    chosen = choose_layer(model, images, layer)
    expected = grad_cam(model, images, classes, chosen)
    checkpoint_activations(Model(name="timm:resnet18", checkpoint_activations=True), model)
    assert chosen[0].startswith("layer3") and choose_layer(model, images, layer) == chosen
    torch.testing.assert_close(grad_cam(model, images, classes, chosen), expected)


def test_an_image_has_the_same_map_alone_and_in_a_batch() -> None:
    model, images = pooled().requires_grad_(False), torch.randn(3, 3, SIZE, SIZE)
    layer, classes = choose_layer(model, images), torch.tensor([[0], [1], [1]])
    alone = [grad_cam(model, image[None], label[None], layer)[0] for image, label in zip(images, classes, strict=True)]
    torch.testing.assert_close(grad_cam(model, images, classes, layer), torch.stack(alone))


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((2, 8, 7, 7), FeatureGrid("channels_first", 7)),
        ((2, 7, 7, 8), FeatureGrid("channels_last", 7)),
        ((2, 197, 8), FeatureGrid("tokens", 14, 1)),
        ((2, 201, 8), FeatureGrid("tokens", 14, 5)),
        ((2, 49, 8), FeatureGrid("tokens", 7)),
        ((2, 8, 1, 1), None),
        ((2, 8), None),
        ((2, 3, 8), None),
    ],
)
def test_grids_in_outputs(shape: tuple[int, ...], grid: FeatureGrid | None) -> None:
    assert FeatureGrid.of(shape) == grid
    if grid is not None:
        features = torch.arange(math.prod(shape)).reshape(shape)
        assert grid.unfold(features).shape == (2, 8, grid.side, grid.side)


def test_a_layer_can_be_named_and_a_wrong_name_is_refused_with_those_that_exist() -> None:
    model, images = pooled(), torch.randn(1, 3, SIZE, SIZE)
    assert choose_layer(model, images, "0") == ("0", FeatureGrid("channels_first", 16))
    with pytest.raises(RecipeError, match=r"^--layer: '4' is not a layer .*\(choose one of 0\.0, .*1\.2, 1\)"):
        choose_layer(model, images, "4")
    with pytest.raises(RecipeError, match=r"^--explain: the model has no layer"):
        choose_layer(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 2)), images)

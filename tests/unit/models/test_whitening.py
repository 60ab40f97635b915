"""Filters that whiten the patches of training images."""

import pytest
import torch
from torch.nn import functional as F

from paceline.models import layers
from paceline.models.build import MODEL_NAMES, build_model
from paceline.models.layers import WHITENING_EPS, Whitening, compute_whitening_filters, init_from_data, needs_data_init
from paceline.recipe.schema.model import Model


def correlated_images(channels: int, num_images: int = 40) -> torch.Tensor:
    """Return smooth images whose channels resemble one another, as photographs' do."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_images, channels, 14, 14, generator=generator)
    smooth = F.avg_pool2d(noise, 3, stride=1)
    return 2 * smooth + smooth.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("channels", [1, 3])
def test_filtered_patches_are_uncorrelated_with_variance_one_but_for_eps(channels):
    """A direction of variance e gets e / (e + EPS); float64 and the tolerance of `assert_close` absorb rounding."""
    images = correlated_images(channels).double()
    filters = compute_whitening_filters(images)
    assert filters.shape == (4 * channels, channels, 2, 2)
    patches = F.unfold(images, 2).transpose(0, 1).flatten(1)
    variances = torch.linalg.eigvalsh(patches @ patches.T / patches.shape[1]).flip(0)
    out = F.conv2d(images, filters).transpose(0, 1).flatten(1)
    torch.testing.assert_close(out @ out.T / out.shape[1], torch.diag(variances / (variances + WHITENING_EPS)))
    assert variances[0] > 10 * variances[-1]


def test_the_layer_holds_the_filters_and_their_negatives_and_trains_its_bias_alone():
    layer = Whitening(3)
    images = correlated_images(3)
    layer.fit_filters(images)
    filters = compute_whitening_filters(images).float()
    assert torch.equal(layer.conv.weight, torch.cat([filters, -filters]))
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"conv.bias"}
    assert layer.conv.bias.count_nonzero() == 0
    assert layer(images).shape == (40, 24, 11, 11)


def test_filters_do_not_depend_on_the_signs_that_lapack_chose(monkeypatch):
    images = correlated_images(3)
    expected = compute_whitening_filters(images)
    eigh = torch.linalg.eigh

    def flipped(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = eigh(matrix)
        return values, vectors * torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    assert torch.equal(compute_whitening_filters(images), expected)


def test_an_edge_keeps_its_sign_though_its_two_ends_are_of_equal_size():
    """Rounding makes one end or the other the larger; the first one is positive either way."""
    tiny = 1e-12
    vectors = torch.tensor([[0.1, -0.7, 0.7 + tiny, 0], [0.1, -0.7 - tiny, 0.7, 0]], dtype=torch.float64)
    assert layers._normalize_signs(vectors)[:, 1].tolist() == [0.7, 0.7 + tiny]


def test_the_order_and_number_format_of_images_hardly_matter():
    """Sums in another order differ in the last bits of float64; eigenvectors magnify that, far below 1e-9."""
    images = correlated_images(3, num_images=600)  # three chunks
    torch.testing.assert_close(
        compute_whitening_filters(images.flip(0)), compute_whitening_filters(images.double()), rtol=1e-9, atol=1e-9
    )


def test_constant_images_give_finite_filters():
    assert compute_whitening_filters(torch.zeros(2, 1, 8, 8)).isfinite().all()


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_only_the_speednets_have_data_dependent_initialization(name):
    torch.manual_seed(0)
    model = build_model(Model(name=name, width=0.125), num_classes=3, channels=1)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    init_from_data(model, correlated_images(1))
    changed = [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])]
    assert needs_data_init(model) == name.startswith("speednet")
    assert changed == (["whitening.conv.weight"] if needs_data_init(model) else [])


def test_fitting_keeps_the_dtype_and_layout_of_the_model():
    layer = Whitening(3).to(torch.bfloat16, memory_format=torch.channels_last)
    layer.fit_filters(correlated_images(3).to(torch.bfloat16))
    assert layer.conv.weight.dtype == torch.bfloat16
    assert layer.conv.weight.is_contiguous(memory_format=torch.channels_last)

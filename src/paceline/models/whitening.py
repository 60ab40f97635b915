"""A first convolution whose fixed filters whiten 2x2 patches of the training images.

Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU (arXiv 2404.00498), section 3.2, after Page 2018, How to
Train Your ResNet.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PATCH_SIZE = 2
WHITENING_EPS = 5e-4
"""Added to the eigenvalues so that low-variance directions are not amplified; from the author's code."""
_IMAGES_AT_ONCE = 256


class Whitening(nn.Module):
    """Convolve, without padding, with patch-whitening filters and their negatives, and add a learned bias.

    [N, channels, H, W] to [N, 8 * channels, H - 1, W - 1]. Filters are not trained, and random until `fit_filters` is called.
    Unlike in the paper, the bias is trained to the end and not for three epochs only.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = 2 * channels * PATCH_SIZE**2
        self.conv = nn.Conv2d(channels, self.out_channels, PATCH_SIZE)
        self.conv.weight.requires_grad_(False)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        self._set_filters(self.conv.weight[: self.out_channels // 2])

    def forward(self, images: Tensor) -> Tensor:
        """Return the whitened patches of `images`."""
        features: Tensor = self.conv(images)
        return features

    @torch.no_grad()
    def fit_filters(self, images: Tensor) -> None:
        """Compute the filters from normalized `images`, float [N, channels, H, W]."""
        self._set_filters(compute_whitening_filters(images))

    @torch.no_grad()
    def _set_filters(self, filters: Tensor) -> None:
        self.conv.weight.copy_(torch.cat([filters, -filters]))


def compute_whitening_filters(images: Tensor) -> Tensor:
    """Return filters that decorrelate the 2x2 patches of `images` to variance 1, largest variance first.

    float [N, C, H, W] to float64 [4 C, C, 2, 2], on the CPU. Filter i is v_i / sqrt(e_i + EPS), with eigenvalues e and
    eigenvectors v of the second moments of the patches.
    """
    size = images.shape[1] * PATCH_SIZE**2
    # The mean is not subtracted, as in the author's code (github.com/KellerJordan/cifar10-airbench): it is nearly 0 for
    # normalized images. float64 keeps differences between devices below what float32 resolves.
    moments = torch.zeros(size, size, dtype=torch.float64, device=images.device)
    num_patches = 0
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        chunk = images[start : start + _IMAGES_AT_ONCE].to(torch.float64)
        patches = F.unfold(chunk, PATCH_SIZE).transpose(0, 1).flatten(1)
        moments += patches @ patches.T
        num_patches += patches.shape[1]
    eigenvalues, eigenvectors = torch.linalg.eigh(moments.cpu() / num_patches)
    filters = _normalize_signs(eigenvectors.T) / torch.sqrt(eigenvalues.clamp(min=0) + WHITENING_EPS)[:, None]
    return filters.flip(0).reshape(size, images.shape[1], PATCH_SIZE, PATCH_SIZE)


def _normalize_signs(vectors: Tensor) -> Tensor:
    """Return the rows of `vectors`, each with the sign that makes its first large entry positive."""
    # LAPACK chooses the sign of an eigenvector. The largest entry is ambiguous: an edge filter has two of equal size
    # and opposite sign, and rounding would pick one.
    sizes = vectors.abs()
    first = (sizes > 0.5 * sizes.amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
    return vectors * vectors.gather(1, first).sign()


def needs_data(model: nn.Module) -> bool:
    """Return whether `fit_to_data` would change `model`."""
    return any(isinstance(module, Whitening) for module in model.modules())


def fit_to_data(model: nn.Module, images: Tensor) -> None:
    """Compute what `model` derives from training images, in place; a no-op for most models.

    `images` are a few thousand, normalized, float [N, channels, H, W], on any device. Use the same images on every
    rank; their order changes only the last bits.
    """
    for module in model.modules():
        if isinstance(module, Whitening):
            module.fit_filters(images)

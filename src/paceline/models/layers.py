"""Layers of the built-in models: convolutions and norms, stochastic depth, and patch whitening."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NormName = Literal["batch", "sync_batch", "group", "none"]
NormLayer = Callable[[int], nn.Module]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

MAX_GROUPS = 32
"""Best number of groups in Wu and He 2018, Group Normalization (arXiv 1803.08494), table 3."""
PATCH_SIZE = 2
WHITENING_EPS = 5e-4
"""Added to the eigenvalues so that low-variance directions are not amplified; from the author's code."""
_IMAGES_AT_ONCE = 256


def build_norm(norm: NormName) -> NormLayer:
    """Return a function from a number of channels to a normalization layer, [N, C, H, W] to the same shape."""
    match norm:
        case "batch" | "sync_batch":
            # `parallel` converts sync_batch to SyncBatchNorm later, when the ranks are known.
            return nn.BatchNorm2d
        case "group":
            return lambda channels: nn.GroupNorm(choose_num_groups(channels), channels)
        case "none":
            return lambda channels: nn.Identity()


def choose_num_groups(channels: int) -> int:
    """Return the largest number of groups, at most `MAX_GROUPS`, that divides `channels`."""
    return next(groups for groups in range(MAX_GROUPS, 0, -1) if channels % groups == 0)


@dataclass(frozen=True)
class LayerFactory:
    """Build the convolutions and norms of a residual network.

    With `zero_init_residual` every residual branch starts at zero, as in Goyal et al. 2017, Accurate, Large Minibatch
    SGD (arXiv 1706.02677), section 5.1.
    """

    norm: NormLayer
    has_norm: bool
    zero_init_residual: bool = False

    def conv(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
        """Return a convolution with "same" padding at stride 1, initialized as in He et al. 2015 (arXiv 1502.01852).

        Weights are N(0, 2 / fan_out) with normalization, else N(0, 2 / fan_in) with a bias of 0.
        """
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=not self.has_norm)
        # fan_out preserves the gradient's variance in the backward pass. Without a norm nothing rescales activations,
        # and fan_out would shrink them in a stem with few inputs and many outputs, so use fan_in.
        mode: Literal["fan_in", "fan_out"] = "fan_out" if self.has_norm else "fan_in"
        nn.init.kaiming_normal_(conv.weight, mode=mode, nonlinearity="relu")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        return conv

    def last_conv(self, in_channels: int, out_channels: int, kernel_size: int) -> nn.Conv2d:
        """Return the last convolution of a residual branch, which is zero without normalization."""
        conv = self.conv(in_channels, out_channels, kernel_size)
        # Without norms each block adds its branch's variance, so activations grow exponentially with depth. Zero
        # branches make each block start as its shortcut, as in Fixup, Zhang et al. 2019 (arXiv 1901.09321); its scaled
        # first convolutions and scalar biases and multipliers are left out.
        if not self.has_norm:
            nn.init.zeros_(conv.weight)
        return conv

    def last_norm(self, channels: int) -> nn.Module:
        """Return the last norm of a residual branch, with scale 0 if `zero_init_residual`."""
        norm = self.norm(channels)
        if self.zero_init_residual:
            nn.init.zeros_(norm.get_parameter("weight"))
        return norm


def build_layer_factory(norm: NormName, *, zero_init_residual: bool = False) -> LayerFactory:
    """Return the layer factory for `norm`."""
    assert not (zero_init_residual and norm == "none"), "the schema refuses it: such branches start at zero anyway"
    return LayerFactory(build_norm(norm), norm != "none", zero_init_residual)


def scale_channels(channels: int, width: float) -> int:
    """Return `channels` times `width`, rounded to at least 1."""
    return max(1, round(channels * width))


class DropPath(nn.Module):
    """Zero each sample with `probability` (below 1) and divide the others by 1 - `probability`, in training only.

    [N, ...] to the same shape and dtype, with one draw per sample from torch's global generator. Huang et al. 2016,
    Deep Networks with Stochastic Depth (arXiv 1603.09382), per sample.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with dropped samples, or `x` itself in evaluation."""
        if not self.training:
            return x
        keep_probability = 1 - self.probability
        factors = x.new_empty((x.shape[0], *[1] * (x.ndim - 1))).bernoulli_(keep_probability).div_(keep_probability)
        return x * factors

    def extra_repr(self) -> str:
        """Return the arguments that `repr` shows."""
        return f"probability={self.probability:g}"


def build_drop_path(probability: float) -> nn.Module:
    """Return a `DropPath`, or an identity without random draws if `probability` is 0."""
    return DropPath(probability) if probability else nn.Identity()


def append_drop_path(branch: nn.Sequential, probability: float) -> nn.Sequential:
    """Append a `DropPath` to `branch` in place, which keeps the names of tensors."""
    return branch.append(DropPath(probability)) if probability else branch


def linear_drop_rates(drop_path: float, num_blocks: int) -> list[float]:
    """Return `drop_path` * l / L for each block l of L, from 1 (Huang et al. 2016, section 3.2)."""
    return [drop_path * block / num_blocks for block in range(1, num_blocks + 1)]


class Whitening(nn.Module):
    """Convolve with patch-whitening filters and their negatives, which are not trained, and add a trained bias.

    [N, channels, H, W] to [N, 8 * channels, H - 1, W - 1]. Filters are random until `fit_filters` is called. Jordan
    2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU (arXiv 2404.00498), section 3.2, after Page 2018, How to Train
    Your ResNet. Unlike there, the bias is trained to the end and not for three epochs only.
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

    float [N, C, H, W] to float64 [4 C, C, 2, 2] on the CPU. Filter i is v_i / sqrt(e_i + EPS), with eigenvalues e and
    eigenvectors v of the patches' second moments.
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
    """Return the rows of `vectors` with signs that make their first large entry positive."""
    # The sign of an eigenvector depends on the LAPACK. Not by the largest entry: an edge filter has two of equal size
    # and opposite sign, and rounding would decide.
    sizes = vectors.abs()
    first = (sizes > 0.5 * sizes.amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
    return vectors * vectors.gather(1, first).sign()


def needs_data_init(model: nn.Module) -> bool:
    """Return whether `init_from_data` would change `model`."""
    return any(isinstance(module, Whitening) for module in model.modules())


def init_from_data(model: nn.Module, images: Tensor) -> None:
    """Run the data-dependent initialization of `model`, in place; only whitening layers have one.

    `images` are a few thousand, normalized, float [N, channels, H, W], on any device. Use the same images on every
    rank; their order changes only the last bits.
    """
    for module in model.modules():
        if isinstance(module, Whitening):
            module.fit_filters(images)

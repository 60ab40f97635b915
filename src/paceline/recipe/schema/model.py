"""The recipe's section `model`."""

import re
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.recipe.schema.base import Args, Off, Section, check_import_path, is_plugin_name, refuse

BUILT_IN_MODELS_ONLY: Final = ("norm", "width", "zero_init_residual", "drop_path")
"""Fields that configure paceline's own models, and have little or no effect on others."""


class Model(Section):
    """The model."""

    name: str = "resnet18_cifar"
    """A built-in model (`resnet18_cifar`, `resnet34_cifar`, `resnet50_cifar`, `resnet50_nersc`, `wideresnet_course`,
    `speednet94`, `speednet95`, `speednet96`), `torchvision:NAME`, `timm:NAME`, or the import path of [your
    own](../how-to/extend.md#custom-models), `package.module:Name`. `empty`, a linear layer on the mean color,
    measures what a run costs without a model."""
    args: Args = Field({})
    """Keyword arguments of your own model, in addition to `num_classes` and `in_channels`."""
    norm: Literal["batch", "sync_batch", "group", "none"] = "batch"
    """Normalization layers of built-in models. `sync_batch` computes BatchNorm statistics over all ranks, in any
    model."""
    width: float = Field(1.0, gt=0)
    """Multiplier for the channels of built-in models."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory layout of images and filters. `auto` is channels_last, which was never slower
    (benchmarks/memory_format.py). On a CPU it is contiguous for a model with a strided 1x1 convolution of fewer than 16
    channels, whose gradient in channels_last corrupts memory (a bug of torch's oneDNN: benchmarks/channels_last.py)."""
    zero_init_residual: bool = False
    """Initialize the scale of the last normalization of every residual branch to zero (Goyal et al. 2017)."""
    drop_path: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping the last residual branch in a step (stochastic depth); for earlier branches it is smaller
    in proportion to depth."""
    weights: str | Off = "off"
    """Pretrained weights: a `.safetensors` file, torchvision's `.pth`, or a run directory, which means its last
    checkpoint (`RUN/checkpoints/best` or a step's folder for another one)."""
    freeze: Off | Literal["backbone"] | tuple[str, ...] = "off"
    """Parameters that are not trained: `backbone` is everything but the classifier, and a list holds patterns of
    parameter names, such as `[stem.*, "*.bias"]`. Modules without trainable parameters stay in evaluation mode, so
    their running statistics do not change ([how to fine-tune](../how-to/fine-tune.md#freeze-layers))."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return check_import_path(name) if is_plugin_name(name) else name

    @field_validator("freeze", mode="before")
    @classmethod
    def _refuse_bare_patterns(cls, freeze: object) -> object:
        if isinstance(freeze, str) and freeze not in ("off", "backbone", ""):
            patterns = [_quote_list_item(each.strip()) for each in freeze.split(",")]
            raise ValueError(f"{freeze!r} is neither off, backbone nor a list (write [{', '.join(patterns)}])")
        return freeze

    @field_validator("freeze")
    @classmethod
    def _refuse_no_patterns(cls, freeze: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not freeze:
            raise ValueError("freeze has no patterns (set freeze=off, or name some)")
        return freeze

    @model_validator(mode="after")
    def _check_args(self) -> Self:
        if self.args and not is_plugin_name(self.name):
            refuse("model.args", f"has no effect on {self.name}, only on your own model (leave it out)")
        return self

    @model_validator(mode="after")
    def _check_zero_init(self) -> Self:
        if self.zero_init_residual and self.norm == "none":
            raise ValueError("zero_init_residual has no effect with norm none, whose branches start at zero (leave it)")
        return self


def _quote_list_item(pattern: str) -> str:
    """Return `pattern` as an item of a YAML list, quoted if necessary."""
    return pattern if re.fullmatch(r"[\w.][\w.*]*", pattern) else f'"{pattern}"'

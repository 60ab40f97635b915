"""The network."""

import re
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.recipe.schema.base import Args, Off, Section, check_import_path, is_own_model, refuse

BUILT_IN_MODELS_ONLY: Final = ("norm", "width", "zero_init_residual", "drop_path")
"""The fields that say how our own networks are built, and of which others have few or none."""


class Model(Section):
    """The network."""

    name: str = "resnet18_cifar"
    """One of ours (`resnet18_cifar`, `resnet34_cifar`, `resnet50_cifar`, `resnet50_nersc`, `wideresnet_course`,
    `speednet94`, `speednet95`, `speednet96`), `torchvision:NAME`, `timm:NAME`, or the import path of
    [your own](../how-to/extend.md#a-network-of-your-own), `package.module:Name`; `empty`, a linear layer on the mean
    colour, is a probe of what the model costs."""
    args: Args = Field({})
    """Keyword arguments of a network of your own, beside `num_classes` and `in_channels`."""
    norm: Literal["batch", "sync_batch", "group", "none"] = "batch"
    """Normalisation layers of our own networks; `sync_batch` also makes others' batch norms count over all ranks."""
    width: float = Field(1.0, gt=0)
    """Multiplies the channels of our own networks."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of images and filters; `auto` is channels_last, which was never slower (benchmarks/memory_format.py). On a
    CPU it is contiguous for a network with a 1x1 convolution of fewer than 16 channels that has a stride: its gradient
    in channels_last corrupts memory (a bug of torch's oneDNN: benchmarks/channels_last.py)."""
    zero_init_residual: bool = False
    """Start every residual branch at zero, by the scale of its last normalisation (Goyal et al. 2017)."""
    drop_path: float = Field(0.0, ge=0, lt=1)
    """Probability that the last residual branch is left out of a step; earlier ones less, in proportion to depth."""
    weights: str | Off = "off"
    """Pretrained weights to start from: a file, `.safetensors` or torchvision's `.pth`, or a run directory, which
    stands for its last checkpoint (`RUN/checkpoints/best` or a step's folder for another)."""
    freeze: Off | Literal["backbone"] | tuple[str, ...] = "off"
    """What is not trained: `backbone`, all but the classifier, or a list of patterns of parameters' names, such as
    `[stem.*, "*.bias"]`; modules that have no other parameters stay in evaluation mode, running statistics among them
    ([how to fine-tune](../how-to/fine-tune.md#freeze-layers))."""

    @field_validator("name")
    @classmethod
    def _may_be_imported(cls, name: str) -> str:
        return check_import_path(name) if is_own_model(name) else name

    @field_validator("freeze", mode="before")
    @classmethod
    def _lists_its_patterns(cls, freeze: object) -> object:
        if isinstance(freeze, str) and freeze not in ("off", "backbone", ""):
            patterns = [_in_a_list(each.strip()) for each in freeze.split(",")]
            raise ValueError(f"{freeze!r} is neither off, backbone nor a list (write [{', '.join(patterns)}])")
        return freeze

    @field_validator("freeze")
    @classmethod
    def _names_something(cls, freeze: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not freeze:
            raise ValueError("freeze has no patterns (set freeze=off, or name some)")
        return freeze

    @model_validator(mode="after")
    def _args_are_of_an_own_network(self) -> Self:
        if self.args and not is_own_model(self.name):
            refuse("model.args", f"has no effect on {self.name}, only on a network of your own (leave it out)")
        return self

    @model_validator(mode="after")
    def _zero_needs_a_norm(self) -> Self:
        if self.zero_init_residual and self.norm == "none":
            raise ValueError("zero_init_residual has no effect with norm none, whose branches start at zero (leave it)")
        return self


def _in_a_list(pattern: str) -> str:
    """Return `pattern` as an item of a list in YAML, in quotes where it needs them."""
    return pattern if re.fullmatch(r"[\w.][\w.*]*", pattern) else f'"{pattern}"'

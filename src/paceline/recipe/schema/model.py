"""The recipe's section `model`."""

import re
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from paceline.recipe.schema.base import (
    LIBRARIES,
    Args,
    Off,
    Section,
    TrainingDuration,
    as_section,
    check_import_path,
    is_plugin_name,
    refuse,
)

BUILT_IN_MODELS_ONLY: Final = ("norm", "width", "zero_init_residual", "drop_path")
"""Fields that configure paceline's own models, and have little or no effect on others."""


PUBLISHED: Final = ("timm:", "torchvision:", "hf-hub:")
"""Prefixes of `model.weights` that name published weights."""


def is_published(weights: str) -> bool:
    """Return whether `model.weights` names published weights, and no file or run."""
    return weights == "default" or weights.startswith(PUBLISHED)


_FIELD_OF_ARG: Final = {
    "num_classes": "data.source",
    "in_chans": "data.source.channels",
    "img_size": "data.image_size",
    "image_size": "data.image_size",
    "drop_path_rate": "model.drop_path",
    "stochastic_depth_prob": "model.drop_path",
    "zero_init_last": "model.zero_init_residual",
    "zero_init_residual": "model.zero_init_residual",
    "weights": "model.weights",
    "model_name": "model.name",
    "name": "model.name",
}
"""Arguments of the libraries' models that other fields set."""
_REFUSED_ARGS: Final = (
    *("pretrained", "checkpoint_path", "cache_dir", "weights_backbone", "progress", "file", "url", "hf_hub"),
    *("features_only", "feature_cfg", "out_indices", "aux_logits", "scriptable", "exportable", "no_jit"),
)


class Lora(Section):
    """Low-rank adapters beside linear layers (Hu et al. 2021, LoRA, arXiv 2106.09685)."""

    rank: PositiveInt = 8
    """Rank of the matrix that is added to each layer."""
    alpha: PositiveInt = 16
    """The added matrix is scaled by `alpha / rank`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an input of an adapter."""
    targets: Literal["auto"] | tuple[str, ...] = "auto"
    """Layers with adapters: `auto` is every linear layer except the classifier, and a list holds patterns of layer
    names, such as `["*.qkv", "*.fc1"]`."""

    @field_validator("targets")
    @classmethod
    def _refuse_no_patterns(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("targets has no patterns (set targets=auto, or name some)")
        return targets


class Model(Section):
    """The model."""

    added: ClassVar = ("checkpoint_activations", "weights_sha256", "unfreeze", "lora")

    name: str = "resnet18_cifar"
    """A built-in model (`resnet18_cifar`, `resnet34_cifar`, `resnet50_cifar`, `resnet50_nersc`, `wideresnet_course`,
    `speednet94`, `speednet95`, `speednet96`), `torchvision:NAME`, `timm:NAME`, or the import path of [your
    own](../how-to/extend.md#custom-models), `package.module:Name`. `empty`, a linear layer on the mean color,
    measures what a run costs without a model."""
    args: Args = Field({})
    """Keyword arguments of a timm or torchvision model, such as `{drop_rate: 0.2}`, or of your own model, in addition
    to `num_classes` and `in_channels`."""
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
    """Pretrained weights. By name: `default` is the default of a timm or torchvision model, `timm:TAG` and
    `torchvision:NAME` are others, and `hf-hub:REPO` is a repository of the Hugging Face Hub with a timm model. They are
    downloaded once. Or a `.safetensors` or `.pth` file, or a run directory, which means its last checkpoint
    (`RUN/checkpoints/best` or a step's folder for another one)."""
    weights_sha256: str | Off = "off"
    """SHA-256 that the weights must have, or its first 8 digits or more; `provenance.started_from` of a run records
    it."""
    checkpoint_activations: bool = False
    """Keep only the input of each block of the model for the backward pass, which computes the block again: less
    memory, and a second forward pass per step. Weights and losses have the same bits as without."""
    freeze: Off | Literal["backbone"] | tuple[str, ...] = "off"
    """Parameters that are not trained: `backbone` is everything but the classifier, and a list holds patterns of
    parameter names, such as `[stem.*, "*.bias"]`. Modules without trainable parameters stay in evaluation mode, so
    their running statistics do not change ([how to fine-tune](../how-to/fine-tune.md#freeze-layers))."""

    lora: Annotated[Lora | Off, BeforeValidator(as_section)] = "off"
    """Train low-rank adapters and the classifier, and keep all other weights fixed: `on` uses the defaults
    below. For transformers; needs `paceline[lora]` ([how to fine-tune](../how-to/fine-tune.md#adapters-lora))."""
    unfreeze: TrainingDuration | Off = "off"
    """When the frozen parameters start to train, such as `2ep` or `20%`; until then, `freeze` keeps them fixed. The run
    has one schedule and one series of checkpoints ([head first](../how-to/fine-tune.md#head-first))."""

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

    @field_validator("weights_sha256", mode="before")
    @classmethod
    def _refuse_numbers(cls, digest: object) -> object:
        if isinstance(digest, int | float):
            raise ValueError(f"{digest!r} is a number in YAML (write the digits in quotes: '\"...\"')")
        return digest

    @field_validator("weights_sha256")
    @classmethod
    def _check_digest(cls, digest: str) -> str:
        if digest != "off" and not re.fullmatch(r"[0-9a-f]{8,64}", digest):
            raise ValueError(f"{digest!r} is not a SHA-256 (give its 64 lower-case hexadecimal digits, or the first 8)")
        return digest

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights == "off" and self.weights_sha256 != "off":
            refuse("model.weights_sha256", "has no effect with model.weights off (set model.weights)")
        if not is_published(self.weights):
            return self
        library = "timm" if self.weights.startswith("hf-hub:") else self.weights.partition(":")[0]
        libraries = LIBRARIES if self.weights == "default" else (library,)
        if self.name.partition(":")[0] not in libraries:
            models = " or ".join(f"{each}:NAME" for each in libraries)
            refuse("model.weights", f"{self.weights} is not for {self.name} (set model.name={models})")
        return self

    @model_validator(mode="after")
    def _check_unfreeze(self) -> Self:
        if self.unfreeze == "off":
            return self
        if self.lora != "off":
            refuse("model.unfreeze", f"{self.unfreeze} does not work with model.lora (leave one of them out)")
        if self.freeze == "off":
            refuse("model.unfreeze", f"{self.unfreeze} has no effect with model.freeze off (set model.freeze=backbone)")
        if self.unfreeze.value == 0:
            refuse(
                "model.unfreeze", f"{self.unfreeze} is before the first step (set model.freeze=off and unfreeze=off)"
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora != "off" and self.freeze != "off":
            refuse("model.lora", "keeps all weights but the classifier's fixed already (set model.freeze=off)")
        return self

    @model_validator(mode="after")
    def _check_args(self) -> Self:
        if not self.args or is_plugin_name(self.name):
            return self
        if self.name.partition(":")[0] not in LIBRARIES:
            refuse("model.args", f"has no effect on {self.name}, only on models of timm and torchvision and your own")
        for name in self.args:
            field = _FIELD_OF_ARG.get(name)
            if field is not None:
                refuse("model.args", f"{name} is what {field} sets (set {field} in its place)")
            if name.startswith(_REFUSED_ARGS):
                refuse("model.args", f"{name} could load weights, or make no classifier (leave it out)")
        return self

    @model_validator(mode="after")
    def _check_zero_init(self) -> Self:
        if self.zero_init_residual and self.norm == "none":
            raise ValueError("zero_init_residual has no effect with norm none, whose branches start at zero (leave it)")
        return self


def _quote_list_item(pattern: str) -> str:
    """Return `pattern` as an item of a YAML list, quoted if necessary."""
    return pattern if re.fullmatch(r"[\w.][\w.*]*", pattern) else f'"{pattern}"'

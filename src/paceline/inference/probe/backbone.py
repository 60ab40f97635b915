"""Load the frozen model whose features are probed, and compute features of images, or read them from a cache."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.core.dataset import DatasetInfo, Source
from paceline.core.errors import DataError, RecipeError
from paceline.core.host import rank_cores
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.data.bad_images import ImageError
from paceline.data.loaders.build import LoaderOptions, build_eval_loader
from paceline.data.loaders.choose import choose_loader
from paceline.data.order import EvalShard
from paceline.data.transfer import DeviceTransfer
from paceline.inference.classifier import load_classifier
from paceline.inference.probe.cache import FeatureCache
from paceline.models.build import build_model
from paceline.models.features import (
    capture_features,
    capture_outputs,
    feature_tensors,
    find_feature_layer,
    find_stages,
    to_thumbnails,
)
from paceline.models.validate import choose_memory_format
from paceline.parallel.device import choose_device
from paceline.recipe.plan import eval_image_size, mean_and_std
from paceline.recipe.plugins import code_identity
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data
from paceline.training.checkpoint import weights_digest, weights_sha256
from paceline.training.datasets import DecodedSource, adapt_to_run
from paceline.training.eval_model import eval_precision
from paceline.training.init_weights import find_initial_checkpoint, load_initial_weights
from paceline.training.precision import Precision, build_precision, set_numerics
from paceline.training.trained_dataset import read_trained_dataset

THUMBNAIL_SIZE: Final = 32
"""Side of the gray thumbnails by which images are compared, in pixels."""
_STAGE: Final = "stage "
"""Prefix of the names of tensors with outputs of stages."""
_BATCH: Final = 128
_FORMAT: Final = 2
"""Part of the key of cached features: raise it if they are computed otherwise."""


@dataclass(frozen=True)
class Backbone:
    """A frozen model in evaluation mode, and the preprocessing of its images.

    `layer` is the layer whose input are the features, `digest` the SHA-256 of all of the model that they depend on, and
    `weights` names them for a user. Of a run, `checkpoint` is its digest, else "".
    """

    model: nn.Module
    layer: str
    data: Data
    image_size: int
    transfer: DeviceTransfer
    precision: Precision
    digest: str
    weights: str
    checkpoint: str = ""

    def preprocessing(self) -> dict[str, Any]:
        """Return all settings that features depend on, besides weights and pixels."""
        return {
            "format": _FORMAT,
            "thumbnails": THUMBNAIL_SIZE,
            "image_size": self.image_size,
            "eval_resize": self.data.eval_resize,
            "eval_crop": self.data.eval_crop,
            "interpolation": self.data.interpolation,
            "on_bad_image": self.data.on_bad_image,
            "mean_and_std": [self.transfer.mean, self.transfer.std],
            "device": self.transfer.device.type,
            "autocast": str(self.precision.autocast_dtype),
            "dtype": str(self.precision.dtype),
        }


def load_run_backbone(
    run: RunDir, recipe: Recipe, train: Source, val: Source, checkpoint: str, *, trust_code: bool
) -> tuple[Backbone, Source, Source]:
    """Return the model of `run`, and both splits of `recipe` as it takes them.

    `recipe` is the run's own, perhaps with another dataset, whose classes may be others. Raise `DataError` if its
    images have other channels than the run's, and as `load_classifier` does.
    """
    device = choose_device(recipe.parallel, World.single())
    classifier = load_classifier(run.path, checkpoint, device.type, trust_code=trust_code)
    data = classifier.recipe.data
    if recipe.data.source != data.source:
        trained = read_trained_dataset(run)
        recipe, train = adapt_to_run(recipe, classifier.recipe, trained, train)
        _, val = adapt_to_run(recipe, classifier.recipe, trained, val)
    name = classifier.recipe.model.name
    layer = find_feature_layer(classifier.model, len(classifier.classes), name)
    backbone = Backbone(
        model=classifier.model,
        layer=layer,
        data=recipe.data,
        image_size=classifier.preprocessing.image_size,
        transfer=classifier.place,
        precision=classifier.precision,
        digest=_digest_model(classifier.model, layer, classifier.recipe),
        weights=f"{name}, {classifier.checkpoint.parent.parent.name}/{classifier.checkpoint.name}",
        checkpoint=weights_digest(classifier.checkpoint),
    )
    return backbone, train, val


def load_weights_backbone(recipe: Recipe, info: DatasetInfo) -> Backbone:
    """Return the model of `recipe` with the weights of `model.weights`, for images such as those of `info`.

    Raise `RecipeError` if it has none, and as `load_initial_weights` does.
    """
    section = recipe.model
    if section.weights == "off":
        raise RecipeError(
            "model.weights: off leaves random features (name a run directory in place of the recipe, or set "
            "model.weights to published weights or a file)"
        )
    device = choose_device(recipe.parallel, World.single())
    precision_name = eval_precision(recipe.train.precision, device)
    set_numerics(precision_name, device, benchmark=False)
    precision = build_precision(precision_name, device)
    image_size = eval_image_size(recipe.data, info)
    shape = {"num_classes": info.num_classes, "channels": info.channels}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = build_model(section, **shape, image_size=image_size)
        load_initial_weights(section, model, find_initial_checkpoint(section.weights))
    layout = choose_memory_format(section, device, **shape)
    precision.cast_model(model)
    model.to(device).to(memory_format=layout)
    layer = find_feature_layer(model, info.num_classes, section.name)
    return Backbone(
        model=model.eval().requires_grad_(False),
        layer=layer,
        data=recipe.data,
        image_size=image_size,
        transfer=DeviceTransfer(device, precision.dtype, *mean_and_std(recipe.data, info), layout, pixels=info.pixels),
        precision=precision,
        digest=_digest_model(model, layer, recipe),
        weights=f"{section.name}, {section.weights}",
    )


def _digest_model(model: nn.Module, layer: str, recipe: Recipe) -> str:
    # Equal weights are not enough: the activations of two models may differ, or the code of a user's own one.
    layers = [
        f"{name} {type(module).__name__ if any(module.children()) else module}"
        for name, module in model.named_modules()
        if name != layer
    ]
    facts = [weights_sha256(feature_tensors(model, layer)), layers, code_identity(recipe, "model")]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class SplitFeatures:
    """Features, float32 [N, D], and gray thumbnails, uint8 [N, 32, 32], of samples `indices` of a split, int64 [N].

    `labels` are int64 [N], `stages` the outputs of modules before the classifier by name, float32 [N, D].
    """

    indices: NDArray[np.int64]
    labels: NDArray[np.int64]
    features: NDArray[np.float32]
    thumbnails: NDArray[np.uint8]
    stages: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    is_cached: bool = False

    def __len__(self) -> int:
        return len(self.indices)

    def of(self, stage: str) -> NDArray[np.float32]:
        """Return the output of `stage`, or with "" the input of the classifier."""
        return self.stages[stage] if stage else self.features


def compute_features(backbone: Backbone, source: Source, num_images: int, cache: FeatureCache | None) -> SplitFeatures:
    """Return the features of `num_images` samples of `source`, a fixed random subset, from `cache` if it has them.

    With `data.on_bad_image=skip`, unreadable images are left out. Raise `DataError` for others.
    """
    shard = EvalShard(num_images, _BATCH, split_size=len(source))
    pixels, labels = _digest_samples(backbone.data, source, shard)
    key_fields = {"weights": backbone.digest, "pixels": pixels, **backbone.preprocessing()}
    key = hashlib.sha256(json.dumps(key_fields, sort_keys=True).encode()).hexdigest()
    tensors = cache.read(key) if cache else None
    is_cached = tensors is not None
    if tensors is None:
        tensors = _run_model(backbone, source, shard)
        if cache:
            cache.write(key, tensors)
    indices = tensors["indices"].numpy()
    return SplitFeatures(
        indices,
        np.array([labels[index] for index in indices.tolist()], dtype=np.int64),
        tensors["features"].numpy(),
        tensors["thumbnails"].numpy(),
        {name.removeprefix(_STAGE): each.numpy() for name, each in tensors.items() if name.startswith(_STAGE)},
        is_cached,
    )


def _digest_samples(data: Data, source: Source, shard: EvalShard) -> tuple[str, Mapping[int, int]]:
    """Return the SHA-256 of the images' contents, and the label of each sample by index."""
    # Of the contents, not of paths: an image that is replaced has other features. Not of labels, which may be fixed.
    digest, labels = hashlib.sha256(f"{source.info.channels} {source.info.pixels}\n".encode()), {}
    while isinstance(source, DecodedSource):
        source = source.source
    for number in range(shard.num_batches):
        for index in shard.indices(number).tolist():
            try:
                content, labels[index] = source.read(index)
            except ImageError:
                if data.on_bad_image != "skip":
                    raise
                content = b"unreadable"
            digest.update(f"{index} {getattr(content, 'shape', len(content))}\n".encode())
            digest.update(content if isinstance(content, bytes) else np.ascontiguousarray(content).data)
    return digest.hexdigest(), labels


def _run_model(backbone: Backbone, source: Source, shard: EvalShard) -> dict[str, Tensor]:
    device, cores = backbone.transfer.device, rank_cores(World.single())
    data = backbone.data
    choice = choose_loader(data, source, device=device.type, cores=cores, free_bytes=0)
    options = LoaderOptions(choice.workers, pin_memory=device.type == "cuda", loader=choice.loader, device=device)
    parts: list[dict[str, Tensor]] = []
    loader = build_eval_loader(data, source, shard, backbone.image_size, options)
    stages: list[str] | None = None
    with contextlib.closing(loader), torch.inference_mode(), backbone.precision.autocast():
        for batch in loader.batches(0, shard.num_batches):
            if len(batch):
                images = backbone.transfer.normalize(backbone.transfer(batch).images)
                if stages is None:
                    stages = find_stages(backbone.model, backbone.layer, images[:1])
                with (
                    capture_features(backbone.model, backbone.layer) as captured,
                    capture_outputs(backbone.model, stages) as outputs,
                ):
                    backbone.model(images)
                part = {"indices": torch.from_numpy(batch.indices), "features": captured.pop()}
                part["thumbnails"] = to_thumbnails(batch.images, THUMBNAIL_SIZE)
                part |= {_STAGE + name: each.pop() for name, each in outputs.items()}
                parts.append({name: each.cpu() for name, each in part.items()})
    if not parts:
        raise DataError(f"data.source: none of {shard.num_images:,} images can be read (fix them)")
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if not all(each.isfinite().all() for each in tensors.values() if each.is_floating_point()):
        raise DataError("model.weights: the model's features are NaN or infinite (use other weights or checkpoints)")
    return tensors

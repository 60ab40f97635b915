"""Quote a training step on GPUs: images/s and memory from the recipe and the GPU's datasheet."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.statistics import Interval
from paceline.lab.predict.from_run import assume_buckets, compute_exposed_s
from paceline.lab.predict.network import NetworkModel, all_reduce_time_s
from paceline.lab.quote.memory import CONTEXT_BYTES, COUNT_ERRORS, MemoryCounter, usable_bytes
from paceline.lab.quote.step_model import (
    Constants,
    KernelTable,
    Layout,
    build_step_table,
    find_bounds,
    predict_time,
)
from paceline.lab.quote.update import list_update_kernels
from paceline.measure.gpu import Gpu
from paceline.models.activations import checkpoint_activations
from paceline.models.build import build_model
from paceline.models.flops import StepKernels, count_kernels
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe

_HALF: Final[Mapping[str, torch.dtype]] = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HALF_BY_PREFERENCE: Final = ("bf16", "fp16")
_GRADIENT_BYTES: Final = 4
_BACKWARD_SHARE: Final = 2 / 3
_FITTED_GPU: Final = "NVIDIA GeForce RTX 3090"


@dataclass(frozen=True)
class Quote:
    """A quote of the training steps on `ranks` GPUs of a kind; the interval of `images_per_s` has 90 % confidence.

    `memory_bytes` are those of tensors at the peak of a step, of which `memory_parts` says what they are for;
    `unused_bytes` are parts of the allocator's segments, and `context_bytes` is what CUDA and its libraries take.
    `fits` is whether the GPU has enough, and `largest_micro_batch` the images per rank and pass with which it would
    be just enough.
    """

    gpu: str
    ranks: int
    rank_batch: int
    images_per_s: Interval
    memory_bytes: int
    memory_parts: dict[str, int]
    unused_bytes: int
    context_bytes: int
    fits: bool
    largest_micro_batch: int


def count_step(recipe: Recipe, plan: Plan, precision: str) -> StepKernels:
    """Count the kernels of a training step. Raise `RecipeError` if the model cannot be counted."""
    sizes = {"num_classes": plan.num_classes, "channels": plan.channels, "image_size": plan.image_size}
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = build_model(recipe.model, **sizes)
        if recipe.model.checkpoint_activations:
            checkpoint_activations(recipe.model, model)
        return count_kernels(
            model, plan.channels, plan.image_size, plan.image_size, autocast=_HALF.get(precision, None)
        )
    except PacelineError:  # a ValueError, whose message stands
        raise
    except COUNT_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"model.name: {recipe.model.name} cannot be counted: {reason} (quote another)") from None


def find_number_format(precision: str, gpu: Gpu) -> str:
    """Return the format in which `gpu` computes with `train.precision`. Raise `RecipeError` for fp64."""
    kind = precision.partition("_")[0]
    if kind == "fp64":
        raise RecipeError("train.precision: fp64 has no measurements to quote from (set fp32, tf32, fp16, bf16 or amp)")
    if kind == "amp":
        return next((each for each in _HALF_BY_PREFERENCE if each in gpu.tflops), "fp32")
    kind = "tf32" if kind == "torch" else kind
    if kind == "bf16" and "bf16" not in gpu.tflops:
        raise RecipeError(f"train.precision: {precision} has no units on {gpu.name} (set amp, which is fp16 there)")
    return kind if kind in gpu.tflops else "fp32"


def quote(
    recipe: Recipe,
    plan: Plan,
    step: StepKernels,
    gpu_name: str,
    gpu: Gpu,
    constants: Constants,
    network: NetworkModel,
    ranks_per_node: int,
    memory: MemoryCounter,
) -> Quote:
    """Return the quote for the training steps of `plan`; evaluation, start-up and checkpoints are left out."""
    layout: Layout = "nchw" if recipe.model.memory_format == "contiguous" else "nhwc"
    number_format = find_number_format(recipe.train.precision, gpu)
    num_micro_batches = plan.rank_batch // plan.micro_batch
    update_table = KernelTable.build(list_update_kernels(step, recipe))
    update = predict_time(update_table, 1, gpu, number_format, layout, constants)
    micro = predict_time(build_step_table(step), plan.micro_batch, gpu, number_format, layout, constants)
    buckets = assume_buckets(_GRADIENT_BYTES * step.trained_params, _BACKWARD_SHARE * micro.seconds)

    def exposed_s(links: NetworkModel) -> float:
        return compute_exposed_s(buckets, lambda size: all_reduce_time_s(size, plan.world_size, ranks_per_node, links))

    alone = micro.combine(update, num_micro_batches)
    if recipe.train.capture == "on" and plan.world_size == 1:
        alone = replace(alone, host_s=0.0)  # the host launches one graph
    alone_s = alone.seconds
    is_fitted = gpu.name == _FITTED_GPU and number_format in _HALF
    low, high = find_bounds(constants, layout, number_format, alone, is_fitted=is_fitted)
    # A slower step is at the high end of its time and at the low end of its speed.
    images_per_s = Interval(
        value=plan.batch_size / (alone_s + exposed_s(network)),
        low=plan.batch_size / (alone_s * math.exp(high) + exposed_s(network.with_bandwidth("low"))),
        high=plan.batch_size / (alone_s * math.exp(low) + exposed_s(network.with_bandwidth("high"))),
    )
    needed = memory.count(plan, number_format, plan.micro_batch)
    usable = usable_bytes(gpu.memory_gb)
    return Quote(
        gpu=gpu_name,
        ranks=plan.world_size,
        rank_batch=plan.rank_batch,
        images_per_s=images_per_s,
        memory_bytes=needed.allocated_bytes,
        memory_parts=needed.parts,
        unused_bytes=needed.reserved_bytes - needed.allocated_bytes,
        context_bytes=CONTEXT_BYTES,
        fits=needed.allocated_bytes <= usable,
        largest_micro_batch=memory.find_largest_micro_batch(plan, number_format, usable),
    )

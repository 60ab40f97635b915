"""Model FLOPs utilization of a run, and its share of the roofline."""

from typing import Any

import torch

from paceline.core.json_file import read_json
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.measure.peaks import Peak, measure_peak, peak_of
from paceline.measure.roofline import roofline
from paceline.models.cost import ModelCost, count_cost
from paceline.models.zoo import build_model
from paceline.recipe.schema import Recipe


def compute_efficiency(recipe: Recipe, rundir: RunDir, result: RunResult, images_per_s: float) -> dict[str, Any]:
    """Return cost per image and efficiency as numbers by name.

    `images_per_s` is over all devices; FLOP/s and shares are per device, and None if the peak is unknown. The peak of a
    CPU is measured now, with the rank's number of threads. Raise any exception of a model that cannot be counted.
    """
    cost = _count_model_cost(recipe, rundir)
    devices = count_devices(recipe, result)
    device_images_per_s = images_per_s / devices
    values: dict[str, Any] = {
        "parameters": cost.params,
        "flops_per_image": cost.training_flops,
        "achieved_flops_per_s": cost.training_flops * device_images_per_s,
        "peak_flops_per_s": None,
        "peak_source": "",
        "mfu": None,
        "roofline_images_per_s": None,
        "roofline_share": None,
    }
    peak = _find_peak(recipe.train.precision, result.provenance)
    if peak is None:
        return values
    line = roofline(cost.training, device_images_per_s, peak)
    return values | {
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": f"{peak.device}, {peak.precision}: {peak.source}",
        "mfu": line.mfu,
        "roofline_images_per_s": line.bound_images_per_s * devices,
        "roofline_share": line.share,
    }


def count_devices(recipe: Recipe, result: RunResult) -> int:
    """Return the number of devices of a run: one per rank, or all visible GPUs for `dataparallel`."""
    if recipe.parallel.strategy == "dataparallel":
        return max(1, len(result.provenance.get("cuda_devices", ())))
    return result.world_size


def _count_model_cost(recipe: Recipe, rundir: RunDir) -> ModelCost:
    plan = read_json(rundir.path / "plan.json")
    model = build_model(recipe.model, num_classes=plan["num_classes"], channels=plan["channels"])
    return count_cost(model, plan["channels"], plan["image_size"], plan["image_size"])


def _find_peak(precision: str, provenance: dict[str, Any]) -> Peak | None:
    """Return the peak of the device that a result names, None if it is not in the table."""
    if provenance["device"] != "cpu":
        return peak_of(provenance["cuda_devices"][0], precision)
    before = torch.get_num_threads()
    torch.set_num_threads(provenance["threads"])
    try:
        return measure_peak(precision)
    finally:
        torch.set_num_threads(before)

"""What a run makes of its device: the model's arithmetic, how fast it was done, and how fast it could be."""

from typing import Any

import torch

from paceline.core.json_file import read_json
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.measure.peaks import Peak, measure_peak, peak_of
from paceline.measure.roofline import roofline
from paceline.models.cost import Cost, cost_of
from paceline.models.zoo import build_model
from paceline.recipe.schema import Recipe


def efficiency(recipe: Recipe, rundir: RunDir, result: RunResult, images_per_s: float) -> dict[str, Any]:
    """Return what the model costs an image in training, and how near a device comes to its peak: numbers by name.

    `images_per_s` are those of all devices together; FLOP/s and shares are of one. Those that need a peak are None
    where it is not known; that of a CPU is measured here and now, with as many threads as a rank had. Raise whatever a
    network raises that cannot be counted.
    """
    cost = _cost(recipe, rundir)
    devices = num_devices(recipe, result)
    own_images_per_s = images_per_s / devices
    found: dict[str, Any] = {
        "parameters": cost.params,
        "flops_per_image": cost.training_flops,
        "achieved_flops_per_s": cost.training_flops * own_images_per_s,
        "peak_flops_per_s": None,
        "peak_source": "",
        "mfu": None,
        "roofline_images_per_s": None,
        "roofline_share": None,
    }
    peak = _peak(recipe.train.precision, result.provenance)
    if peak is None:
        return found
    line = roofline(cost.training, own_images_per_s, peak)
    return found | {
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": f"{peak.device}, {peak.precision}: {peak.source}",
        "mfu": line.mfu,
        "roofline_images_per_s": line.bound_images_per_s * devices,
        "roofline_share": line.share,
    }


def num_devices(recipe: Recipe, result: RunResult) -> int:
    """Return how many devices a run computed on: one a rank, but for `dataparallel`, which drives all GPUs it sees."""
    if recipe.parallel.strategy == "dataparallel":
        return max(1, len(result.provenance.get("cuda_devices", ())))
    return result.world_size


def _cost(recipe: Recipe, rundir: RunDir) -> Cost:
    plan = read_json(rundir.path / "plan.json")
    model = build_model(recipe.model, num_classes=plan["num_classes"], channels=plan["channels"])
    return cost_of(model, plan["channels"], plan["image_size"], plan["image_size"])


def _peak(precision: str, provenance: dict[str, Any]) -> Peak | None:
    """Return the peak of the devices that a result names as its own, None where there is none in the books."""
    if provenance["device"] != "cpu":
        return peak_of(provenance["cuda_devices"][0], precision)
    before = torch.get_num_threads()
    torch.set_num_threads(provenance["threads"])
    try:
        return measure_peak(precision)
    finally:
        torch.set_num_threads(before)

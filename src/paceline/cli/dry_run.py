"""`paceline train --dry-run`: everything that would be done, and nothing done."""

import json
import math
from dataclasses import replace

from paceline.core.limits import rank_cores
from paceline.core.units import count
from paceline.core.world import World
from paceline.data.choice import choose_loader
from paceline.data.sources.build import build_datasets
from paceline.data.staging.inventory import take_inventory
from paceline.models.trial import check_model
from paceline.parallel.device import choose_device
from paceline.recipe.effects import outwaited
from paceline.recipe.load import Loaded
from paceline.recipe.own import check_own_parts
from paceline.recipe.plan import Plan
from paceline.recipe.yamlfile import write_text
from paceline.train.code_note import tell_code
from paceline.train.precision import half_on_cpu
from paceline.train.sinks.build import require_sinks
from paceline.train.try_parts import try_parts


def dry_run(loaded: Loaded, world: World, ranks: int, *, as_json: bool) -> int:
    """Print recipe, plan, learning rate and devices; return the exit code."""
    if not world.is_main:
        return 0
    tell_code(loaded)
    recipe = loaded.recipe
    if world.launcher == "single":
        world = replace(world, world_size=ranks, local_world_size=ranks)
    check_own_parts(recipe)
    require_sinks(recipe.log)
    device = choose_device(recipe.parallel, world)
    datasets = build_datasets(recipe.data.source, may_download=False, skip_bad=recipe.data.on_bad_image == "skip")
    if recipe.data.stage != "off":
        take_inventory(recipe.data.source, skip_bad=recipe.data.on_bad_image == "skip")  # refuses what cannot be staged
    plan = Plan.derive(recipe, ranks, datasets.train.info, datasets.val.info)
    known = check_model(recipe.model, plan, half_on_cpu=half_on_cpu(recipe.train.precision, device))
    tried = try_parts(recipe, plan, datasets.train)
    cores = rank_cores(world)
    choice = choose_loader(recipe.data, datasets.train, device=device.type, cores=cores, free_bytes=math.inf)
    notes = filter(None, [*known, choice.note, outwaited(recipe, choice.workers), *tried])
    plan = replace(plan, notes=(*plan.notes, *notes))
    each = count(cores, "core")
    devices = f"{world.world_size} x {device.type}, {each} each, started by {world.launcher}"
    if as_json:
        values = {"hash": recipe.hash, "recipe": recipe.to_dict(), "plan": plan.to_dict(), "devices": devices}
        print(json.dumps(values, indent=2))
        return 0
    print(f"# recipe {recipe.hash}")
    print(write_text(recipe.to_dict()))
    print("# plan")
    print(write_text(plan.to_dict()))
    print(f"learning rate: {plan.lr_sentence}")
    print(f"devices: {devices}")
    return 0

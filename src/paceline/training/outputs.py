"""Open the outputs of a run: log sinks, checkpoints, goodput, telemetry. Find the checkpoint to resume from."""

import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import RecipeError
from paceline.core.quote_result import QuoteResult
from paceline.core.results import EnergyResult
from paceline.core.run_dir import RunDir, append_line, read_lines
from paceline.core.units import count, mib
from paceline.data.sources.fingerprint import digest_datasets
from paceline.measure.clock import ClockSummary
from paceline.measure.energy import KINDS, build_energy_result, recorded_energy_j
from paceline.measure.telemetry import NodeTelemetry, build_telemetry, gpu_id
from paceline.measure.throughput import RunTimer, steady_unix_s
from paceline.measure.time_estimate import PlannedWork
from paceline.parallel.strategy import Strategy
from paceline.recipe.plan import Plan
from paceline.recipe.plugins import code_identity
from paceline.recipe.schema.optim import Adam, Lamb, OptimSection, Sgd
from paceline.recipe.schema.recipe import Checkpoint
from paceline.training.callbacks import build_callbacks
from paceline.training.checkpoint import (
    CheckpointStorage,
    CheckpointWriter,
    KeepPolicy,
    model_tensors,
    optimizer_tensors,
)
from paceline.training.context import RunContext
from paceline.training.goodput import GoodputTracker, TimeSpent, build_goodput_tracker
from paceline.training.logging.base import SinkGroup, drop_records_after
from paceline.training.logging.build import build_sinks
from paceline.training.lr_schedule import sample_lr_points
from paceline.training.pause_log import LogPause, build_pause_log, no_log
from paceline.training.process import RunProcess
from paceline.training.quote_truth import keep_quote
from paceline.training.resume import (
    check_dataset,
    check_sampler,
    describe_missing_checkpoint,
    initialize_rundir,
    read_recipe_origin,
)
from paceline.training.saver import TrainingState
from paceline.training.state import TrainState
from paceline.training.trained_dataset import TrainedDataset

_PROBE_BYTES = 4096  # a block: a full disk often takes an empty file


def start_telemetry(
    context: RunContext, process: RunProcess, strategy: Strategy, warn: Callable[[str], None]
) -> NodeTelemetry | None:
    """Return the telemetry sampler, None except on one rank per node. Collective."""
    # Number nodes by their lowest rank: a launcher may distribute ranks in any order.
    world = context.world
    host = zlib.crc32(os.uname().nodename.encode())
    is_gpu = context.device.type == "cuda"
    gpu = gpu_id(str(torch.cuda.get_device_properties(context.device).uuid)) if is_gpu else 0
    # Rank 0 adds the energy of earlier processes, which it reads before any node adds rows: others wait below.
    before_j = recorded_energy_j(process.rundir.all_telemetry()) if world.is_main else {}
    row = torch.tensor([os.getpid(), host, world.is_node_main, gpu], dtype=torch.int64, device=context.device)
    ranks = strategy.all_gather(row).reshape(-1, 4).tolist()
    node = sum(is_node_main for _, _, is_node_main, _ in ranks[: world.rank])
    path = process.rundir.telemetry(node)
    return build_telemetry(
        context.recipe.measure.telemetry if world.is_node_main else "off",
        partial(append_line, path),
        warn,
        ranks=[pid for pid, of_host, _, _ in ranks if of_host == host],
        gpus="all" if is_gpu else (),
        used_gpus={each for _, of_host, _, each in ranks if of_host == host} if is_gpu else (),
        energy_before_j=before_j,
        samples_before=sum(1 for _ in read_lines(path, lambda number: None)),
    )


def collect_energy(
    context: RunContext, telemetry: NodeTelemetry | None, strategy: Strategy, images: int
) -> EnergyResult | None:
    """Return the energy of all processes of a run that has trained on `images`; None without telemetry. Collective."""
    if context.recipe.measure.telemetry == "off":
        return None
    totals_j = telemetry.energy.totals_j if telemetry else {}
    mine = [number for kind in KINDS for number in (totals_j.get(kind, 0.0), float(kind in totals_j))]
    row = torch.tensor([*mine, float(telemetry is not None)], dtype=torch.float64, device=context.device)
    *sums, num_nodes = strategy.sum(row).tolist()
    by_kind = {kind: (sums[2 * place], round(sums[2 * place + 1])) for place, kind in enumerate(KINDS)}
    return build_energy_result(by_kind, round(num_nodes), images, telemetry.energy.missing if telemetry else {})


@dataclass(frozen=True)
class RunOutputs:
    """Outputs of a run, which ranks other than 0 discard; `provenance` records plugins and initial weights.

    `on_step` is called after each step, before `TrainState.step` counts it, with the step's learning rate. A checkpoint
    has about `checkpoint_bytes`. `quote` is what `keep_quote` returns.
    """

    sinks: SinkGroup
    writer: CheckpointWriter | None
    checkpoint_values: Mapping[str, Any]
    goodput: GoodputTracker | None
    log_bad_image: Callable[[dict[str, str | int]], None]
    provenance: Mapping[str, Any]
    on_step: Callable[[TrainState, float], None] = lambda state, lr: None
    log_pause: LogPause = no_log
    checkpoint_bytes: int = 0
    quote: QuoteResult | str | None = None

    def time_spent(self, summary: ClockSummary) -> TimeSpent:
        """Return the time to store in the saved state; zero on ranks other than 0, as rank 0 saves its own."""
        return self.goodput.time_spent(summary) if self.goodput else TimeSpent()


def build_run_outputs(
    context: RunContext,
    process: RunProcess,
    training_state: TrainingState,
    machine: dict[str, Any],
    state: TrainState,
    initial_weights: Mapping[str, Any],
) -> RunOutputs:
    """Write recipe, plan, dataset and machine on rank 0, and return the outputs of the run."""
    recipe, rundir, section = context.recipe, process.rundir, context.recipe.checkpoint
    plugins = code_identity(recipe)
    origin: dict[str, Any] = {**({"own_parts": plugins} if plugins else {}), **initial_weights}
    checkpoint_values: dict[str, Any] = {"recipe_hash": recipe.hash, "world_size": context.world.world_size, **origin}
    if not context.world.is_main:
        return RunOutputs(SinkGroup(()), None, checkpoint_values, None, lambda row: None, origin)
    checkpoint_bytes = estimate_checkpoint_bytes(training_state, recipe.optim)
    check_disk(rundir, section, context.plan, checkpoint_bytes, process.warn)
    goodput = build_goodput_tracker(
        rundir,
        context.world.world_size,
        from_step=state.step,
        trained_s=state.trained_s,
        spent_before=state.spent,
        startup_s=RunTimer().started_s - process.invocation.started_s,
        launch=process.invocation.launch,
        batch_job=process.invocation.batch_job,
        now=steady_unix_s(),
        first_started_s=process.first_started_s,
        warn=process.warn,
    )  # before the recipe file: a folder with a recipe belongs to a run
    lr_schedule = sample_lr_points(training_state.schedule, context.plan.total_steps)
    invocation = process.invocation
    named = {"recipe_name": invocation.recipe_name, "changes": [*invocation.changes]}
    origin_of_recipe = read_recipe_origin(rundir) or named
    trained = TrainedDataset.from_source(context.datasets.train, is_multi_label=context.is_multi_label)
    plan = replace(
        context.plan,
        class_images=(min(trained.class_counts), max(trained.class_counts)) if trained.class_counts else (0, 0),
        disk_bytes=num_kept(section, context.plan) * checkpoint_bytes,
    )
    measured = {key: value for key, value in invocation.more_provenance.items() if key == "measured_batch"}
    initialize_rundir(rundir, recipe, {**origin_of_recipe, **measured, **plan.to_dict(), "lr_schedule": lr_schedule})
    for path in rundir.all_samples():  # including ranks of an earlier, larger world
        drop_records_after(path, state.step - 1)
        if path.stat().st_size == 0:
            path.unlink()
    rundir.write_json(rundir.dataset.name, trained.to_dict())
    rundir.write_json("machine.json", machine)
    quote = keep_quote(recipe.log, rundir, process.warn)
    callbacks = build_callbacks(recipe, context.plan, rundir.path, state.step)
    listeners = (*process.invocation.listeners, callbacks)
    sinks = build_sinks(
        rundir, recipe, state.step, listeners, last_eval=state.last_step, is_multi_label=context.is_multi_label
    )
    writer = CheckpointWriter(
        checkpoint_storage(context, rundir),
        background=section.background == "on",
        on_failure=section.on_failure,
        warn=sinks.warned,
        saved_step=state.step or -1,
    )
    sampler = {"sampler": context.sampler.digest} if context.sampler.digest else {}
    checkpoint_values = {**checkpoint_values, "dataset": digest_datasets(context.datasets), **sampler}
    sinks.started(plan, state.step)  # last: from here on the caller closes the sinks
    return RunOutputs(
        sinks,
        writer,
        checkpoint_values,
        goodput,
        rundir.add_bad_image,
        origin,
        callbacks.step_ended,
        build_pause_log(rundir.pauses),
        checkpoint_bytes,
        quote,
    )


def checkpoint_storage(context: RunContext, rundir: RunDir) -> CheckpointStorage:
    """Return the checkpoints of the run in `rundir`, with the recipe's rule of which to keep."""
    section = context.recipe.checkpoint
    keep = KeepPolicy(section.keep, keep_best=section.keep_best == "on", every=context.plan.checkpoint_keep_every)
    return CheckpointStorage(rundir.checkpoints, keep)


def find_resume_checkpoint(context: RunContext, process: RunProcess) -> str:
    """Return the newest intact checkpoint of the run, the same on every rank, or an empty string. Collective.

    Rank 0 removes the leftovers of killed saves. Raise `DataError` if the checkpoint was trained on another dataset
    or with other values of its sampler.
    """
    newest = None
    if context.world.is_main:
        checkpoints = checkpoint_storage(context, process.rundir)
        checkpoints.clean_up()
        newest = checkpoints.newest_intact(process.warn)
        if newest:
            check_dataset(newest, digest_datasets(context.datasets))
            check_sampler(newest, context.sampler.digest)
            if missing := describe_missing_checkpoint(process.rundir):
                process.warn(f"{missing}; the run is resumed from {newest.name}")
    return process.store.broadcast("start_from", str(newest or ""))


def estimate_checkpoint_bytes(training_state: TrainingState, section: OptimSection) -> int:
    """Return the size of a checkpoint in bytes, except for some thousand."""
    weights = [parameter for group in training_state.optimizer.param_groups for parameter in group["params"]]
    moments = sum(tensor.nbytes for tensor in optimizer_tensors(training_state.optimizer).values())
    groups = (
        model_tensors(training_state.model),
        training_state.precision.tensors(),
        training_state.average.tensors() if training_state.average else {},
    )
    num_bytes = sum(tensor.nbytes for group in groups for tensor in group.values())
    powersgd = training_state.strategy.powersgd
    num_bytes += powersgd.num_bytes(training_state.model) if powersgd else 0
    # Before the first step an optimizer has no state.
    return num_bytes + (moments or _moments_per_weight(section) * sum(weight.nbytes for weight in weights))


def num_kept(section: Checkpoint, plan: Plan) -> int:
    """Return the most checkpoints that the run of `plan` has on disk at once: those kept, the best, and a new one."""
    if section.every == "off":
        return 0
    written = PlannedWork.from_plan(plan).checkpoints() if plan.checkpoint_every else math.inf
    permanent = plan.total_steps // plan.checkpoint_keep_every if plan.checkpoint_keep_every else 0
    return int(min(written, section.keep + (section.keep_best == "on") + 1 + permanent))


def check_disk(rundir: RunDir, section: Checkpoint, plan: Plan, state_bytes: int, warn: Callable[[str], None]) -> None:
    """Check that the run directory is writable and has room for the checkpoints of the run of `plan`.

    Less room is a warning. Raise `RecipeError` if the disk is not writable, or not even one checkpoint fits.
    """
    _check_writable(rundir.path)
    if section.every == "off":
        return
    folder = rundir.checkpoints if rundir.checkpoints.is_dir() else rundir.path
    usage = shutil.disk_usage(folder)
    if usage.total == 0:  # some network file systems report 0 of 0
        return
    num_existing = sum(1 for path in folder.glob("step-*") if path.is_dir())
    needed = max(1, num_kept(section, plan) - num_existing)
    free, each, every = mib(usage.free), mib(state_bytes), mib(needed * state_bytes)
    if usage.free < state_bytes:
        raise RecipeError(
            f"checkpoint: {folder} has {free} free, a checkpoint takes {each} (free some space, name another with "
            f"--run-dir, or set checkpoint.every=off)"
        )
    if usage.free < needed * state_bytes:
        several = count(needed, "checkpoint")
        smaller = _suggest_fewer(section, plan, usage.free // state_bytes + num_existing)
        fix = f"free some space, or set {smaller}" if smaller else "free some space"
        warn(f"checkpoint: {folder} has {free} free, {several} of {each} take {every} ({fix})")


def _suggest_fewer(section: Checkpoint, plan: Plan, num_fitting: int) -> str:
    """Return settings with which the run keeps at most `num_fitting` checkpoints, but as many as possible, or ""."""
    for keep_best in dict.fromkeys((section.keep_best, "off")):
        fewest = section.model_copy(update={"keep": 1, "keep_best": keep_best})
        spare = num_fitting - num_kept(fewest, plan)
        if spare >= 0:
            changed = {"keep": min(section.keep, 1 + spare), "keep_best": keep_best}
            return " ".join(f"checkpoint.{name}={v}" for name, v in changed.items() if getattr(section, name) != v)
    return ""


def _check_writable(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(prefix=".probe-", dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise RecipeError(f"--run-dir: {folder} cannot be written to: {error.strerror} (name another)") from None


def _moments_per_weight(section: OptimSection) -> int:
    """Return the number of values that an optimizer keeps per weight."""
    match section:
        case Sgd(momentum=0):
            return 0
        case Adam() | Lamb():
            return 2
    return 1

"""The outputs of a run: log sinks, checkpoints, goodput records, bad images and telemetry."""

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.core.rundir import RunDir, append_line, read_lines
from paceline.data.identity import dataset_digest
from paceline.measure.rate import Stopwatch, steady_unix_s
from paceline.measure.telemetry import Telemetry, build_telemetry
from paceline.parallel.strategy import Strategy
from paceline.recipe.code_identity import code_identity
from paceline.train.attempts import Ledger, NoLedger, build_ledger
from paceline.train.checkpoint import Checkpoints, Keep, Writer
from paceline.train.disk import check_disk, expected_bytes
from paceline.train.facts import Facts
from paceline.train.job import Job
from paceline.train.logsink import Sinks
from paceline.train.parts import Parts
from paceline.train.persist import Persistent
from paceline.train.resume import open_rundir, recipe_name_of
from paceline.train.saver import NoWriter, Writes
from paceline.train.schedule import planned_lr
from paceline.train.sinks.build import build_sinks
from paceline.train.sinks.lines import cut
from paceline.train.state import TrainState


def open_telemetry(parts: Parts, job: Job, strategy: Strategy, warn: Callable[[str], None]) -> Telemetry:
    """Return the telemetry sampler of this node, which runs on one rank per node. Collective."""
    # Nodes are numbered by their lowest rank, however the launcher has distributed the ranks.
    world = parts.world
    host = zlib.crc32(os.uname().nodename.encode())
    row = torch.tensor([os.getpid(), host, world.is_node_main], dtype=torch.int64, device=parts.device)
    ranks = strategy.every(row).reshape(-1, 3).tolist()
    node = sum(is_node_main for _, _, is_node_main in ranks[: world.rank])
    path = job.rundir.telemetry(node)
    return build_telemetry(
        parts.recipe.measure.telemetry if world.is_node_main else "off",
        partial(append_line, path),
        warn,
        ranks=[pid for pid, of_host, _ in ranks if of_host == host],
        gpus="all" if parts.device.type == "cuda" else (),
        looks_before=sum(1 for _ in read_lines(path, lambda number: None)),
    )


@dataclass(frozen=True)
class Books:
    """Outputs of a run. On ranks other than 0 they discard everything.

    `origin` records the user's own code and the initial weights, if there are any.
    """

    sinks: Sinks
    writer: Writes
    facts: Mapping[str, Any]
    ledger: Ledger
    list_bad_image: Callable[[dict[str, str | int]], None]
    origin: Mapping[str, Any]


def open_books(
    parts: Parts,
    job: Job,
    persistent: Persistent,
    machine: dict[str, Any],
    state: TrainState,
    beginning: Mapping[str, Any],
) -> Books:
    """Write what is known before the first step, and return the outputs of the run. Only rank 0 writes.

    `beginning` is the provenance of the initial weights.
    """
    recipe, rundir, section = parts.recipe, job.rundir, parts.recipe.checkpoint
    plugins = code_identity(recipe)
    origin: dict[str, Any] = {**({"own_parts": plugins} if plugins else {}), **beginning}
    facts: dict[str, Any] = {"recipe_hash": recipe.hash, "world_size": parts.world.world_size, **origin}
    if not parts.world.is_main:
        return Books(Sinks(()), NoWriter(), facts, NoLedger(), lambda row: None, origin)
    check_disk(rundir, section, expected_bytes(persistent, recipe.optim), job.warn)
    ledger = build_ledger(
        rundir,
        parts.world,
        from_step=state.step,
        trained_s=state.trained_s,
        before=state.spent,
        startup_s=Stopwatch().started_s - job.invocation.started_s,
        launch=job.invocation.launch,
        batch_job=job.invocation.batch_job,
        now=steady_unix_s(),
        first_s=job.first_s,
        warn=job.warn,
    )  # before the recipe file: a folder with a recipe belongs to a run
    lr_schedule = planned_lr(persistent.schedule, parts.plan.total_steps)
    name = {"recipe_name": recipe_name_of(rundir) or job.invocation.recipe_name}
    open_rundir(rundir, recipe, {**name, **parts.plan.to_dict(), "lr_schedule": lr_schedule})
    for path in rundir.all_samples():  # including ranks of an earlier, larger world
        cut(path, state.step - 1)
        if path.stat().st_size == 0:
            path.unlink()
    rundir.write_json(rundir.dataset.name, Facts.of(parts.datasets.train).to_dict())
    rundir.write_json("machine.json", machine)
    listeners = job.invocation.listeners
    sinks = build_sinks(rundir, recipe, state.step, listeners, last_eval=state.last_step)
    writer = Writer(
        checkpoints_of(parts, rundir),
        background=section.background == "on",
        on_failure=section.on_failure,
        warn=sinks.warned,
        saved_step=state.step or -1,
    )
    facts = {**facts, "dataset": dataset_digest(parts.datasets)}
    sinks.started(parts.plan, state.step)  # last: from here on the caller closes the sinks
    return Books(sinks, writer, facts, ledger, rundir.add_bad_image, origin)


def checkpoints_of(parts: Parts, rundir: RunDir) -> Checkpoints:
    """Return the checkpoints of the run in `rundir`, with the recipe's rule of which to keep."""
    section = parts.recipe.checkpoint
    keep = Keep(section.keep, best=section.keep_best == "on", every=parts.plan.checkpoint_keep_every)
    return Checkpoints(rundir.checkpoints, keep)

"""The recipe, and its sections `checkpoint` and `measure`. All defaults are defined in this package."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, Self, cast

from pydantic import Field, PositiveInt, model_validator

from paceline.core.urls import HOW_TO_PASS_CREDENTIALS, find_secret
from paceline.recipe.schema.base import CadenceDuration, Off, SaveCadenceDuration, Section, Switch, TimeDuration, refuse
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.optim import (
    Adam,
    Constant,
    Lamb,
    OptimSection,
    Plateau,
    RangeTest,
    RmsProp,
    ScheduleFree,
    ScheduleSection,
    Sgd,
)
from paceline.recipe.schema.train import Log, Parallel, Train

_NOT_WORK: Final = (
    "seed",
    "log",
    "measure",
    "checkpoint",
    "schedule",
    *(f"data.{name}" for name in ("source", "batch_size", "rank_batch_size", "loader", "workers", "stage")),
    *(f"data.{name}" for name in ("cache", "cache_gb", "worker_timeout", "on_bad_image", "max_bad_images")),
    *(f"data.{name}" for name in ("split", "order", "sampler", "replay", "mean", "std")),
    *(f"data.{name}" for name in ("eval_batch_size", "eval_image_size", "eval_resize", "eval_crop", "eval_views")),
    *(f"optim.{name}" for name in ("lr", "lr_scaling", "base_batch_size", "norm_and_bias_lr", "betas", "eps")),
    *(f"optim.{name}" for name in ("sgd_lr", "classifier_lr")),
    *(f"train.{name}" for name in ("epochs", "steps", "max_time", "eval_every", "eval_train", "accuracy", "stop")),
    *(f"train.{name}" for name in ("metrics", "monitor", "patience", "label_threshold")),
    *(f"parallel.{name}" for name in ("device", "backend", "timeout", "threads", "bind")),
)
"""Sections and fields of a recipe that may differ between recipes whose steps do the same work."""
_PAUSES: Final = (
    *("checkpoint.every", "checkpoint.background", "data.sampler", "data.eval_image_size", "data.eval_views"),
    *("train.eval_every", "train.eval_train"),
)
"""Fields of those that change the time of a run between its steps."""


class Checkpoint(Section):
    """When to save checkpoints, and how many to keep."""

    every: SaveCadenceDuration | Off = "1ep"
    """How often to save, in training (1ep, 500st) or in time (10min). The end of the run is saved too, unless this is
    off. A preempted run always saves."""
    keep: int = Field(3, ge=1)
    """Number of latest checkpoints to keep."""
    keep_best: Switch = "on"
    """Also keep the checkpoint with the best evaluation."""
    keep_every: CadenceDuration | Off = "off"
    """Also keep, for good, the checkpoints at multiples of this."""
    background: Switch = "on"
    """Write in the background, from a copy of the state in host memory, while training continues; off waits for the
    write."""
    on_failure: Literal["warn", "stop"] = "warn"
    """If a checkpoint cannot be written: `warn` and continue, or `stop` the run."""
    grace: TimeDuration = "60s"
    """Time for the ranks to finish a step and save after a stop signal; then they are killed."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if self.every != "off":
            return self
        for name in ("keep", "keep_best", "keep_every", "background", "on_failure"):
            if self.is_set(name):
                raise ValueError(f"{name} has no effect with every off (set every=1ep)")
        return self


class Measure(Section):
    """How to time a run."""

    clock: Switch = "on"
    """Time each stage of a step."""
    warmup_steps: int = Field(10, ge=0)
    """First steps to exclude from throughput and stage times."""
    communication: Switch = "off"
    """ddp: also time each gradient bucket. Exposed communication is always timed."""
    trace: PositiveInt | Off = "off"
    """Number of steps after the measurement warm-up that each rank records in a Chrome trace, which slows them down."""
    nvtx: Switch | Literal["ops"] = "off"
    """Mark steps and stages as NVTX ranges for Nsight Systems; the range `PROFILE` begins after the measurement
    warm-up. `ops` also marks each operation by torch's `emit_nvtx`, which slows steps down."""
    telemetry: TimeDuration | Off = "5s"
    """How often to sample CPU, memory, GPU, disk and network."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        for name in ("warmup_steps", "communication", "trace", "nvtx"):
            if self.clock == "off" and self.is_set(name):
                raise ValueError(f"{name} has no effect with clock off (set clock=on)")
        if self.nvtx == "ops" and self.trace != "off":
            raise ValueError("nvtx=ops and trace both need torch's profiler, which is one (set nvtx=on, or trace=off)")
        return self


class Recipe(Section):
    """All settings of a run; two runs of one recipe differ only in their machine."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, the order of samples and all random augmentation."""
    data: Data = Data()
    """Data, batches and augmentation."""
    model: Model = Model()
    """The model."""
    optim: OptimSection = Sgd()
    """The optimizer."""
    schedule: ScheduleSection = Constant()
    """The learning-rate schedule."""
    train: Train
    """Length, precision, loss and evaluation."""
    parallel: Parallel = Parallel()
    """How ranks work together."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save checkpoints."""
    measure: Measure = Measure()
    """How to time the run."""
    log: Log = Log()
    """Logs and trackers."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, values: object) -> object:
        # Before any field is validated: error messages show values.
        for path, text in _texts(values):
            secret = find_secret(text)
            if secret:
                refuse(
                    path, f"the URL holds {secret}, which the run would keep in its files ({HOW_TO_PASS_CREDENTIALS})"
                )
        return values

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if isinstance(self.schedule, Plateau) and self.train.eval_every == "off":
            refuse("schedule.name", "plateau has no effect with train.eval_every off (set train.eval_every=1ep)")
        if isinstance(self.optim, ScheduleFree) and not isinstance(self.schedule, Constant | RangeTest):
            name = self.schedule.name
            refuse(
                "schedule.name", f"{name} falls, and schedule_free averages in its place (set schedule.name=constant)"
            )
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        precision, parallel, optim = self.train.precision, self.parallel, self.optim
        kind, _, scheme = precision.partition("_")
        field = "train.precision"
        if scheme == "master" and parallel.strategy == "fsdp":
            refuse(field, f"{precision} has weights of two types, fsdp shards one (set train.precision={kind})")
        if scheme == "master" and isinstance(optim, ScheduleFree):
            refuse(
                field, f"{precision} keeps copies, which schedule_free does not average (set train.precision={kind})"
            )
        # Squares of gradients below 2e-4 underflow in fp16.
        if precision == "fp16_pure" and isinstance(optim, Adam | RmsProp | Lamb):
            refuse(field, f"fp16_pure loses the squares that {optim.name} divides by (set train.precision=fp16_master)")
        if kind in ("bf16", "amp") and not scheme and parallel.strategy == "dataparallel":
            refuse(
                field, f"{precision} is float16 in dataparallel's threads (set train.precision=fp32, or strategy=ddp)"
            )
        if scheme and parallel.compression == kind:
            refuse("parallel.compression", f"{kind} has no effect on gradients of {precision} (set compression=off)")
        if scheme and kind == "fp16" and parallel.compression == "powersgd":
            refuse(
                "parallel.compression",
                f"powersgd divides by what is 0 in {precision} (set train.precision=bf16_{scheme})",
            )
        return self

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        parallel, train = self.parallel, self.train
        if parallel.static_graph and train.accumulate != 1:
            refuse(
                "parallel.static_graph",
                "true cannot leave gradients unsent (set train.accumulate=1, or static_graph=false)",
            )
        if train.compile in ("reduce-overhead", "max-autotune") and train.accumulate != 1:
            fix = "max-autotune-no-cudagraphs"
            refuse("train.compile", f"{train.compile} overwrites gradients that accumulate (set train.compile={fix})")
        if train.compile in ("reduce-overhead", "max-autotune") and train.capture == "on":
            fix = "default" if train.compile == "reduce-overhead" else "max-autotune-no-cudagraphs"
            refuse("train.compile", f"{train.compile} captures graphs of its own (set train.compile={fix})")
        if parallel.strategy == "fsdp" and self.model.memory_format == "channels_last":
            refuse("model.memory_format", "fsdp cannot shard channels_last (set model.memory_format=auto)")
        if self.measure.communication == "on" and parallel.strategy != "ddp":
            fix = "set measure.communication=off"
            refuse("measure.communication", f"on has no effect with strategy {parallel.strategy} ({fix})")
        if self.data.replay != "off" and self.log.samples:
            refuse("log.samples", f"true names no new sample with data.replay {self.data.replay} (set it false)")
        if not parallel.sync_gradients and self.measure.communication == "on":
            refuse("measure.communication", "on finds nothing to time with parallel.sync_gradients false (set it off)")
        if parallel.strategy == "dataparallel" and self.model.norm == "sync_batch":
            refuse("model.norm", "sync_batch needs a process for each GPU (set parallel.strategy=ddp)")
        if parallel.strategy == "dataparallel" and train.compile != "off":
            refuse("train.compile", "the copies that dataparallel makes are not compiled (set train.compile=off)")
        return self

    @model_validator(mode="after")
    def _check_measured_batch(self) -> Self:
        """Refuse settings whose memory or speed the eager steps of a measurement do not show."""
        train, times = self.train, self.data.is_batch_measured
        if train.accumulate != "auto" and not times:
            return self
        field = "train.accumulate" if train.accumulate == "auto" else "data.batch_size"
        for setting, is_on in (
            ("train.capture=on", train.capture == "on"),
            (f"train.compile={train.compile}", times and train.compile != "off"),
            ("train.distill", train.distill != "off"),
            ("parallel.strategy=dataparallel", self.parallel.strategy == "dataparallel"),
        ):
            if is_on:
                refuse(field, f"auto does not measure steps with {setting} (set a number)")
        return self

    @model_validator(mode="after")
    def _check_clipping(self) -> Self:
        if self.parallel.strategy == "fsdp" and self.train.clip_agc != "off":
            needs = "needs whole weights, which fsdp shards"
            refuse("train.clip_agc", f"{self.train.clip_agc:g} {needs} (set parallel.strategy=ddp)")
        return self

    @model_validator(mode="after")
    def _check_unfreeze(self) -> Self:
        conflicts = {
            "train.capture=on": self.train.capture == "on",
            "parallel.compression=powersgd": self.parallel.compression == "powersgd",
            "optim.name=schedule_free": isinstance(self.optim, ScheduleFree),
        }
        for setting, is_on in conflicts.items():
            if is_on and self.model.unfreeze != "off":
                refuse("model.unfreeze", f"{self.model.unfreeze} does not work with {setting} (leave one of them out)")
        return self

    @model_validator(mode="after")
    def _check_activations(self) -> Self:
        parallel, train = self.parallel, self.train
        conflicts = {
            "parallel.strategy=dataparallel": parallel.strategy == "dataparallel",
            f"train.compile={train.compile}": train.compile != "off",
            "train.capture=on": train.capture == "on",
        }
        for setting, is_on in conflicts.items():
            if is_on and self.model.checkpoint_activations:
                refuse("model.checkpoint_activations", f"true does not work with {setting} (leave one of them out)")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values that load again to an equal recipe; the `name` of a section comes first."""
        return cast(dict[str, Any], _names_first(self.model_dump(mode="json")))

    def given_values(self) -> dict[str, Any]:
        """Return the fields that were set as plain values that load again to an equal recipe.

        A list that was set is whole.
        """
        return cast(dict[str, Any], _drop_unset(self, self.to_dict()))

    @property
    def hash(self) -> str:
        """12 hex digits that are equal for equal recipes."""
        return _hash_values(self._values_to_hash())

    @property
    def work_hash(self) -> str:
        """12 hex digits that are equal for recipes whose steps do the same work on a rank.

        Seed, length, learning rate, evaluations, checkpoints, logs, measurement, the place and the loading of the data,
        and global batch size may differ.
        """
        return _hash_values(self.work_values)

    @property
    def work_values(self) -> dict[str, Any]:
        """The fields that `work_hash` is computed from, by dotted path."""
        values = self._values_to_hash()
        for path in _NOT_WORK:
            section, _, name = path.partition(".")
            if name:
                values[section].pop(name, None)
            else:
                del values[section]
        return {f"{section}.{name}": value for section, fields in values.items() for name, value in fields.items()}

    @property
    def pause_values(self) -> dict[str, Any]:
        """The settings of evaluations and checkpoints that change the time of a run, by dotted path."""
        values = self.to_dict()
        pairs = ((path, path.partition(".")) for path in _PAUSES)
        return {path: values[section][name] for path, (section, _, name) in pairs}

    def _values_to_hash(self) -> dict[str, Any]:
        values = self.to_dict()
        _drop_added(self, values)
        return values


def _hash_values(values: Mapping[str, Any]) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def _drop_added(section: Section, plain: dict[str, Any]) -> None:
    """Remove `Section.added` fields that have their default from `plain`, the plain form of `section`, in place."""
    for name in section.added:
        if not section.is_set(name):
            del plain[name]
    for name, value in plain.items():
        child = getattr(section, name)
        for each, entry in zip(child, value, strict=True) if isinstance(child, tuple) else ((child, value),):
            if isinstance(each, Section):
                _drop_added(each, entry)


def _texts(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) of every string in plain values."""
    match value:
        case str():
            yield path, value
        case Mapping():
            for key, child in value.items():
                yield from _texts(child, f"{path}.{key}".lstrip("."))
        case list() | tuple():
            for number, child in enumerate(value):
                yield from _texts(child, f"{path}[{number}]")


def _drop_unset(value: object, plain: Any) -> object:
    """Return `plain`, the plain form of `value`, without fields that a section does not set; its `name` stays."""
    if not isinstance(value, Section):
        return plain
    kept = [name for name in plain if name in value.model_fields_set or name == "name"]
    return {name: _drop_unset(getattr(value, name), plain[name]) for name in kept}


def _names_first(value: object) -> object:
    """Move the `name` of a variant to the front of its section."""
    if isinstance(value, list):
        return [_names_first(item) for item in value]
    if not isinstance(value, dict):
        return value
    ordered = sorted(value, key=lambda key: key != "name")
    return {key: _names_first(value[key]) for key in ordered}

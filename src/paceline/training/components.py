"""Build the components of a training run: model and training state, step services, and trainer."""

import math
import shutil
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.core.run_dir import append_line
from paceline.core.statistics import Patience, TargetCriterion
from paceline.data.augment.build import place_targets
from paceline.data.batch import Batch, batch_dtype
from paceline.data.hard_sampler import HardSampler, ImageWeights
from paceline.data.transfer import DeviceTransfer
from paceline.measure.profiler import require_nvtx
from paceline.measure.throughput import IntervalTimer, RunTimer
from paceline.measure.timer import StageTimer, now_s
from paceline.parallel.build import build_strategy
from paceline.parallel.consensus import Consensus, build_replica_check
from paceline.parallel.device import generators
from paceline.parallel.process_group import RankStore, local_rank_zero_first
from paceline.parallel.strategy import Strategy
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model, is_published
from paceline.recipe.schema.sampler import Hard
from paceline.recipe.schema.train import Train
from paceline.training.checkpoint import load_model
from paceline.training.clipping import build_adaptive_clip
from paceline.training.context import RunContext
from paceline.training.coordinator import BadImageRegistry, SplitBadImages, StepCoordinator, never_stop
from paceline.training.distill import Teacher, build_criterion, check_same_teacher, load_teacher
from paceline.training.ema import build_weight_average
from paceline.training.first_inputs import MAX_IMAGES, FirstInputs
from paceline.training.goodput import GoodputTracker
from paceline.training.hard_images import ImageWeigher, LossMeter
from paceline.training.init_weights import (
    InitialWeights,
    find_initial_checkpoint,
    load_initial_weights,
    restored_origin,
)
from paceline.training.logging.base import build_sample_trace, drop_records_after
from paceline.training.loss import build_loss
from paceline.training.lr_schedule import build_lr_schedule
from paceline.training.measurements import RunMeter
from paceline.training.metrics_logger import BatchAccuracy, MetricsLogger
from paceline.training.nonfinite import GradientProbe, NonFiniteReporter, SavedBuffers, build_nonfinite_guard
from paceline.training.optim.build import build_optimizer, describe_layer_decay, layers_for_decay
from paceline.training.optim.extra_state import ExtraOptimizerState
from paceline.training.out_of_memory import ExplainedStep
from paceline.training.outputs import RunOutputs, checkpoint_storage
from paceline.training.precision import Precision
from paceline.training.preemption import Deadline, build_deadline
from paceline.training.process import RunProcess
from paceline.training.saver import CheckpointSaver, TrainingState
from paceline.training.scores import build_monitor
from paceline.training.state import StepInterval, TrainState
from paceline.training.trainer import (
    CaptureStep,
    Criterion,
    EagerStep,
    OptimizerUpdate,
    StepSeeder,
    Trainer,
    TrainStep,
)
from paceline.training.unfreeze import Unfreezing, UnfreezingStep, build_unfreezing, read_step

_RANK_0_WEIGHTS_ONLY: Final = (
    "resumed with rank 0's weights on every rank: with parallel.sync_gradients=false no others are saved"
)
MAX_IMAGE_SIZES = 8
"""`torch._dynamo.config.recompile_limit`: with more variants of a function, torch runs it eagerly."""
_COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")


@dataclass(frozen=True)
class PreparedModel:
    """A model that is ready to train; `compile_s` is the time in seconds that compiling took.

    `capture` captures its steps, or is None for eager steps.
    """

    replica: nn.Module
    criterion: Criterion
    training_state: TrainingState
    state: TrainState
    compile_s: float
    capture: CaptureStep | None
    initial_weights: InitialWeights
    unfreezing: Unfreezing


def prepare_model(context: RunContext, store: RankStore, start_from: str) -> tuple[RunContext, PreparedModel]:
    """Create the model, or load it from the checkpoint `start_from`; return the context with more notes, and the model.

    Warm-up passes compile the model per image size, and let DDP order its buckets.
    """
    recipe, measure = context.recipe, context.recipe.measure
    if measure.nvtx != "off":
        require_nvtx()
    precision = context.create_precision()
    model = context.create_model(precision, is_new=not start_from)
    if start_from:
        context.add_adapters(model)
        load_model(Path(start_from), model)
        initial_weights = restored_origin(start_from)
    else:
        weights = find_initial_checkpoint(recipe.model.weights) if context.world.is_main else ""
        checkpoint = store.broadcast("weights", weights)
        load = partial(_load_initial_weights, recipe.model, model, checkpoint)
        if is_published(recipe.model.weights):  # the first rank of each node downloads them
            initial_weights = local_rank_zero_first(store, load, lambda: None, "weights")
        else:
            initial_weights = load(True)
        context.add_adapters(model)
    unfreezing = build_unfreezing(recipe.model, context.plan, model)
    if start_from and unfreezing.is_done(read_step(Path(start_from))):
        unfreezing.unfreeze(model)
    now = now_s if measure.communication == "on" else None
    # Order matters from here: layers are numbered before FSDP shards, the optimizer takes the prepared parameters, DDP
    # orders its buckets after compilation, and compression state belongs to buckets.
    strategy = build_strategy(recipe.parallel, context.world, context.device, now, measure.warmup_steps)
    with unfreezing.all_trained(model):
        layers = layers_for_decay(recipe.optim, model)
    replica = compile_model(strategy.prepare(model), recipe.train.compile, len(context.plan.train_sizes))
    with unfreezing.all_trained(model):
        training_state = build_training_state(context, model, precision, strategy, layers, unfreezing.names)
    loss, weights_note = build_loss(recipe.train, context.datasets.train, context.device)
    teacher = _load_teacher(context, store, precision, start_from)
    if teacher:
        initial_weights = replace(initial_weights, provenance={**initial_weights.provenance, **teacher.provenance})
    criterion = build_criterion(loss, recipe.train.distill, teacher)
    state = training_state.load_state_dict(Path(start_from)) if start_from else TrainState()
    compile_timer = StageTimer()
    warm_up_replica(context, training_state, replica, state.step, compile_timer)
    comm_note = training_state.load_comm_state(Path(start_from)) if start_from else ""
    if start_from and context.world.world_size > 1 and not recipe.parallel.sync_gradients:
        comm_note = comm_note or _RANK_0_WEIGHTS_ONLY
    capture, capture_note = None, ""
    if recipe.train.capture == "on":
        from paceline.contrib.cuda_graphs import plan_capture

        optimizer = training_state.optimizer
        capture, capture_note = plan_capture(recipe.train, recipe.parallel, context.world, context.device, optimizer)
    notes = (
        initial_weights.note,
        describe_layer_decay(recipe.optim, training_state.optimizer, layers),
        weights_note,
        comm_note,
        capture_note,
    )
    return context.with_notes(*notes), PreparedModel(
        replica, criterion, training_state, state, compile_timer.total_s, capture, initial_weights, unfreezing
    )


def _load_teacher(context: RunContext, store: RankStore, precision: Precision, start_from: str) -> Teacher | None:
    """Return the teacher of `train.distill`, the same on every rank, or None without. Collective."""
    section = context.recipe.train.distill
    if section == "off":
        return None
    found = find_initial_checkpoint(section.teacher, "train.distill.teacher") if context.world.is_main else ""
    checkpoint = store.broadcast("teacher", found)

    def load(is_first: bool) -> Teacher:
        return load_teacher(context, precision, section, checkpoint, may_download=is_first)

    # The first rank of each node downloads published weights.
    is_shared = is_published(section.teacher)
    teacher = local_rank_zero_first(store, load, lambda: None, "teacher_weights") if is_shared else load(True)
    if start_from:
        check_same_teacher(teacher, start_from, section)
    return teacher


def _load_initial_weights(section: Model, model: nn.Module, checkpoint: str, is_first: bool) -> InitialWeights:
    return load_initial_weights(section, model, checkpoint, may_download=is_first)


def compile_model(replica: nn.Module, mode: str, num_sizes: int = 1) -> nn.Module:
    """Return `replica` compiled in `mode`, or itself for `off`. Raise `RecipeError` without a C++ compiler."""
    if mode == "off":
        return replica
    if not any(shutil.which(name) for name in _COMPILERS):
        raise RecipeError(f"train.compile: {mode} needs a compiler (install g++, or set train.compile=off)")
    # torch 2.11 recommends TF32 for any float32 product on a GPU; the recipe decides that.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # Code per image size is faster than code for any size. DDP is compiled from outside: torch then splits the backward
    # graph where gradients are sent; a graph of the model alone would delay communication to the end of backward.
    compiled = torch.compile(
        replica, mode=None if mode == "default" else mode, dynamic=False if num_sizes <= MAX_IMAGE_SIZES else None
    )
    assert isinstance(compiled, nn.Module)
    return compiled


def warm_up_replica(
    context: RunContext, training_state: TrainingState, replica: nn.Module, step: int, compile_timer: StageTimer
) -> None:
    """Run passes that compile `replica` for the image sizes from global step `step` on, and order DDP's buckets."""
    plan, precision = context.plan, training_state.precision
    transfer = context.create_transfer(precision.dtype)
    warm_up = partial(warmup_pass, training_state.model, replica, transfer, precision, plan)
    if context.recipe.train.compile != "off":
        with compile_timer.turn():
            for first in (step, *(start for start, _ in plan.train_sizes if start > step)):
                warm_up(first)
    training_state.strategy.warm_up_buckets(partial(warm_up, step))


def warmup_pass(
    model: nn.Module, replica: nn.Module, transfer: DeviceTransfer, precision: Precision, plan: Plan, step: int
) -> None:
    """Run forward and backward on zeros of the image size at step `step`; restore buffers and drop gradients."""
    size = plan.train_size(step)
    images = torch.zeros(
        plan.micro_batch, plan.channels, size, size, dtype=batch_dtype(transfer.pixels), device=transfer.device
    )
    buffers = SavedBuffers(model)
    with precision.autocast():
        logits = replica(transfer.normalize(images))
    logits.float().sum().backward()
    model.zero_grad(set_to_none=True)
    buffers.restore()


def build_training_state(
    context: RunContext,
    model: nn.Module,
    precision: Precision,
    strategy: Strategy,
    layers: dict[str, int],
    late: Collection[str] = (),
) -> TrainingState:
    """Build optimizer, average and schedule of a prepared `model`.

    `layers` is from `layers_for_decay`, and `late` are the names of parameters that are unfrozen later.
    """
    recipe = context.recipe
    named = precision.optimized_parameters(model)
    optimizer = build_optimizer(recipe.optim, named, context.device.type, layers, late)
    average = build_weight_average(recipe.train.ema, model, optimizer, named)
    schedule = build_lr_schedule(
        recipe.schedule, context.plan, is_minimized=build_monitor(recipe, default="loss").is_minimized
    )
    extra_state = ExtraOptimizerState.from_optimizer(optimizer, recipe.optim.name)
    weights = context.sampler.weights if isinstance(context.sampler, HardSampler) else ImageWeights()
    return TrainingState(model, optimizer, schedule, precision, average, strategy, extra_state, weights)


def build_run_deadline(context: RunContext, process: RunProcess, outputs: RunOutputs) -> Deadline | None:
    """Return the deadline that stops the run before its batch job ends, if that has an end."""
    plan, invocation = context.plan, process.invocation
    return build_deadline(
        invocation.batch_job,
        context.world,
        StepInterval(plan.eval_every, plan.total_steps),
        lambda: outputs.writer.slowest_s if outputs.writer else 0.0,
        invocation.interrupts.request,
        process.warn,
        grace_s=context.recipe.checkpoint.grace.seconds,
    )


def build_trainer(
    context: RunContext,
    process: RunProcess,
    prepared: PreparedModel,
    outputs: RunOutputs,
    consensus: Consensus,
    timer: RunTimer,
    meter: RunMeter,
) -> Trainer:
    """Build the training loop around a prepared model."""
    recipe, plan, world = context.recipe, context.plan, context.world
    training_state, state, clock = prepared.training_state, prepared.state, meter.clock
    precision, strategy, schedule = training_state.precision, training_state.strategy, training_state.schedule
    accuracy = BatchAccuracy(plan.num_classes, context.device) if recipe.train.accuracy == "on" else None
    trace = build_sample_trace(recipe.log, process.rundir, world.rank, state.step)
    if trace:
        context.exit_stack.callback(trace.close)
    reporter = NonFiniteReporter(
        world, strategy, lambda: str(checkpoint_storage(context, process.rundir).newest() or "none")
    )
    limit, stop = recipe.data.max_bad_images, recipe.train.stop
    bad_images = BadImageRegistry(context.datasets, limit, consensus.union, outputs.log_bad_image, state.bad_images)
    replica_check = build_replica_check(recipe.parallel, world, training_state.model, plan.check_replicas_every)
    save_timer = IntervalTimer(plan.checkpoint_every_s if world.is_main else 0.0)
    update = build_update(context, training_state, reporter, prepared.unfreezing)
    step = EagerStep(
        replica=prepared.replica,
        criterion=prepared.criterion,
        precision=precision,
        strategy=strategy,
        transfer=meter.transfer,
        transforms=context.create_transforms(precision.dtype),
        update=update,
        clock=clock,
        accumulate=recipe.train.num_micro_batches,
        accuracy=accuracy,
    )
    seeder = StepSeeder(recipe.seed, world.rank, generators(context.device))
    train_step: TrainStep = prepared.capture(step, outputs.sinks.warned) if prepared.capture else step
    if prepared.unfreezing.names and not prepared.unfreezing.is_done(state.step):
        unfreeze = partial(unfreeze_step, context, training_state, prepared.unfreezing)
        train_step = UnfreezingStep(step, prepared.unfreezing.step, unfreeze, seeder, outputs.log_pause)
    return Trainer(
        model=training_state.model,
        step=ExplainedStep(train_step, context, training_state),
        guard=update.guard,
        schedule=schedule,
        loader=meter.loader,
        weigher=build_image_weigher(context, process, training_state, bad_images.for_split("train")),
        log_pause=outputs.log_pause,
        record_inputs=_build_input_recorder(context, process, precision),
        evaluate_model=context.create_evaluator(
            precision,
            strategy,
            training_state.average,
            bad_images,
            process.should_stop_evaluation,
            process.progress.on_wait,
        ),
        save_state=CheckpointSaver(
            training_state, outputs.checkpoint_values, outputs.writer, lambda: outputs.time_spent(clock.drain())
        ),
        coordinator=StepCoordinator(
            consensus,
            process.invocation.interrupts,
            process.deadline,
            save_timer,
            bad_images.for_split("train"),
            replica_check,
            build_time_limit(recipe.train, outputs.goodput),
        ),
        target=None if stop == "off" else TargetCriterion(stop.top1, stop.patience),
        patience=build_patience(recipe.train, plan),
        monitor=build_monitor(recipe, context.default_monitor),
        plateau_metric=build_monitor(recipe, default="loss"),
        has_max_time=recipe.train.max_time != "off",
        clock=clock,
        logger=MetricsLogger(
            plan,
            strategy,
            schedule,
            outputs.sinks,
            trace,
            timer,
            accuracy,
            state,
            clock.pop_shares,
            outputs.on_step,
        ),
        seeder=seeder,
        eval_every=StepInterval(plan.eval_every, plan.total_steps),
        save_every=StepInterval(plan.checkpoint_every, plan.total_steps),
        saves_at_end=recipe.checkpoint.every != "off",
        batch_size=plan.batch_size,
        total_steps=plan.total_steps,
    )


def build_image_weigher(
    context: RunContext, process: RunProcess, training_state: TrainingState, bad_images: SplitBadImages
) -> ImageWeigher | None:
    """Return what weighs the training images for `data.sampler=hard`; None for other samplers."""
    section, plan, datasets = context.recipe.data.sampler, context.plan, context.datasets
    if not isinstance(section, Hard):
        return None
    weights, path = training_state.image_weights, process.rundir.hard_images
    if context.world.is_main:
        drop_records_after(path, weights.step)
    return ImageWeigher(
        section,
        steps=section.steps(plan.steps_per_epoch, plan.total_steps),
        weights=weights,
        evaluator=context.create_loss_evaluator(
            training_state.precision, training_state.strategy, bad_images, process.should_stop_evaluation
        ),
        new_meter=partial(
            LossMeter,
            plan.train_images,
            context.device,
            place_targets(datasets.train.info.targets, context.device),
            is_multi_label=context.is_multi_label,
        ),
        is_main=context.world.is_main,
        log=partial(append_line, path),
    )


def build_patience(section: Train, plan: Plan) -> Patience:
    """Return the patience of `train.patience`, with durations converted to steps by `plan`."""
    if section.patience == "off":
        return Patience()
    if isinstance(section.patience, int):
        return Patience(evaluations=section.patience)
    return Patience(steps=max(1, plan.steps(section.patience)))


def build_time_limit(section: Train, goodput: GoodputTracker | None) -> Callable[[], bool]:
    """Return whether the time of `train.max_time` is up, by rank 0's clock; other ranks, without `goodput`, follow."""
    if section.max_time == "off" or goodput is None:
        return never_stop
    limit_s = section.max_time.seconds
    return lambda: goodput.running_s() >= limit_s


def _build_input_recorder(context: RunContext, process: RunProcess, precision: Precision) -> Callable[[Batch], None]:
    if not context.world.is_main:
        return lambda batch: None
    mean, std = context.mean_and_std
    return FirstInputs(
        folder=process.rundir.inputs,
        source=context.datasets.train,
        transfer=context.create_transfer(precision.dtype),
        transforms=context.create_transforms(precision.dtype),
        mean=mean,
        std=std,
        augment_on=context.augment_location,
        micro_batches=context.recipe.train.num_micro_batches,
        number=MAX_IMAGES if context.recipe.log.worst else 0,
        warn=process.warn,
    )


def unfreeze_step(
    context: RunContext, training_state: TrainingState, unfreezing: Unfreezing, step: EagerStep
) -> EagerStep:
    """Return `step` with all parameters trained, as a run that resumes at `unfreezing.step` builds it. Collective."""
    model, strategy, compile_mode = training_state.model, training_state.strategy, context.recipe.train.compile
    if compile_mode != "off":
        torch._dynamo.reset()  # the limit of variants is for one phase
    unfrozen = strategy.unfreeze(model, partial(unfreezing.unfreeze, model))
    replica = compile_model(unfrozen, compile_mode, len(context.plan.train_sizes))
    warm_up_replica(context, training_state, replica, unfreezing.step, StageTimer())
    if context.recipe.measure.clock == "on":  # only now, as the clock is paused
        strategy.on_comm_wait(step.clock.switch_stage, compiled=compile_mode != "off")
    return replace(step, replica=replica, update=replace(step.update, probe=GradientProbe(model)))


def build_update(
    context: RunContext, training_state: TrainingState, reporter: NonFiniteReporter, unfreezing: Unfreezing
) -> OptimizerUpdate:
    """Build the optimizer step of a prepared model."""
    master = training_state.precision.master
    with unfreezing.all_trained(training_state.model):
        clip = build_adaptive_clip(
            context.recipe.train.clip_agc, training_state.model, master, context.plan.num_classes
        )
    train, optimizer, precision = context.recipe.train, training_state.optimizer, training_state.precision
    return OptimizerUpdate(
        parameters=[parameter for group in optimizer.param_groups for parameter in group["params"]],
        optimizer=optimizer,
        schedule=training_state.schedule,
        precision=precision,
        strategy=training_state.strategy,
        guard=build_nonfinite_guard(train, precision, reporter, context.device),
        rollback=SavedBuffers(training_state.model) if train.on_nonfinite == "skip" else None,
        probe=GradientProbe(training_state.model),
        average=training_state.average,
        max_norm=math.inf if train.clip_norm == "off" else train.clip_norm,
        adaptive_clip=clip,
    )

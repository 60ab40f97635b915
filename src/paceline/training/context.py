"""The recipe, world, device, datasets and plan of a run, and the components that depend on several of them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.dataset import Datasets, Source, Split
from paceline.core.errors import RecipeError
from paceline.core.host import rank_cores
from paceline.core.results import BatchNormCheck
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.data.augment.build import DeviceTransforms, build_device_transforms, place_targets
from paceline.data.loaders.build import (
    NUM_REPLAYED_BATCHES,
    Loader,
    LoaderOptions,
    ReplayLoader,
    build_eval_loader,
    build_train_loader,
)
from paceline.data.loaders.choose import LoaderChoice, choose_loader
from paceline.data.loaders.process import BATCHES_PER_WORKER
from paceline.data.loaders.sampler import build_sampler, count_samples
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.sampler import Sampler
from paceline.data.transfer import DeviceTransfer
from paceline.data.workers import check_worker_limits, estimate_batch_bytes
from paceline.measure.timer import now_s
from paceline.models.activations import checkpoint_activations
from paceline.models.build import build_model
from paceline.models.freeze import set_training_mode
from paceline.models.layers import init_from_data, needs_data_init
from paceline.models.lora import add_adapters
from paceline.models.validate import choose_memory_format
from paceline.parallel.device import choose_device, set_threads
from paceline.parallel.process_group import RankStore, local_rank_zero_first, process_group
from paceline.parallel.strategy import Strategy
from paceline.parallel.sync_batch_norm import convert_sync_batch_norm
from paceline.recipe.plan import Plan, mean_and_std, resolve_batch, worker_timeout_warning
from paceline.recipe.schema import Recipe
from paceline.recipe.targets import is_multi_label
from paceline.training.coordinator import BadImageRegistry, SplitBadImages, never_stop
from paceline.training.datasets import ReadData, share_statistics
from paceline.training.ema import WeightAverage
from paceline.training.evaluator import EVAL_VIEWS, BatchNormChecker, ModelEvaluator, SplitEvaluator
from paceline.training.precision import Precision, build_precision, set_numerics
from paceline.training.scores import NO_METRICS, ExtraMetrics, do_nothing

_IMAGES_TO_CHECK = 512
"""Images per rank for the BatchNorm check; the standard error is at most 2 percentage points."""
_IMAGES_TO_FIT = 5000
"""Images that data-dependent layers are fitted to, as in airbench (arXiv 2404.00498)."""


class WarningRelay:
    """Pass warnings on to the log of the run; those that come before it is open wait for it."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._receiver: Callable[[str], None] = self._waiting.append

    def __call__(self, message: str) -> None:
        """Pass a warning on."""
        self._receiver(message)

    def connect(self, receiver: Callable[[str], None]) -> None:
        """Pass on what has waited, and all that follows, to `receiver`."""
        self._receiver = receiver
        while self._waiting:
            receiver(self._waiting.pop(0))


@dataclass(frozen=True)
class RunContext:
    """Recipe, world, device, datasets, plan and sampler of a run.

    `exit_stack` closes the loaders that it creates.
    """

    recipe: Recipe
    world: World
    device: torch.device
    datasets: Datasets
    plan: Plan
    sampler: Sampler
    loader_choice: LoaderChoice
    exit_stack: contextlib.ExitStack
    memory_format: torch.memory_format = torch.channels_last
    loader_warnings: WarningRelay = field(default_factory=WarningRelay)

    @classmethod
    def derive(
        cls,
        recipe: Recipe,
        world: World,
        device: torch.device,
        datasets: Datasets,
        exit_stack: contextlib.ExitStack,
        train_ranks: int | None = None,
    ) -> "RunContext":
        """Return the context for training on `train_ranks` ranks, by default those of the world."""
        recipe = resolve_batch(recipe, train_ranks or world.world_size)
        train, num_ranks = datasets.train.info, train_ranks or world.world_size
        num_samples = count_samples(recipe.data, train.num_images)
        plan = Plan.derive(recipe, num_ranks, train, datasets.val.info, num_samples)
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        cores = rank_cores(world)
        choice = choose_loader(recipe.data, datasets.train, device=device.type, cores=cores, free_bytes=free_bytes)
        layout = choose_memory_format(recipe.model, device, num_classes=plan.num_classes, channels=plan.channels)
        sampler = build_sampler(recipe.data, datasets.train, plan.steps)
        context = cls(recipe, world, device, datasets, plan, sampler, choice, exit_stack, layout)
        return context.with_notes(choice.note, worker_timeout_warning(recipe.data, recipe.parallel, choice.workers))

    def with_notes(self, *notes: str | None) -> "RunContext":
        """Return a copy whose plan has the given `notes` too, empty ones left out."""
        more = (note for note in notes if note)
        return replace(self, plan=replace(self.plan, notes=(*self.plan.notes, *more)))

    @property
    def is_multi_label(self) -> bool:
        """Whether the model gives each class a probability of its own."""
        return is_multi_label(self.recipe.train.loss, self.datasets.train.info)

    @property
    def default_monitor(self) -> str:
        """The metric of `train.monitor=auto`."""
        return "ap" if self.is_multi_label else "top1"

    @property
    def augment_location(self) -> str | None:
        """`host` or `device`, on which batches are augmented; None without augmentation."""
        if not self.recipe.data.augment:
            return None
        return "device" if self._loader_options.on_device else "host"

    def check_worker_limits(self) -> None:
        """Raise `WorldError` if the node has no room for the batches that worker processes prefetch."""
        plan, local_ranks = self.plan, self.world.local_world_size
        form = self.datasets.train.info.pixel_format
        train = estimate_batch_bytes(plan.rank_batch, form, max(size for _, size in plan.train_sizes))
        evaluated = estimate_batch_bytes(plan.eval_batch, form, plan.eval_image_size)
        processes = self.loader_choice.workers if self.loader_choice.loader == "processes" else 0
        check_worker_limits(processes, BATCHES_PER_WORKER, train + evaluated, local_ranks)

    def create_precision(self) -> Precision:
        """Return the precision of the run, and set the GPU's global numeric flags to match."""
        train = self.recipe.train
        if train.cudnn_benchmark == "on" and self.device.type != "cuda":
            raise RecipeError("train.cudnn_benchmark: on has no effect on a CPU (set train.cudnn_benchmark=auto)")
        has_one_size = len(self.plan.train_sizes) == 1
        benchmark = has_one_size if train.cudnn_benchmark == "auto" else train.cudnn_benchmark == "on"
        set_numerics(train.precision, self.device, benchmark=benchmark)
        return build_precision(train.precision, self.device)

    def create_model(self, precision: Precision, *, is_new: bool) -> nn.Module:
        """Return the model on the device in training mode, initialized from the recipe's seed alone.

        If it `is_new`, data-dependent layers are fitted to training images.
        """
        torch.manual_seed(self.recipe.seed)
        plan = self.plan
        model = build_model(
            self.recipe.model, num_classes=plan.num_classes, channels=plan.channels, image_size=plan.image_size
        )
        if is_new and needs_data_init(model):
            init_from_data(model, self._read_images_to_fit())
        precision.cast_model(model)
        model.to(self.device)
        if self.recipe.model.norm == "sync_batch":
            model = convert_sync_batch_norm(model, self.device)
        # After `convert_sync_batch_norm`, which replaces the norms.
        set_training_mode(self.recipe.model, model, self.plan.num_classes)
        checkpoint_activations(self.recipe.model, model)
        return model.to(memory_format=self.memory_format)

    def add_adapters(self, model: nn.Module) -> None:
        """Add the adapters of `model.lora`, if any, to a model whose other weights are loaded, in place."""
        section, plan = self.recipe.model, self.plan
        if section.lora != "off":
            add_adapters(section, model, plan, self.recipe.seed)
            set_training_mode(section, model, plan.num_classes)

    @property
    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation per channel, of pixels in [0, 1], that normalize both splits."""
        return mean_and_std(self.recipe.data, self.datasets.train.info)

    def create_transfer(
        self, dtype: torch.dtype, *, timed: bool = False, device: torch.device | None = None
    ) -> DeviceTransfer:
        """Return the transfer, measured if `timed`, that copies batches to the device and normalizes to `dtype`."""
        pixels = self.datasets.train.info.pixels
        target = device or self.device
        return DeviceTransfer(target, dtype, *self.mean_and_std, self.memory_format, pixels=pixels, timed=timed)

    def create_train_loader(self, transfer: DeviceTransfer) -> Loader:
        """Return the training loader of this rank; `transfer` copies batches that `data.replay` keeps on the device."""
        plan, world, data = self.plan, self.world, self.recipe.data
        order = TrainOrder(
            self.recipe.seed,
            plan.train_images,
            plan.batch_size,
            world.rank,
            world.world_size,
            sampler=self.sampler,
        )
        options = replace(self._loader_options, clock=now_s if self.recipe.measure.clock == "on" else None)
        loader = self._close_at_end(
            build_train_loader(data, self.datasets.train, order, plan.train_size, options, plan.steps)
        )
        if data.replay == "off":
            return loader
        return ReplayLoader(loader, NUM_REPLAYED_BATCHES, transfer.to_device if data.replay == "device" else None)

    def create_eval_loader(
        self, source: Source, num_images: int, *, has_same_batches: bool = False
    ) -> tuple[Loader, int]:
        """Return this rank's loader and number of batches to evaluate `num_images` images of `source`."""
        plan, world = self.plan, self.world
        shard = EvalShard(num_images, plan.eval_batch, world.rank, world.world_size, len(source), has_same_batches)
        loader = build_eval_loader(self.recipe.data, source, shard, plan.eval_image_size, self._loader_options)
        return self._close_at_end(loader), shard.num_batches

    def create_transforms(self, dtype: torch.dtype) -> DeviceTransforms:
        """Return the transforms of batches on the device, in `dtype`."""
        transfer = self.create_transfer(dtype)
        return build_device_transforms(
            self.recipe.data,
            transfer,
            self.plan.num_classes,
            on_device=self._loader_options.on_device,
            targets=self.datasets.train.info.targets,
        )

    def create_evaluator(
        self,
        precision: Precision,
        strategy: Strategy,
        average: WeightAverage | None,
        bad_images: BadImageRegistry | None = None,
        should_stop: Callable[[], bool] = never_stop,
        on_progress: Callable[[], None] = do_nothing,
        *,
        calibrates: bool = False,
        lists_predictions: bool = False,
    ) -> ModelEvaluator:
        """Return the evaluator of this rank's shards; it aborts once `should_stop` returns True on a rank.

        It calls `on_progress` while rank 0 computes metrics. Without `bad_images`, an unreadable image is an error.
        With `calibrates` it fits a temperature to the validation images; with `lists_predictions` or
        `log.predictions` it returns that of each image, unless it has several labels.
        """
        plan, datasets = self.plan, self.datasets
        if calibrates and datasets.val.info.targets is not None:
            raise RecipeError("--calibrate: needs one class per image, and these have several or shares (leave it out)")
        lists_predictions = lists_predictions or self.recipe.log.predictions == "on"

        def evaluator(
            split: Split, source: Source, num_images: int, num_worst: int = 0, metrics: ExtraMetrics = NO_METRICS
        ) -> SplitEvaluator:
            loader, num_batches = self.create_eval_loader(source, num_images)
            return SplitEvaluator(
                loader=loader,
                num_batches=num_batches,
                num_images=num_images,
                class_names=datasets.train.info.class_names,
                transfer=self.create_transfer(precision.dtype),
                precision=precision,
                strategy=strategy,
                device=self.device,
                views=EVAL_VIEWS[self.recipe.data.eval_views],
                should_stop=should_stop,
                bad_images=bad_images.for_split(split) if bad_images else None,
                num_worst=num_worst,
                metrics=metrics,
                on_progress=on_progress,
                calibrates=calibrates and split == "val",
                lists_predictions=lists_predictions and split == "val",
                targets=place_targets(source.info.targets, self.device),
                threshold=self.recipe.train.label_threshold if self.is_multi_label else None,
            )

        metrics = ExtraMetrics.from_recipe(self.recipe)
        val = evaluator("val", datasets.val, plan.val_images, self.recipe.log.worst, metrics)
        if self.recipe.train.eval_train == "off":
            return ModelEvaluator(val, average)
        return ModelEvaluator(val, average, evaluator("train", datasets.train, min(plan.val_images, plan.train_images)))

    def create_loss_evaluator(
        self, precision: Precision, strategy: Strategy, bad_images: SplitBadImages, should_stop: Callable[[], bool]
    ) -> SplitEvaluator:
        """Return the evaluator of all training images: ranks divide the same batches of `plan.eval_batch` images."""
        source, num_images = self.datasets.train, self.plan.train_images
        loader, num_batches = self.create_eval_loader(source, num_images, has_same_batches=True)
        return SplitEvaluator(
            loader=loader,
            num_batches=num_batches,
            num_images=num_images,
            class_names=source.info.class_names,
            transfer=self.create_transfer(precision.dtype),
            precision=precision,
            strategy=strategy,
            device=self.device,
            should_stop=should_stop,
            bad_images=bad_images,
        )

    def check_batch_norm(
        self, precision: Precision, strategy: Strategy, average: WeightAverage | None, model: nn.Module
    ) -> BatchNormCheck | None:
        """Run `BatchNormChecker` on the evaluated weights of `model`. Collective."""
        # No worker processes: they would take longer to start than these few images take to decode.
        source, plan, world = self.datasets.train, self.plan, self.world
        num_images = min(_IMAGES_TO_CHECK * world.world_size, len(source))
        shard = EvalShard(num_images, plan.eval_batch, world.rank, world.world_size, split_size=len(source))
        options = LoaderOptions(workers=0, pin_memory=False)
        loader = self._close_at_end(build_eval_loader(self.recipe.data, source, shard, plan.eval_image_size, options))
        transfer = self.create_transfer(precision.dtype)
        targets = place_targets(source.info.targets, torch.device("cpu"))
        row_classes = None if targets is None else targets.argmax(dim=1)
        checker = BatchNormChecker(loader, shard.num_batches, transfer, precision, strategy, self.device, row_classes)
        with average.swapped() if average else contextlib.nullcontext():
            return checker(model)

    def _close_at_end(self, loader: Loader) -> Loader:
        return self.exit_stack.enter_context(contextlib.closing(loader))

    def _read_images_to_fit(self) -> Tensor:
        """Return a sample of normalized training images, float32 [N, C, H, W], the same on every rank."""
        source, plan = self.datasets.train, self.plan
        shard = EvalShard(min(_IMAGES_TO_FIT, len(source)), plan.eval_batch, split_size=len(source))
        options = LoaderOptions(workers=0, pin_memory=False)
        loader = build_eval_loader(self.recipe.data, source, shard, plan.image_size, options)
        transfer = self.create_transfer(torch.float32, device=torch.device("cpu"))
        return torch.cat([transfer.normalize(batch.images) for batch in loader.batches(0, shard.num_batches)])

    @property
    def _loader_options(self) -> LoaderOptions:
        location = self.recipe.data.augment_on
        on_device = self._is_gpu if location == "auto" else location == "device"
        return LoaderOptions(
            self.loader_choice.workers,
            pin_memory=self._is_gpu,
            on_device=on_device,
            loader=self.loader_choice.loader,
            device=self.device,
            warn=self.loader_warnings,
        )

    @property
    def _is_gpu(self) -> bool:
        return self.device.type == "cuda"


@contextlib.contextmanager
def open_context(
    recipe: Recipe,
    store: RankStore,
    read: ReadData,
    train_ranks: int,
    on_wait: Callable[[], None] = lambda: None,
    trained: RunDir | None = None,
) -> Iterator[RunContext]:
    """Choose the device, create the process group, `read` the data, and plan training on `train_ranks` ranks.

    `on_wait` is called repeatedly while another rank reads the data. Statistics that a run has measured are taken from
    the run directory `trained`.
    """
    world = store.world
    device = choose_device(recipe.parallel, world)
    set_threads(recipe.parallel, world)
    with process_group(store, recipe.parallel, device), contextlib.ExitStack() as exit_stack:
        recipe, datasets = local_rank_zero_first(store, partial(read, exit_stack), on_wait)
        datasets = share_statistics(recipe.data, datasets, store, on_wait, trained)
        context = RunContext.derive(recipe, world, device, datasets, exit_stack, train_ranks)
        context.check_worker_limits()
        yield context

"""Derive the plan of a run from its recipe and dataset: steps, batch sizes, image sizes and learning rate."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard

from paceline.core.errors import DataError, RecipeError
from paceline.core.units import Duration, count
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.augment import AnyPixels, ColorJitter, CutMix, Cutout, Grayscale, MixUp, OwnAugment, PadCrop
from paceline.recipe.schema.base import Auto, Off
from paceline.recipe.schema.data import Data, Progressive
from paceline.recipe.schema.model import is_published
from paceline.recipe.schema.optim import OneCycle, OptimSection, RangeTest, ScheduleSection, Step
from paceline.recipe.schema.recipe import Checkpoint
from paceline.recipe.schema.sampler import Balanced, Hard, Repeated, SamplerSection, Weighted
from paceline.recipe.schema.train import Ema, Parallel, Train
from paceline.recipe.targets import check_targets

if TYPE_CHECKING:
    from paceline.core.dataset import DatasetInfo  # imports numpy, before the first line of a command

_MIN_STEPS_PER_EPOCH = 8  # of a suggested batch size
_MAX_DROPPED_SHARE = 1 / _MIN_STEPS_PER_EPOCH
# Images per rank and step below which BatchNorm statistics cost accuracy (Wu and He 2018, arXiv 1803.08494, figure 1)
# and GPUs are rarely busy.
_FEW_IMAGES = 32
_MIN_RANK_BATCH = 8  # of `data.batch_size=auto`


@dataclass(frozen=True)
class Plan:
    """Sizes, steps and intervals of a run.

    `batch_size` counts images over all ranks, `rank_batch` those of a rank, and `micro_batch` those of one forward
    pass. `dropped_images` are left out at the end of each epoch, different ones every time. Images are squares of
    `image_size` and, in evaluation, `eval_image_size` pixels; `train_sizes` holds (first step, size in pixels), in
    order. `eval_every`, `checkpoint_every`, `checkpoint_keep_every`, `check_replicas_every` and `log_every` are in
    steps, `checkpoint_every_s` is in seconds, and 0 means never. `notes` are warnings. `class_images`, the images of
    the smallest and the largest class, and `disk_bytes` of the most checkpoints that are kept at once are 0 until the
    run starts. Frozen parameters train from global step `unfreeze_step` on; 0 means never.
    """

    world_size: int
    batch_size: int
    rank_batch: int
    micro_batch: int
    eval_batch: int
    train_images: int
    val_images: int
    num_classes: int
    channels: int
    image_size: int
    eval_image_size: int
    train_sizes: tuple[tuple[int, int], ...]
    steps_per_epoch: int
    dropped_images: int
    total_steps: int
    eval_every: int
    checkpoint_every: int
    checkpoint_every_s: float
    checkpoint_keep_every: int
    check_replicas_every: int
    log_every: int
    peak_lr: float
    lr_sentence: str
    notes: tuple[str, ...] = ()
    class_images: tuple[int, int] = (0, 0)
    disk_bytes: int = 0
    unfreeze_step: int = 0

    @classmethod
    def derive(
        cls,
        recipe: Recipe,
        world_size: int,
        train: "DatasetInfo",
        val: "DatasetInfo",
        num_samples: int | None = None,
    ) -> Self:
        """Derive the plan of `recipe` on `world_size` ranks. Raise `RecipeError` or `DataError` if it does not fit.

        `num_samples` are the sampler's samples per epoch, by default as many as training images.
        """
        recipe = resolve_batch(recipe, world_size)
        data, batch_size = recipe.data, recipe.data.global_batch_size
        micro_batch = divide_batch(recipe, world_size)
        num_samples = train.num_images if num_samples is None else num_samples
        are_images = num_samples == train.num_images
        samples = "training images" if are_images else f"samples per epoch of {data.sampler.name}"
        steps_per_epoch = num_samples // batch_size  # incomplete batches are dropped
        if steps_per_epoch == 0:
            suggested = _suggest_batch_size(num_samples, _divisor(data, recipe.train.num_micro_batches, world_size))
            fix = f"try {suggested}" if suggested else "add images, or use fewer ranks"
            raise RecipeError(f"data.batch_size: {batch_size} is more than the {num_samples} {samples} ({fix})")
        _check_repeats(data, batch_size)
        if val.num_images == 0 and recipe.train.eval_every != "off":
            why = f": {val.notes[0]}" if val.notes else ""
            raise DataError(
                f"data.source: there are no validation images{why} (name some, or set train.eval_every=off)"
            )
        check_targets(recipe.train, train)
        _check_statistics(recipe, train)
        total_steps = _total_steps(recipe.train, steps_per_epoch)
        to_steps = partial(
            Duration.steps, steps_per_epoch=steps_per_epoch, batch_size=batch_size, total_steps=total_steps
        )

        def interval(duration: Duration | Literal["off"]) -> int:
            if duration == "off" or duration.is_time:
                return 0
            # An interval that rounds to 0 steps must not turn it off.
            return max(1, to_steps(duration))

        save = recipe.checkpoint
        checkpoint_every, checkpoint_keep_every = interval(save.every), interval(save.keep_every)
        _check_keep_every(save, checkpoint_every, checkpoint_keep_every)
        peak_lr = recipe.optim.lr * lr_factor(recipe.optim, batch_size)
        # Evaluation keeps no activations for a backward pass.
        eval_batch = 2 * micro_batch if data.eval_batch_size == "auto" else data.eval_batch_size
        image_size = train_image_size(data, train)
        train_sizes = _train_sizes(data.progressive, image_size, range(0, total_steps, steps_per_epoch), to_steps)
        unfreeze_step = interval(recipe.model.unfreeze)
        check_effects(recipe, train, min(size for _, size in train_sizes))
        return cls(
            world_size=world_size,
            batch_size=batch_size,
            rank_batch=micro_batch * recipe.train.num_micro_batches,
            micro_batch=micro_batch,
            eval_batch=eval_batch,
            train_images=train.num_images,
            val_images=val.num_images,
            num_classes=train.num_classes,
            channels=train.channels,
            image_size=image_size,
            eval_image_size=eval_image_size(data, train),
            train_sizes=train_sizes,
            steps_per_epoch=steps_per_epoch,
            dropped_images=num_samples - steps_per_epoch * batch_size,
            total_steps=total_steps,
            eval_every=interval(recipe.train.eval_every),
            checkpoint_every=checkpoint_every,
            checkpoint_every_s=save.every.seconds if save.every != "off" and save.every.is_time else 0.0,
            checkpoint_keep_every=checkpoint_keep_every,
            check_replicas_every=interval(recipe.parallel.check_replicas),
            log_every=interval(recipe.log.every),
            peak_lr=peak_lr,
            lr_sentence=lr_sentence(recipe.optim, recipe.schedule, batch_size, peak_lr),
            notes=(
                *(f"{info.split}: {note}" for info in (train, val) for note in info.notes),
                *_note_dropped_images(
                    batch_size,
                    num_samples,
                    samples,
                    steps_per_epoch,
                    _divisor(data, recipe.train.num_micro_batches, world_size),
                ),
                *_note_beyond_end(
                    recipe.schedule,
                    recipe.train.ema,
                    to_steps,
                    total_steps,
                ),
                *_note_never_unfrozen(unfreeze_step, total_steps),
                *_note_never_weighed(data.sampler, steps_per_epoch, total_steps),
                *_note_balanced_twice(data, recipe.train),
                *_note_below_size(train_sizes, image_size, total_steps),
                *_note_preprocessing(recipe, image_size, train),
            ),
            unfreeze_step=unfreeze_step,
        )

    def steps(self, duration: Duration) -> int:
        """Return the number of steps in `duration`."""
        return duration.steps(
            steps_per_epoch=self.steps_per_epoch, batch_size=self.batch_size, total_steps=self.total_steps
        )

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a global step, both from 0."""
        return step // self.steps_per_epoch

    def train_size(self, step: int) -> int:
        """Return the height and width in pixels of training images at global step `step`."""
        return self.train_sizes[bisect_right(self.train_sizes, step, key=lambda entry: entry[0]) - 1][1]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for `plan.json`."""
        return asdict(self)


def eval_image_size(data: Data, train: "DatasetInfo") -> int:
    """Return the height and width in pixels of evaluated images.

    Raise `RecipeError` if no size is set and the dataset's images are not square.
    """
    size = data.eval_image_size
    return train_image_size(data, train) if size == "auto" else size


def resolve_batch(recipe: Recipe, world_size: int) -> Recipe:
    """Return `recipe` with `data.rank_batch_size` converted to `data.batch_size` for `world_size` ranks.

    Raise `RecipeError` if both are set and disagree, or if a rank's batch does not divide into micro-batches.
    """
    data = recipe.data
    if data.rank_batch_size == "auto":
        return recipe
    batch_size = data.rank_batch_size * world_size
    if data.batch_size not in ("auto", batch_size):
        raise RecipeError(
            f"data.rank_batch_size: {data.rank_batch_size} on {count(world_size, 'rank')} is "
            f"{count(batch_size, 'image')} per step, but data.batch_size is {data.batch_size} (leave one of them out)"
        )
    if recipe.train.accumulate != "auto":
        _check_divides("data.rank_batch_size", data.rank_batch_size, data, recipe.train, 1)
    return with_batch_size(recipe, batch_size)


def with_batch_size(recipe: Recipe, batch_size: int | Auto) -> Recipe:
    """Return `recipe` with `batch_size` images per step over all ranks."""
    data = recipe.data.model_copy(update={"batch_size": batch_size, "rank_batch_size": "auto"})
    return recipe.model_copy(update={"data": data})


def with_accumulate(recipe: Recipe, accumulate: int | Auto) -> Recipe:
    """Return `recipe` with `accumulate` micro-batches per rank and step."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"accumulate": accumulate})})


def write_batch(recipe: Recipe) -> str:
    """Return the batch size and the number of micro-batches as text, for `read_batch`."""
    return f"{recipe.data.batch_size} {recipe.train.accumulate}"


def read_batch(recipe: Recipe, text: str) -> Recipe:
    """Return `recipe` with the numbers in `text`, from `write_batch`."""
    batch_size, accumulate = text.split()
    recipe = with_batch_size(recipe, "auto" if batch_size == "auto" else int(batch_size))
    return with_accumulate(recipe, "auto" if accumulate == "auto" else int(accumulate))


def smallest_batch(recipe: Recipe, world_size: int) -> Recipe:
    """Return the resolved `recipe` with the smallest of the batches and micro-batches that `auto` may measure."""
    recipe = resolve_batch(recipe, world_size)
    if recipe.data.is_batch_measured:
        recipe = with_batch_size(recipe, list_batch_sizes(recipe, world_size)[0])
    if recipe.train.accumulate == "auto":
        recipe = with_accumulate(recipe, list_accumulations(recipe, world_size)[-1])
    return recipe


def list_accumulations(recipe: Recipe, world_size: int) -> list[int]:
    """Return the numbers of micro-batches that the batch of `recipe` divides into, in ascending order.

    Raise `RecipeError` if it does not divide over the ranks.
    """
    images = divide_batch(with_accumulate(recipe, 1), world_size)
    unit = _divisor(recipe.data, 1, 1)
    return [number for number in range(1, images // unit + 1) if images % (number * unit) == 0]


def list_batch_sizes(recipe: Recipe, world_size: int, num_samples: int = 0) -> list[int]:
    """Return the batch sizes, each twice the one before, that `data.batch_size=auto` tries on `world_size` ranks.

    The first has at least 8 images per rank. The others leave 8 steps per epoch of `num_samples`.
    """
    accumulate = 1 if recipe.train.accumulate == "auto" else recipe.train.accumulate
    unit = _divisor(recipe.data, accumulate, world_size)
    size = unit * -(-_MIN_RANK_BATCH * world_size // unit)
    if isinstance(recipe.data.sampler, Repeated):  # see `_check_repeats`
        size = unit * -(-max(size, 2 * recipe.data.sampler.repeats) // unit)
    sizes = [size]
    while 2 * sizes[-1] * _MIN_STEPS_PER_EPOCH <= num_samples:
        sizes.append(2 * sizes[-1])
    return sizes


def divide_batch(recipe: Recipe, world_size: int) -> int:
    """Return the images per micro-batch. Raise `RecipeError` if the batch does not divide."""
    batch_size = recipe.data.global_batch_size
    _check_divides("data.batch_size", batch_size, recipe.data, recipe.train, world_size)
    return batch_size // (world_size * recipe.train.num_micro_batches)


def _check_divides(path: str, images: int, data: Data, train: Train, world_size: int) -> None:
    """Raise `RecipeError` unless the `images` of field `path` divide over ranks, micro-batches and mixed pairs."""
    accumulate = train.num_micro_batches
    unit = _divisor(data, accumulate, world_size)
    if images % unit == 0:
        return
    over = count(world_size, "rank") + (f" x {accumulate:,} micro-batches" if accumulate > 1 else "")
    pairs = f" into the pairs of {_mixes_images(data)}" if _mixes_images(data) else ""
    nearest = max(unit, (images + unit // 2) // unit * unit)
    raise RecipeError(f"{path}: {images} does not divide evenly over {over}{pairs} (try {nearest})")


def _divisor(data: Data, accumulate: int, world_size: int) -> int:
    """Return the number that the batch must be a multiple of."""
    # Neighbors that are mixed (MixUp, CutMix) stay together in one micro-batch.
    return world_size * accumulate * (2 if _mixes_images(data) else 1)


def _check_repeats(data: Data, batch_size: int) -> None:
    """Raise `RecipeError` if a batch may be versions of one image alone, or so few that they would be mixed."""
    if not isinstance(data.sampler, Repeated):
        return
    repeats, mixes = data.sampler.repeats, _mixes_images(data)
    if batch_size < 2 * repeats if mixes else batch_size <= repeats:
        needs = f"{mixes} of images" if mixes else "images"
        raise RecipeError(
            f"data.batch_size: {batch_size} is too small for {needs} that repeat {repeats} times (try "
            f"{2 * repeats}, or lower data.sampler.repeats)"
        )


def _suggest_batch_size(num_images: int, divisor: int) -> int:
    """Return a batch size for `num_images` that is a multiple of `divisor`; 0 if there is none."""
    # About a power of two for at least 8 steps per epoch, and at least 8 images.
    wanted = max(8, 1 << int(math.log2(max(1, num_images / _MIN_STEPS_PER_EPOCH))))
    largest = num_images // divisor * divisor
    return min(-(-wanted // divisor) * divisor, largest)


def _note_dropped_images(
    batch_size: int, num_samples: int, samples: str, steps_per_epoch: int, divisor: int
) -> list[str]:
    """Return a warning if the incomplete last batch of each epoch is a large share of the `samples`."""
    dropped = num_samples - steps_per_epoch * batch_size
    if dropped <= _MAX_DROPPED_SHARE * num_samples:
        return []
    per_epoch = count(steps_per_epoch, "step")
    suggested = _suggest_batch_size(num_samples, divisor)
    advice = f" (try data.batch_size={suggested})" if suggested < batch_size else ""
    return [
        f"data.batch_size: {batch_size} leaves {dropped:,} of {num_samples:,} {samples} "
        f"({100 * dropped / num_samples:.0f} %) out of each epoch, which has {per_epoch}{advice}"
    ]


def _mixes_images(data: Data) -> str:
    return " and ".join(section.name for section in data.augment if isinstance(section, MixUp | CutMix))


def lr_factor(optim: OptimSection, batch_size: int) -> float:
    """Return the factor that scales the learning rate with the batch size.

    Linear: Goyal et al. 2017 (arXiv 1706.02677); square root: Krizhevsky 2014 (arXiv 1404.5997).
    """
    base = optim.base_batch_size
    if optim.lr_scaling == "none" or base == "auto":
        return 1.0
    ratio = batch_size / base
    return ratio if optim.lr_scaling == "linear" else math.sqrt(ratio)


def lr_sentence(optim: OptimSection, schedule: ScheduleSection, batch_size: int, peak_lr: float) -> str:
    """Describe the learning rate: `0.1 at batch 128 -> 0.4 at batch 2048 (sqrt scaling), 16 epochs of warm-up`."""
    if optim.lr_scaling == "none":
        scaled = f"{optim.lr:g} (batch {batch_size}, no scaling)"
    else:
        rates = f"{optim.lr:g} at batch {optim.base_batch_size} -> {peak_lr:.4g} at batch {batch_size}"
        scaled = f"{rates} ({optim.lr_scaling} scaling)"
    if optim.layer_decay != "off":
        scaled = f"{scaled}, each layer before the classifier {optim.layer_decay:g} times that of the next"
    if isinstance(schedule, OneCycle):
        return f"{scaled}, rising for {_format_duration(schedule.peak_at)}"
    if isinstance(schedule, RangeTest):
        return f"{scaled}, rising from {schedule.start:g} of it throughout"
    warmup = schedule.warmup
    return f"{scaled}, " + (f"{_format_duration(warmup)} of warm-up" if warmup.value else "no warm-up")


def _format_duration(duration: Duration) -> str:
    if duration.unit == "%":
        return f"{duration.value:g} % of the run"
    return count(duration.value, {"ep": "epoch", "st": "step", "img": "image"}[duration.unit])


def _total_steps(train: Train, steps_per_epoch: int) -> int:
    if train.epochs == "auto":
        assert train.steps != "auto", "the schema lets exactly one through"
        return train.steps
    return max(1, round(train.epochs * steps_per_epoch))


def _note_beyond_end(
    schedule: ScheduleSection, ema: Ema | Off, to_steps: Callable[[Duration], int], total_steps: int
) -> list[str]:
    """Return warnings if the run ends before its warm-up, first milestone or first EMA update does."""
    if isinstance(schedule, RangeTest):
        return []
    ends = f"schedule: the run ends at step {total_steps:,}"
    notes = []
    rise = to_steps(schedule.peak_at if isinstance(schedule, OneCycle) else schedule.warmup)
    if rise >= total_steps:
        notes.append(f"{ends}, within its warm-up of {count(rise, 'step')}")
    if isinstance(schedule, Step) and (first := min(map(to_steps, schedule.milestones))) >= total_steps:
        notes.append(f"{ends}, before its first milestone at {first:,}")
    if ema != "off" and ema.every > total_steps:
        notes.append(f"train.ema: the run ends at step {total_steps:,}, before the first update of the average")
    return notes


def _note_never_unfrozen(unfreeze_step: int, total_steps: int) -> list[str]:
    """Return a warning if the run ends before its frozen parameters are trained."""
    if unfreeze_step < total_steps:
        return []
    return [
        f"model.unfreeze: the run ends at step {total_steps:,}, before frozen parameters train at {unfreeze_step:,}"
    ]


def _note_never_weighed(sampler: SamplerSection, steps_per_epoch: int, total_steps: int) -> list[str]:
    """Return a warning if the run ends before images are drawn by their loss."""
    if not isinstance(sampler, Hard) or sampler.steps(steps_per_epoch, total_steps):
        return []
    first = count(sampler.after, "epoch")
    return [f"data.sampler.after: the run ends at step {total_steps:,}, within {first}, before images are weighed"]


def _note_balanced_twice(data: Data, train: Train) -> list[str]:
    """Return a warning if rare classes count more both in the samples and in the loss."""
    if train.class_weights == "off" or not isinstance(data.sampler, Balanced | Weighted):
        return []
    name = data.sampler.name
    return [f"train.class_weights: weighs classes that data.sampler={name} weighs already (set class_weights=off)"]


def _note_below_size(train_sizes: tuple[tuple[int, int], ...], image_size: int, total_steps: int) -> list[str]:
    """Return a warning if the run ends before training images reach full size."""
    last = train_sizes[-1][1]
    if last == image_size:
        return []
    return [f"data.progressive: the run ends at step {total_steps:,}, at {last} of {image_size} pixels"]


def _note_preprocessing(recipe: Recipe, image_size: int, info: "DatasetInfo") -> list[str]:
    """Return a note on how images are prepared for published weights, which depend on it."""
    data = recipe.data
    if not is_published(recipe.model.weights):
        return []
    is_whole = data.eval_resize == "stretch" or info.image_size is not None
    scale = "whole images" if is_whole else f"evaluation crops {data.eval_crop:.4g}"
    mean, std = (
        "[" + ", ".join(f"{each:.4g}" for each in values) + "]" if _fits(values, info) else "the dataset's"
        for values in (data.mean, data.std)
    )
    return [
        f"model.weights: {recipe.model.weights} gets images of {image_size} px, {data.interpolation}, {scale}, "
        f"mean {mean}, std {std}"
    ]


def train_image_size(data: Data, info: "DatasetInfo") -> int:
    """Return the full height and width in pixels of training images, for which the model is built.

    Raise `RecipeError` if no size is set and the dataset's images are not square.
    """
    if data.image_size != "auto":
        return data.image_size
    if info.image_size is None:
        return data.auto_image_size
    height, width = info.image_size  # messages have width x height
    if height != width:
        raise RecipeError(f"data.image_size: the images are {width}x{height}, not square (set data.image_size)")
    return height


def _train_sizes(
    progressive: Progressive | Off, image_size: int, epoch_starts: Iterable[int], to_steps: Callable[[Duration], int]
) -> tuple[tuple[int, int], ...]:
    """Return (first step, size) of each size of training images, which changes at the start of epochs.

    FFCV's rule (Leclerc et al. 2023, arXiv 2306.12517): linear from `start_size` at `begin` to full size at `end`,
    rounded to multiples.
    """
    if progressive == "off":
        return ((0, image_size),)
    start = progressive.start_size
    if start >= image_size:
        raise RecipeError(f"data.progressive.start_size: {start} does not rise to image size {image_size} (lower it)")
    begin, end = to_steps(progressive.begin), to_steps(progressive.end)
    if end < begin:
        raise RecipeError(f"data.progressive.end: {progressive.end} comes before begin {progressive.begin} (swap them)")
    sizes: list[tuple[int, int]] = []
    for step in epoch_starts:
        size = _progressive_size(progressive, image_size, step, begin, end)
        if not sizes or sizes[-1][1] != size:
            sizes.append((step, size))
    return tuple(sizes)


def _progressive_size(progressive: Progressive, image_size: int, step: int, begin: int, end: int) -> int:
    """Return the size in the epoch that starts at `step`, for a rise from step `begin` to step `end`."""
    start, multiple = progressive.start_size, progressive.multiple
    if step <= begin:
        return start
    if step >= end:
        return image_size
    size = start + (image_size - start) * (step - begin) / (end - begin)
    return min(image_size, max(start, round(size / multiple) * multiple))


def _check_keep_every(section: Checkpoint, every: int, keep_every: int) -> None:
    """Raise `RecipeError` if `keep_every` selects checkpoints that are never written."""
    if keep_every and (not every or keep_every % every):
        raise RecipeError(
            f"checkpoint.keep_every: {section.keep_every} is not a multiple of checkpoint.every "
            f"{section.every} (make it one)"
        )


def mean_and_std(data: Data, info: "DatasetInfo") -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel, of pixels in [0, 1], that normalize both splits."""
    return (
        data.mean if _fits(data.mean, info) else info.mean,
        data.std if _fits(data.std, info) else info.std,
    )


def _fits(values: tuple[float, ...] | Auto, info: "DatasetInfo") -> TypeGuard[tuple[float, ...]]:
    """Whether a recipe's statistics are numbers for the channels of the dataset."""
    return values != "auto" and len(values) == info.channels


def _check_statistics(recipe: Recipe, info: "DatasetInfo") -> None:
    data = recipe.data
    # The defaults of published weights are for colors, and only the data of a pack or a plugin tell that they are not.
    if is_published(recipe.model.weights) and info.channels != 3:
        return
    for name, values in (("mean", data.mean), ("std", data.std)):
        if values != "auto" and len(values) != info.channels:
            wanted = count(info.channels, "number")
            raise RecipeError(
                f"data.{name}: {list(values)} does not fit {count(info.channels, 'channel')} (give {wanted})"
            )


def check_effects(recipe: Recipe, info: "DatasetInfo", smallest: int) -> None:
    """Raise `RecipeError` for settings without effect on the dataset's images.

    `smallest` is the height and width in pixels of the smallest training images.
    """
    # The schema cannot refuse these, as it does not know the dataset.
    data = recipe.data
    # Published weights bring both, and only the data of a pack or a plugin tell that its images have one size.
    has_given = not is_published(recipe.model.weights)
    crop, size = (Data.model_fields[name].default for name in ("eval_crop", "auto_image_size"))
    if has_given and info.image_size is not None and data.eval_crop != crop:
        raise RecipeError(
            f"data.eval_crop: {data.eval_crop:g} has no effect on {data.source.name}, whose images have one size and "
            f"are resized whole (set data.eval_crop={crop:g})"
        )
    if has_given and (info.image_size is not None or data.image_size != "auto") and data.auto_image_size != size:
        raise RecipeError(
            f"data.auto_image_size: {data.auto_image_size} has no effect on images of one size, or with image_size "
            "(set data.image_size alone)"
        )
    if info.image_size is not None and data.on_bad_image != "fail":  # they were decoded before training
        raise RecipeError(
            f"data.on_bad_image: {data.on_bad_image} has no effect on {data.source.name}, whose images are all in "
            "memory (set data.on_bad_image=fail)"
        )
    images = f"training images of {smallest}x{smallest}"
    for position, section in enumerate(data.augment):
        path = f"data.augment[{position}]"
        if not (info.pixel_format.is_photo or isinstance(section, AnyPixels | OwnAugment)):
            raise RecipeError(
                f"{path}: {section.name} takes 8-bit gray or RGB images, and the data has "
                f"{info.pixel_format} (leave it out)"
            )
        match section:
            case PadCrop(padding=padding) if padding >= smallest:
                raise RecipeError(f"{path}.padding: {padding} is not less than the side of {images} (lower it)")
            case Cutout(size=size) if size > 2 * smallest - 2:  # at any position of its center
                raise RecipeError(f"{path}.size: {size} always blanks the whole of {images} (lower it)")
            case Grayscale() if info.channels == 1:
                raise RecipeError(f"{path}: grayscale has no effect on gray images (leave it out)")
            case ColorJitter(brightness=0, contrast=0) if info.channels == 1:
                raise RecipeError(f"{path}: color_jitter only changes brightness and contrast of gray images (set one)")


def worker_timeout_warning(data: Data, parallel: Parallel, workers: int) -> str:
    """Return a warning if `parallel.timeout` ends a run before `data.worker_timeout` names the image, or ""."""
    # A warning and no error: other users of workers, such as `paceline data verify`, have no `parallel.timeout`.
    worker_timeout, limit = data.worker_timeout, parallel.timeout
    if not workers or worker_timeout.seconds < limit.seconds:
        return ""
    ends = f"parallel.timeout of {limit} ends the run first, without naming the image at which a worker hangs"
    return f"data.worker_timeout: {worker_timeout} has no effect: {ends} (set it lower than that)"


def small_batch_warning(data: Data, world_size: int, device: str) -> str:
    """Return a warning if `data.batch_size` leaves each GPU few images per step, or ""."""
    # A batch size that is set per rank, or for one rank, is intended.
    if device != "cuda" or world_size == 1 or data.rank_batch_size != "auto" or data.is_batch_measured:
        return ""
    rank_batch = data.global_batch_size // world_size
    if rank_batch >= _FEW_IMAGES:
        return ""
    return (
        f"data.batch_size: {data.batch_size} over {world_size} ranks is {count(rank_batch, 'image')} per GPU and step "
        f"(set data.rank_batch_size={data.batch_size} for as many on each)"
    )

"""The recipe's section `data`."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from paceline.core.errors import RecipeError
from paceline.recipe.schema.augment import AugmentSection, CutMix, MixUp, RandomResizedCrop, Resize
from paceline.recipe.schema.base import Auto, Off, Section, TimeDuration, TrainingDuration
from paceline.recipe.schema.sampler import SamplerSection, Shuffle
from paceline.recipe.schema.source import Digits, SourceSection
from paceline.recipe.schema.split import Split


class Progressive(Section):
    """Progressive resizing: train on small images first, whose size rises epoch by epoch from `start_size` to
    `data.image_size`."""

    start_size: PositiveInt
    """Height and width until `begin`."""
    begin: TrainingDuration = "40%"
    """When the size begins to rise, from the start of the run."""
    end: TrainingDuration = "85%"
    """When the size reaches `data.image_size`."""
    multiple: PositiveInt = 32
    """Sizes in between are rounded to multiples of this."""


class Data(Section):
    """Data, batches and augmentation."""

    added: ClassVar = ("interpolation", "auto_image_size", "sampler", "split", "cache", "cache_gb")

    source: SourceSection = Digits()
    """The dataset."""
    split: Split | Off = "off"
    """Train and validate on one fold of a [cross-validation](../how-to/cross-validation.md), which `paceline cv` does
    for all folds. `off` uses the two splits of the source."""
    batch_size: PositiveInt | Auto = 128
    """Images per optimizer step, over all ranks and micro-batches. `auto` follows from `rank_batch_size`; if that is
    `auto` too, it is the smallest batch within 3 % of the fastest that fits in memory, measured when the run starts.
    Another batch size is another experiment: set `optim.lr_scaling` so that the learning rate follows."""
    rank_batch_size: PositiveInt | Auto = "auto"
    """Images per optimizer step on each rank, over its micro-batches: `batch_size` is then this times the number of
    ranks, and is what the run directory records and a resumed run uses. `auto` divides `batch_size` over the ranks."""
    eval_batch_size: PositiveInt | Auto = "auto"
    """Batch size on each rank in evaluation; `auto` is twice a rank's micro-batch."""
    order: Literal["random", "stored"] = "random"
    """Order of training images: `random` is a new random order in every epoch, and `stored` is the order of the source,
    to measure what random reads cost. A folder stores one class after the other, which trains badly."""
    sampler: SamplerSection = Shuffle()
    """Which training images an epoch visits: `shuffle` each one once, `repeated` a part of them several times,
    `balanced` each class equally often, `weighted` by weights, `subset` a fixed part, `curriculum` easy ones first,
    `hard` those of high loss more often, or your own."""
    image_size: PositiveInt | Auto = "auto"
    """Height and width of the model's input; `auto` is the size of the dataset's images, or `auto_image_size` if their
    sizes differ."""
    auto_image_size: PositiveInt = 224
    """Height and width of the model's input if `image_size` is `auto` and the sizes of the images differ."""
    eval_image_size: PositiveInt | Auto = "auto"
    """Height and width in evaluation; `auto` is `image_size`."""
    progressive: Progressive | Off = "off"
    """Progressive resizing: small images first."""
    augment: tuple[AugmentSection, ...] = ()
    """Augmentations of training images, in order; those that set the size come first, mixup and cutmix last."""
    augment_on: Literal["auto", "host", "device"] = "auto"
    """Where to augment; `auto` is the GPU if there is one. Images of different sizes are resized on the host, and so is
    everything up to the last entry in the list that draws operations or changes colors or focus."""
    eval_resize: Literal["crop", "stretch"] = "crop"
    """Evaluation of images of different sizes: `crop` scales the short side and crops the center, `stretch` scales the
    whole image."""
    eval_crop: float = Field(0.875, gt=0, le=1)
    """Side of the center crop, as a fraction of the scaled image's short side."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized, in training and evaluation, with antialiasing as in Pillow. The loader `native` has
    bilinear alone. Published weights (`model.weights`) bring their own default, as they do for `mean`, `std`,
    `eval_resize`, `eval_crop` and `auto_image_size`."""
    eval_views: Literal[1, 2, 6] = 1
    """Test-time augmentation, which should be reported with any accuracy: 2 averages the logits of each image and its
    mirror image, and 6 adds both shifted by one pixel in two directions."""
    mean: tuple[float, ...] | Auto = "auto"
    """Mean per channel, of pixels in [0, 1], or of float pixels as they are; `auto` is the dataset's."""
    std: tuple[PositiveFloat, ...] | Auto = "auto"
    """Standard deviation per channel, as `mean`; `auto` is the dataset's."""
    loader: Auto | Literal["device", "nvjpeg", "native", "threads", "processes"] = "auto"
    """How batches are made. `device` keeps the whole dataset on the device. `native` threads decode JPEGs, in packs or
    as files, without Python. Python `threads` or `processes` read and decode anything. `nvjpeg` reads with threads and
    decodes on the GPU. `auto` is the fastest that works, except `nvjpeg`. All give the same samples, labels and
    augmentation; pixels of `native` and `nvjpeg` differ by rounding."""
    workers: NonNegativeInt | Auto = "auto"
    """Worker processes or threads per rank; 0 makes batches in the rank itself."""
    stage: Off | str = "off"
    """Folder in memory or on a local disk, such as /dev/shm, to which the dataset is copied before training, once per
    node, and from which it is removed afterwards."""
    cache: Auto | Off | str = "auto"
    """Folder in which the loader `native` keeps indexes of JPEG files, which make all but the first decoding of a file
    faster and change no pixel; processes and runs share it. `auto` is `~/.cache/paceline/jpeg-index`."""
    cache_gb: PositiveFloat = 8.0
    """Size of that folder in GB; beyond it, the indexes that were not used for the longest time are removed."""
    worker_timeout: TimeDuration = "5min"
    """How long a rank waits for a batch from a worker before the run fails. Keep it below `parallel.timeout`, which
    ends the run without naming the image at which the worker hangs."""
    replay: Off | Literal["host", "device"] = "off"
    """Measure what data costs: train on the first few batches over and over, kept in host memory or on the device."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """If an image file cannot be read or decoded: `fail` ends the run; `skip` counts and lists the image, and replaces
    it by another in training and leaves it out in evaluation."""
    max_bad_images: int = Field(100, ge=1)
    """Number of distinct bad images after which the run fails."""

    @property
    def global_batch_size(self) -> int:
        """Images per optimizer step over all ranks, after `resolve_batch`.

        Raise `RecipeError` if it is not measured yet.
        """
        if self.is_batch_measured:
            raise RecipeError("data.batch_size: auto is measured only by paceline train (set a number)")
        assert self.batch_size != "auto", "the batch is resolved before it is read"
        return self.batch_size

    @property
    def is_batch_measured(self) -> bool:
        """Whether a run measures its batch size."""
        return self.batch_size == self.rank_batch_size == "auto"

    @model_validator(mode="before")
    @classmethod
    def _fill_batch_size(cls, values: Any) -> Any:
        """Set `batch_size` to `auto` if only `rank_batch_size` is given."""
        if not isinstance(values, dict):
            return values
        is_per_rank = values.get("rank_batch_size", "auto") != "auto"
        return {"batch_size": "auto", **values} if is_per_rank else values

    @field_validator("augment")
    @classmethod
    def _check_order(cls, augment: tuple[AugmentSection, ...]) -> tuple[AugmentSection, ...]:
        for position, section in enumerate(augment):
            if position > 0 and isinstance(section, RandomResizedCrop | Resize):
                raise ValueError(f"{section.name} sets the size of the image, so it comes first, and only once")
            follow = augment[position + 1 :]
            if isinstance(section, MixUp | CutMix) and any(each.name == section.name for each in follow):
                raise ValueError(f"{section.name} is named twice (name it once)")
            if isinstance(section, MixUp | CutMix) and not all(isinstance(each, MixUp | CutMix) for each in follow):
                raise ValueError(f"{section.name} mixes finished images, so only mixup or cutmix may follow it")
        return augment

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Self:
        if self.eval_resize == "stretch" and self.is_set("eval_crop"):
            raise ValueError("eval_crop has no effect with eval_resize stretch (set eval_resize=crop)")
        if self.on_bad_image == "fail" and self.is_set("max_bad_images"):
            raise ValueError("max_bad_images has no effect with on_bad_image fail (set on_bad_image=skip)")
        if self.loader in ("nvjpeg", "native", "threads", "processes") and self.workers == 0:
            raise ValueError(f"loader {self.loader} cannot work with workers 0 (set workers=1, or loader=auto)")
        if self.loader == "device" and self.workers not in ("auto", 0):
            raise ValueError("workers has no effect with loader device, which has none (leave it at auto)")
        if self.cache == "off" and self.is_set("cache_gb"):
            raise ValueError("cache_gb has no effect with cache off (set cache=auto)")
        if self.order == "stored" and self.sampler.name != "shuffle":
            raise ValueError(f"order stored has no effect with sampler {self.sampler.name} (set order=random)")
        if self.augment_on != "auto" and not self.augment:
            raise ValueError(f"augment_on {self.augment_on} has no effect without augment (leave it at auto)")
        return self

    @model_validator(mode="after")
    def _check_progressive(self) -> Self:
        if self.progressive == "off":
            return self
        if self.image_size != "auto" and self.progressive.start_size >= self.image_size:
            start = self.progressive.start_size
            raise ValueError(f"progressive.start_size {start} does not rise to image_size {self.image_size} (lower it)")
        return self

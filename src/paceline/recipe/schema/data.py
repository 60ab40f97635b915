"""What is read, in which batches, and how it is changed on the way."""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from paceline.recipe.schema.augment import AugmentSection, CutMix, MixUp, RandomResizedCrop, Resize
from paceline.recipe.schema.base import Auto, Off, Section, TimeDuration, TrainingDuration, refuse
from paceline.recipe.schema.source import Digits, SourceSection


class Progressive(Section):
    """Train on small images first: the size rises from `start_size` to `data.image_size`, epoch by epoch."""

    start_size: PositiveInt
    """Height and width up to `begin`."""
    begin: TrainingDuration = "40%"
    """When the size begins to rise, counted from the start of the run."""
    end: TrainingDuration = "85%"
    """When it has arrived."""
    multiple: PositiveInt = 32
    """Sizes in between are rounded to multiples of this."""


class Data(Section):
    """What is read, in which batches, and how it is changed on the way."""

    source: SourceSection = Digits()
    """Where samples come from."""
    batch_size: PositiveInt | Auto = 128
    """Images per optimizer step, over all ranks and micro-batches; `auto` follows from `rank_batch_size`."""
    rank_batch_size: PositiveInt | Auto = "auto"
    """Images per optimizer step on each rank, over its micro-batches: `batch_size` is then this times the number of
    ranks, and is what a run directory keeps and resumes with. `auto` shares `batch_size` out."""
    eval_batch_size: PositiveInt | Auto = "auto"
    """Images a rank evaluates at once; `auto` is twice what a rank trains at once."""
    order: Literal["random", "stored"] = "random"
    """Which training images come when: in a new random order every epoch, or in the order in which the source has them,
    to measure what reading at random costs. A folder has its classes one after the other, which trains badly."""
    image_size: PositiveInt | Auto = "auto"
    """Height and width the model sees; `auto` is the set's own size, or 224 where sizes differ."""
    eval_image_size: PositiveInt | Auto = "auto"
    """Height and width in evaluation; `auto` is `image_size`."""
    progressive: Progressive | Off = "off"
    """Small images first (progressive resizing)."""
    augment: tuple[AugmentSection, ...] = ()
    """Random changes to training images, in order; the ones that set the size come first, mixup and cutmix last."""
    augment_on: Literal["auto", "host", "device"] = "auto"
    """Where whole batches are changed; `auto` is the GPU when there is one. Photographs are sized on the host, and what
    stands before and at color_jitter, rand_augment or trivial_augment is done there too."""
    eval_resize: Literal["crop", "stretch"] = "crop"
    """Photographs in evaluation: scale the short side and cut the centre, or stretch the whole image."""
    eval_crop: float = Field(0.875, gt=0, le=1)
    """Share of the scaled image's side that the centre crop keeps."""
    eval_views: Literal[1, 2, 6] = 1
    """Judge each image as it is, by the mean of its logits and its mirror image's (2), or with both also shifted by a
    pixel either way (6): test-time augmentation, to be told with any accuracy."""
    mean: tuple[float, ...] | Auto = "auto"
    """Per channel, of pixels in [0, 1]; `auto` is the data set's."""
    std: tuple[PositiveFloat, ...] | Auto = "auto"
    """Per channel, of pixels in [0, 1]; `auto` is the data set's."""
    loader: Auto | Literal["device", "nvjpeg", "native", "threads", "processes"] = "auto"
    """Who makes batches: `device` keeps the whole set beside the model and has no loader at all; `native` threads
    decode packs without Python; Python `threads` or `processes` read and decode anything; `nvjpeg` has threads that
    read, and a GPU that decodes. `auto` is the fastest that can, `nvjpeg` left out. All give the same samples, labels
    and augmentation; pixels of `native` and `nvjpeg` differ by rounding."""
    workers: NonNegativeInt | Auto = "auto"
    """Processes or threads a rank makes batches with; 0 makes them in the rank itself."""
    stage: Off | str = "off"
    """Folder in memory or on a local disk, such as /dev/shm, that the data set is copied to before training, once a
    node, and removed from afterwards."""
    worker_timeout: TimeDuration = "5min"
    """How long a rank waits for a batch from a worker before the run fails; less than `parallel.timeout`, which would
    end the run before anybody can say at which image the worker hangs."""
    replay: Off | Literal["host", "device"] = "off"
    """A probe of what data costs: train on the first few batches over and over, kept ready in host memory, or on the
    device."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """What an image file that cannot be read or decoded does: end the run, or be counted and listed while another
    one stands in for it in training, and none in evaluation."""
    max_bad_images: int = Field(100, ge=1)
    """Different bad images after which the run ends all the same."""

    @property
    def global_batch_size(self) -> int:
        """Images per optimizer step over all ranks, once it is known how many there are (`resolve_batch`)."""
        assert self.batch_size != "auto", "the batch is resolved before it is read"
        return self.batch_size

    @model_validator(mode="before")
    @classmethod
    def _counts_images_once(cls, values: Any) -> Any:
        """Leave `batch_size` to `rank_batch_size` where that alone is given."""
        if not isinstance(values, dict):
            return values
        is_per_rank = values.get("rank_batch_size", "auto") != "auto"
        if values.get("batch_size") == "auto" and not is_per_rank:
            refuse("data.batch_size", "auto follows from data.rank_batch_size, which is not set (set one of them)")
        return {"batch_size": "auto", **values} if is_per_rank else values

    @field_validator("augment")
    @classmethod
    def _order(cls, augment: tuple[AugmentSection, ...]) -> tuple[AugmentSection, ...]:
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
        if self.eval_resize == "stretch" and self.eval_crop != type(self).model_fields["eval_crop"].default:
            raise ValueError("eval_crop has no effect with eval_resize stretch (set eval_resize=crop)")
        if self.on_bad_image == "fail" and self.max_bad_images != type(self).model_fields["max_bad_images"].default:
            raise ValueError("max_bad_images has no effect with on_bad_image fail (set on_bad_image=skip)")
        if self.loader in ("nvjpeg", "native", "threads", "processes") and self.workers == 0:
            raise ValueError(f"loader {self.loader} has nobody to work with workers 0 (set workers=1, or loader=auto)")
        if self.loader == "device" and self.workers not in ("auto", 0):
            raise ValueError("workers has no effect with loader device, which has none (leave it at auto)")
        if self.augment_on != "auto" and not self.augment:
            raise ValueError(f"augment_on {self.augment_on} has no effect without augment (leave it at auto)")
        return self

    @model_validator(mode="after")
    def _progress_rises(self) -> Self:
        if self.progressive == "off":
            return self
        if self.image_size != "auto" and self.progressive.start_size >= self.image_size:
            start = self.progressive.start_size
            raise ValueError(f"progressive.start_size {start} does not rise to image_size {self.image_size} (lower it)")
        return self

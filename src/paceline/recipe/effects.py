"""Settings of a recipe that can have no effect on its data set, or on who reads it, are refused or noted here.

What is known without the data set is refused by the schema; what a run is too short for is noted by the plan.
"""

from typing import NoReturn

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import RecipeError
from paceline.core.units import count
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.augment import ColorJitter, Cutout, PadCrop
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.section import Section


def check_effects(recipe: Recipe, info: DatasetInfo, smallest: int) -> None:
    """Raise `RecipeError` for what has no effect on `info`'s images.

    `smallest` is the height and width in pixels of the smallest images that are trained on.
    """
    if info.image_size is not None:
        _check_sizing(recipe.data)
        _check_bad_images(recipe.data)
    for position, section in enumerate(recipe.data.augment):
        _check_augment(f"data.augment[{position}]", section, info.channels, smallest)


def workers_outwaited_by_timeout(recipe: Recipe, workers: int) -> str:
    """Return a sentence where a run that has `workers` fails for want of progress before it could for want of a batch.

    It is not refused: other users of workers, such as `paceline data verify`, know no `parallel.timeout`.
    """
    patience, limit = recipe.data.worker_timeout, recipe.parallel.timeout
    if not workers or patience.seconds < limit.seconds:
        return ""
    ends = f"parallel.timeout of {limit} ends the run first, and cannot say at which image a worker hangs"
    return f"data.worker_timeout: {patience} has no effect: {ends} (set it lower than that)"


_FEW_IMAGES = 32
"""Images per rank and step below which batch norm's statistics cost accuracy (Wu and He 2018, arXiv 1803.08494, figure
1), and few of today's GPUs are busy."""


def thin_batch(recipe: Recipe, world_size: int, device: str) -> str:
    """Return a sentence where sharing `data.batch_size` out leaves each GPU few images per step.

    A batch that was chosen per rank, or for one rank, is as it was meant to be.
    """
    data = recipe.data
    if device != "cuda" or world_size == 1 or data.rank_batch_size != "auto":
        return ""
    rank_batch = data.global_batch_size // world_size
    if rank_batch >= _FEW_IMAGES:
        return ""
    return (
        f"data.batch_size: {data.batch_size} over {world_size} ranks is {count(rank_batch, 'image')} per GPU and step "
        f"(set data.rank_batch_size={data.batch_size} for as many on each)"
    )


def _check_sizing(data: Data) -> None:
    """Refuse to crop pixels in memory in evaluation; they are resized whole, as `resize` and `stretch` would do."""
    default = Data.model_fields["eval_crop"].default
    if data.eval_crop != default:
        reason = f"has no effect on {data.source.name}, whose images have one size and are resized whole"
        _raise_without_effect("data.eval_crop", f"{data.eval_crop:g} {reason} (set data.eval_crop={default:g})")


def _check_bad_images(data: Data) -> None:
    """Refuse to skip images where all are pixels in memory before the first is asked for."""
    if data.on_bad_image != "fail":
        reason = f"has no effect on {data.source.name}, whose images are all in memory (set data.on_bad_image=fail)"
        _raise_without_effect("data.on_bad_image", f"{data.on_bad_image} {reason}")


def _check_augment(path: str, section: Section, channels: int, smallest: int) -> None:
    images = f"training images of {smallest}x{smallest}"
    match section:
        case PadCrop(padding=padding) if padding >= smallest:
            _raise_without_effect(f"{path}.padding", f"{padding} is not less than the side of {images} (lower it)")
        case Cutout(size=size) if size > 2 * smallest - 2:  # wherever its centre is
            _raise_without_effect(f"{path}.size", f"{size} always blanks the whole of {images} (lower it)")
        case ColorJitter(brightness=0, contrast=0) if channels == 1:
            _raise_without_effect(
                path, "color_jitter has no effect on grey images but by brightness and contrast (set one)"
            )


def _raise_without_effect(path: str, reason: str) -> NoReturn:
    raise RecipeError(f"{path}: {reason}")

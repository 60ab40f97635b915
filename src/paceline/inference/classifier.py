"""Load a run's trained network, ready to be asked: the weights it was judged by, and what it was told them with.

Answers are those of the run's evaluation: same sizing, normalising, number format and views. It reads nothing but the
run directory, so the data set need not be there. Reading files in numbers is `reading`, and putting answers into order
`ranking`.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.core.rundir import RunDir
from paceline.data.decode import decode
from paceline.data.placement import Placement
from paceline.data.sizing import Sizing, Stretch, as_tensor, build_eval_sizing
from paceline.models.trial import choose_memory_format
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.plan import eval_image_size
from paceline.recipe.schema import Recipe
from paceline.train.checkpoint import Checkpoints, Keep
from paceline.train.facts import Facts, read_facts
from paceline.train.judged import judged_network, precision_on
from paceline.train.precision import Precision, build_precision, set_numerics
from paceline.train.views import Views, build_views

_NO_DRAWS = np.empty(0)


@dataclass(frozen=True)
class Preprocessing:
    """What makes an image the network's input, as evaluation did it.

    The short side is scaled to `resize` pixels and the centre cut out, `image_size` pixels squared; where `resize` is
    None the whole image is stretched to that. `channels` is 3 for RGB and 1 for grey. `mean` and `std` are per channel,
    of pixels / 255. Interpolation is bilinear and antialiased: Pillow's, and with `is_pixels`, of sets that are pixels
    of one size, torch's.
    """

    image_size: int
    resize: int | None
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_pixels: bool = False


@dataclass(frozen=True)
class Classifier:
    """A run's trained network in evaluation mode; `classes` are in the order of its logits.

    `sizing`, `place`, `precision` and `views` are what evaluation shows it images by; the model is where `place` is.
    `own_code` says that code which the run names may run. `judged_at` is the size of images in the run's evaluation,
    where `preprocessing` has another.
    """

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    run: Path
    checkpoint: Path
    recipe: Recipe
    sizing: Sizing
    place: Placement
    precision: Precision
    views: Views
    own_code: bool = False
    judged_at: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.place.device

    def image(self, data: bytes, name: str) -> Tensor:
        """Return the image of a file's bytes, uint8 [channels, image_size, image_size], on the host.

        Reads what training reads (`data.decode`). Raise `ImageError` calling the file `name`.
        """
        wanted = self.preprocessing
        picture = decode(data, channels=3 if wanted.channels == 3 else 1, name=name)
        return self.sizing(as_tensor(picture) if wanted.is_pixels else picture, _NO_DRAWS, wanted.image_size)

    def log_probabilities(self, images: Tensor) -> Tensor:
        """Return float64 [N, classes], on the network's device, for uint8 images [N, C, H, W] from anywhere.

        They are what evaluation ranks by: summed in float64, so that no two classes become equal by rounding.
        """
        with torch.inference_mode():
            normalised = self.place.normalise(images.to(self.device, non_blocking=True))
            with self.precision.autocast():
                logits = self.views(self.model, normalised)
            return logits.double().log_softmax(dim=1)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return float32 [N, classes], on the network's device, for uint8 images [N, C, H, W]; each row sums to 1."""
        return self.log_probabilities(images).exp().float()


def load_classifier(run: Path, checkpoint: str = "last", device: str = "auto", *, own_code: bool = False) -> Classifier:
    """Return the network of run directory `run` as checkpoint `last`, `best` or of a step has it, ready to be asked.

    The weights are those the run was judged by: the averaged ones where it keeps any (`train.ema`, schedule_free).
    `device` is cpu, cuda, or auto for a GPU where there is one; a number format that a CPU lacks is float32 there. On
    a GPU torch is set to the run's numerics (TF32 or not). Torch's random state stays as it is.

    A network that is code, which the run names by import path, is imported only with `own_code`: set it where you trust
    whoever wrote that code and the run. Other code that a run may name is not imported. Raise `RecipeError` for such a
    network without it, for what is no run and for an unknown device, and `CheckpointError` where there is no whole
    checkpoint.
    """
    rundir = RunDir.existing(run)
    loaded = load(str(rundir.path))
    require_consent(loaded, own_code=own_code, of=("model",))
    recipe = loaded.recipe
    facts = read_facts(rundir)
    where = _device(device)
    precision = _precision(recipe, where)
    preprocessing = _preprocessing(recipe, facts)
    path = Checkpoints(rundir.checkpoints, Keep(1)).named(checkpoint)
    info = facts.info
    layout = choose_memory_format(recipe.model, where, num_classes=info.num_classes, channels=info.channels)
    model = judged_network(recipe, facts, precision, where, path, layout)
    return Classifier(
        model=model,
        classes=info.class_names,
        preprocessing=preprocessing,
        run=rundir.path,
        checkpoint=path,
        recipe=recipe,
        sizing=Stretch() if facts.is_pixels else build_eval_sizing(recipe.data),
        place=Placement(where, precision.dtype, preprocessing.mean, preprocessing.std, layout),
        precision=precision,
        views=build_views(recipe.data.eval_views),
        own_code=own_code,
    )


def at_size(classifier: Classifier, image_size: int) -> Classifier:
    """Return `classifier` for images of `image_size` pixels squared, of which as large a share is cut out as before.

    Raise `RecipeError` where its network cannot take them.
    """
    told, recipe = classifier.preprocessing, classifier.recipe
    if image_size == told.image_size:
        return classifier
    # On the CPU in float32, as what is exported: no kernel of a GPU, and no 16 bits, are to blame.
    model = copy.deepcopy(classifier.model).to("cpu", torch.float32)
    try:
        with torch.inference_mode():
            shape = tuple(model(torch.zeros(1, told.channels, image_size, image_size)).shape)
    except Exception as error:  # whatever a network makes of it
        reason = " ".join(str(error).split())[:150]
        raise _no_size(classifier, image_size, f": {reason}") from None
    if shape != (1, len(classifier.classes)):
        raise _no_size(classifier, image_size, f", for which it gives {list(shape)} and not a number a class")
    resize = None if told.resize is None else round(image_size / recipe.data.eval_crop)
    wanted = replace(told, image_size=image_size, resize=resize)
    return replace(classifier, preprocessing=wanted, judged_at=classifier.judged_at or told.image_size)


def _no_size(classifier: Classifier, image_size: int, why: str) -> RecipeError:
    size = classifier.preprocessing.image_size
    return RecipeError(
        f"--image-size: {classifier.recipe.model.name} cannot take images of {image_size} x {image_size} pixels{why} "
        f"(leave it out: the run's are {size} x {size})"
    )


def _device(name: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"--device: {name!r} is not a device (write cpu, cuda or auto)")
    if name == "cuda" and not has_gpu:
        raise RecipeError("--device: cuda: no GPU can be used here (use --device cpu)")
    return torch.device("cuda", 0) if has_gpu and name != "cpu" else torch.device("cpu")


def _precision(recipe: Recipe, device: torch.device) -> Precision:
    """Return the number format the run was evaluated in, or float32 where `device` lacks it."""
    name = precision_on(recipe.train.precision, device)
    # Timing cuDNN's algorithms takes longer than a few images do, and its choice may change the last bits.
    set_numerics(name, device, benchmark=False)
    return build_precision(name, device)


def _preprocessing(recipe: Recipe, facts: Facts) -> Preprocessing:
    data, info = recipe.data, facts.info
    size = eval_image_size(recipe, info)
    is_cropped = data.eval_resize == "crop" and not facts.is_pixels
    return Preprocessing(
        image_size=size,
        resize=round(size / data.eval_crop) if is_cropped else None,
        channels=info.channels,
        mean=info.mean if data.mean == "auto" else data.mean,
        std=info.std if data.std == "auto" else data.std,
        is_pixels=facts.is_pixels,
    )

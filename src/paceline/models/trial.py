"""Try a network before anything is allocated: on torch's meta device, where tensors have shapes and no contents."""

import torch

from paceline.core.errors import PacelineError, RecipeError
from paceline.models.zoo import build_model
from paceline.recipe.plan import Plan
from paceline.recipe.schema.recipe import Model


def check_model(section: Model, plan: Plan) -> None:
    """Raise `RecipeError` in one line when the network cannot take the images of `plan`, in training."""
    shape = (plan.micro_batch, plan.channels, plan.image_size, plan.image_size)
    try:
        with torch.device("meta"):
            model = build_model(section, num_classes=plan.num_classes, channels=plan.channels)
            model(torch.empty(shape))
    except PacelineError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        taken = "x".join(str(size) for size in shape)
        raise RecipeError(f"model.name: {section.name} cannot take a batch of {taken}: {reason}") from None

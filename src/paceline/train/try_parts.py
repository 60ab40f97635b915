"""Make what step one needs, and try what is a user's own on nothing, for whoever wants to know before a run.

Their networks are tried by `models.trial`, their data when they are loaded, and sinks, which may call a server, not.
"""

import torch
from torch import nn

from paceline.core.dataset import Source
from paceline.core.errors import RecipeError
from paceline.data.augment.own import try_changes
from paceline.models.pretrained import weights_file
from paceline.models.trial import build_on
from paceline.recipe.own import told
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Adam, OptimSection, OwnOptim, Sgd
from paceline.recipe.schema.own import is_own_model
from paceline.train.beginning import checkpoint_to_start_from
from paceline.train.loss import build_loss
from paceline.train.optim import build_optimizer, layers_of, layers_told
from paceline.train.optimizers.counters import build_counters


def try_parts(recipe: Recipe, plan: Plan, train: Source) -> tuple[str, ...]:
    """Return what a user should know of the optimizer and of the loss over the split `train`, in sentences.

    Raise `RecipeError` for weights to start from that are not there; for an optimizer that has no use for a setting on
    this network, and for a loss that cannot weigh these classes; for an augmentation or optimizer of a user's own that
    cannot be made, or does not fit; and for an optimizer that cannot make a step, or keeps what a checkpoint cannot
    hold.
    """
    try_changes(recipe.data.augment, plan.channels, plan.image_size)
    is_own = isinstance(recipe.optim, OwnOptim)
    # A user's own may look at values; for the others shapes are enough, and cost nothing.
    device = torch.device("cpu" if is_own or is_own_model(recipe.model.name) else "meta")
    with torch.random.fork_rng(devices=[]):
        model = build_on(recipe.model, plan, device)
    checkpoint = checkpoint_to_start_from(recipe.model.weights)
    if recipe.model.weights != "off" and not checkpoint:
        weights_file(recipe.model.weights)
    layers = layers_of(recipe.optim, model)
    optimizer = build_optimizer(_of_shapes(recipe.optim), model.named_parameters(), device.type, layers)
    if is_own:
        with torch.random.fork_rng(devices=[]):
            _try_step(recipe.optim, optimizer, model)
    _, weights = build_loss(recipe.train, train, torch.device("cpu"))
    return tuple(filter(None, (layers_told(recipe.optim, optimizer, layers), weights)))


def _of_shapes(section: OptimSection) -> OptimSection:
    """Return `section` without the kernels it asks for, which torch refuses to tensors that hold nothing."""
    if isinstance(section, Sgd | Adam):
        return section.model_copy(update={"implementation": "loop"})
    return section


def _try_step(section: OptimSection, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    counters = build_counters(section, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:
        raise RecipeError(f"optim.name: {section.name} raised {told(error)} in its first step (mend it)") from error
    counters.values()

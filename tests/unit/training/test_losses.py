"""The losses that a recipe can choose: as timm's and torchvision's, the same over micro-batches, and plugins."""

import sys
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import sigmoid_focal_loss

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.core.errors import RecipeError
from paceline.recipe.schema.train import Train
from paceline.training.loss import CrossEntropy, build_loss

CPU = torch.device("cpu")
COUNTS = (2, 4, 4, 6, 8)
N, C = sum(COUNTS), len(COUNTS)
BALANCED = torch.tensor([N / (C * count) for count in COUNTS], dtype=torch.float64)


def criterion(loss: Any, **fields: Any) -> nn.Module:
    labels = np.repeat(np.arange(C), COUNTS)
    info = DatasetInfo("made", "train", N, tuple("abcde"), 1, (2, 2), (0.5,), (0.5,))
    source = ArraySource(info, np.zeros((N, 2, 2, 1), dtype=np.uint8), labels)
    return build_loss(Train.model_validate({"epochs": 1, "loss": loss, **fields}), source, CPU)[0]


def batch(*, mixed: bool = False, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(N, C, generator=generator, dtype=torch.float64)
    labels = torch.randint(C, (N,), generator=generator)
    if not mixed:
        return logits, labels
    share = torch.rand(N, 1, generator=generator, dtype=torch.float64)
    one, other = functional.one_hot(labels, C), functional.one_hot(labels.roll(1), C)
    return logits, share * one + (1 - share) * other


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_is_timms(smoothing: float, threshold: float | None) -> None:
    logits, labels = batch()
    ours = criterion({"name": "bce", "target_threshold": threshold or "off"}, label_smoothing=smoothing)
    theirs = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    torch.testing.assert_close(ours(logits, labels), theirs(logits, labels))
    summed = criterion({"name": "bce", "sum_classes": True}, label_smoothing=smoothing)
    expected = BinaryCrossEntropy(smoothing=smoothing, sum_classes=True)
    torch.testing.assert_close(summed(logits, labels), expected(logits, labels))


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_bce_of_mixed_images_is_timms(threshold: float | None) -> None:
    """timm smooths mixed targets where it mixes them, here before the loss."""
    logits, targets = batch(mixed=True)
    ours = criterion({"name": "bce", "target_threshold": threshold or "off"}, label_smoothing=0.1)
    theirs = BinaryCrossEntropy(target_threshold=threshold)
    torch.testing.assert_close(ours(logits, targets), theirs(logits, targets * 0.9 + 0.1 / C))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_sigmoid_focal_is_torchvisions(gamma: float, mixed: bool) -> None:
    logits, targets = batch(mixed=mixed)
    ours = criterion({"name": "focal", "gamma": gamma, "activation": "sigmoid"})
    probabilities = targets if mixed else functional.one_hot(targets, C).double()
    theirs = sigmoid_focal_loss(logits, probabilities, alpha=-1, gamma=gamma).sum(dim=1).mean()
    torch.testing.assert_close(ours(logits, targets), theirs)


def test_softmax_focal_of_two_classes_is_torchvisions_of_their_difference() -> None:
    logits, labels = batch()
    logits, labels = logits[:, :2], labels % 2
    theirs = sigmoid_focal_loss(logits[:, 1] - logits[:, 0], labels.double(), alpha=-1, gamma=2).mean()
    torch.testing.assert_close(criterion("focal")(logits, labels), theirs)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("weights", ["off", "balanced"])
def test_focal_without_gamma_is_cross_entropy(weights: str, mixed: bool) -> None:
    logits, targets = batch(mixed=mixed)
    ours = criterion({"name": "focal", "gamma": 0}, label_smoothing=0.1, class_weights=weights)
    theirs = CrossEntropy(0.1, None if weights == "off" else BALANCED)
    torch.testing.assert_close(ours(logits, targets), theirs(logits, targets))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_certain_predictions_have_finite_gradients(activation: str, gamma: float) -> None:
    logits, labels = batch(scale=1e4)
    logits = logits.float().requires_grad_()
    loss = criterion({"name": "focal", "gamma": gamma, "activation": activation})(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and gradient.isfinite().all()


LOSSES = ["cross_entropy", "bce", "focal", {"name": "focal", "activation": "sigmoid"}]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_weighted_losses_are_means_over_images_however_they_are_divided(loss: Any, mixed: bool) -> None:
    logits, targets = batch(mixed=mixed)
    function = criterion(loss, class_weights="balanced", label_smoothing=0.1)
    parts = [function(*each) for each in zip(logits.split(4), targets.split(4), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), function(logits, targets))


@pytest.mark.parametrize("loss", ["bce", {"name": "focal", "activation": "sigmoid"}])
def test_the_loss_of_an_image_has_the_weight_of_its_label(loss: Any) -> None:
    logits, labels = batch()
    plain, weighted = criterion(loss), criterion(loss, class_weights="balanced")
    images = torch.stack([plain(logits[i : i + 1], labels[i : i + 1]) for i in range(N)])
    torch.testing.assert_close(weighted(logits, labels), (images * BALANCED[labels]).mean())


@pytest.mark.parametrize("loss", LOSSES)
def test_logits_of_16_bits_are_computed_in_32(loss: Any) -> None:
    logits, labels = batch()
    assert criterion(loss)(logits.bfloat16(), labels).dtype == torch.float32


class Hinge(nn.Module):
    def __init__(self, margin: float = 1.0, is_trained: bool = False) -> None:
        super().__init__()
        self.margin = margin
        if is_trained:
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.multi_margin_loss(logits, targets, margin=self.margin, reduction="none")


def hinge(logits: Tensor, targets: Tensor, margin: float = 1.0) -> Tensor:
    return functional.multi_margin_loss(logits, targets, margin=margin, reduction="none")


def product(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits @ targets.T).diagonal()


class Shifted(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, logits: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        return scale * functional.cross_entropy(logits + self.shift, targets, reduction="none")


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets)


def broken(logits: Tensor, targets: Tensor) -> Tensor:
    raise ZeroDivisionError("no images")


def one_argument(logits: Tensor) -> Tensor:
    return logits


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_losses")
    for each in (Hinge, hinge, product, mean, broken, one_argument):
        setattr(module, each.__name__, each)
    module.an_object = Shifted()  # type: ignore[attr-defined]
    module.a_partial = partial(module.an_object, scale=1.0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_losses", module)


@pytest.mark.parametrize("name", ["Hinge", "hinge"])
def test_a_function_or_a_module_of_ones_own_is_averaged_and_weighted(name: str) -> None:
    logits, labels = batch()
    own = {"name": f"own_losses:{name}", "args": {"margin": 0.5}}
    images = hinge(logits, labels, margin=0.5)
    torch.testing.assert_close(criterion(own)(logits, labels), images.mean())
    weighted = criterion(own, class_weights="balanced")(logits, labels)
    torch.testing.assert_close(weighted, (images * BALANCED[labels]).mean())


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("own_losses:mean", r"own_losses:mean returned \(\), not a loss of each of 24 images \(use reduction='none'\)"),
        ("own_losses:broken", r"own_losses:broken raised ZeroDivisionError: no images at .*test_losses.py:\d+ \(fix"),
        (
            "own_losses:one_argument",
            r"takes 1 of the 2 arguments of a loss \(define one_argument\(logits, targets, \*\*args",
        ),
        ({"name": "own_losses:Hinge", "args": {"is_trained": True}}, "has parameters, which would not be trained"),
        (
            {"name": "own_losses:hinge", "args": {"gap": 1}},
            r"train.loss.args.gap: is not an argument of own_losses:hin",
        ),
    ],
)
def test_a_loss_that_does_not_fit_is_an_error_of_one_line(own: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        criterion(own)(*batch())
    assert str(caught.value).startswith("train.loss.") and "\n" not in str(caught.value)


def test_smoothing_of_ones_own_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="label_smoothing has no effect with loss own_losses:hinge"):
        criterion("own_losses:hinge", label_smoothing=0.1)


@pytest.mark.parametrize("loss", ["bce", {"name": "focal", "activation": "sigmoid"}, "own_losses:product"])
def test_autocast_does_not_round_a_loss_or_class_weights(loss: Any) -> None:
    logits, targets = batch(mixed=True)
    logits, targets = logits.float(), targets.float()
    weighted = criterion(loss, class_weights="balanced")
    expected = weighted(logits, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(weighted(logits, targets), expected)


@pytest.mark.parametrize(
    ("name", "args"), [("an_object", {}), ("an_object", {"scale": 2.0}), ("a_partial", {})], ids=str
)
def test_an_object_of_ones_own_is_checked_and_moved_like_a_class(name: str, args: dict[str, float]) -> None:
    logits, labels = batch()
    own = {"name": f"own_losses:{name}", "args": args}
    expected = args.get("scale", 1.0) * functional.cross_entropy(logits, labels)
    torch.testing.assert_close(criterion(own)(logits, labels), expected)
    module = sys.modules["own_losses"].an_object
    module.shift = module.shift.to("meta")  # as another device
    with pytest.raises(NotImplementedError, match="meta tensor"):
        criterion(own)
    module.shift = nn.Parameter(torch.zeros(()))
    with pytest.raises(RecipeError, match="has parameters, which would not be trained"):
        criterion(own)


@pytest.mark.parametrize(("threshold", "share", "every"), [(0.01, 0.1, 1), (0.95, 0.1, 0), (0.0, 0.2, 1)])
def test_smoothing_that_makes_all_targets_the_same_is_refused(threshold: float, share: float, every: int) -> None:
    loss = {"name": "bce", "target_threshold": threshold}
    with pytest.raises(RecipeError, match=f"train.loss.target_threshold: .* makes every target {every}, .*smoothing=0"):
        criterion(loss, label_smoothing=share)
    criterion(loss)

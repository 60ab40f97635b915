"""What a network says of images, class by class, the most probable first. It reads no files and prints nothing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.class_table import printable
from paceline.core.errors import RecipeError
from paceline.inference.classifier import Classifier
from paceline.inference.listing import Unread
from paceline.inference.reading import Picture

_EVALUATED = 5
"""How many of the best evaluation looks for (`train.metrics.answers`): which of equals `topk` gives depends on that."""

_HELD = 8
"""Of how many batches what cannot be read may wait for an image that comes before it."""
_NO_NUMBERS = "its logits are no numbers; take another --checkpoint"


@dataclass(frozen=True)
class Guess:
    """A class, and its probability from 0 to 1 by the network, of float32's precision."""

    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """An image, by its path, and the classes it is likely to be of, the likeliest first."""

    path: Path
    guesses: tuple[Guess, ...]


def predict(
    classifier: Classifier, pictures: Iterable[Picture | Unread], *, batch_size: int, top: int
) -> Iterator[Prediction | Unread]:
    """Give the `top` classes of each of `pictures`, in their order; up to `batch_size` go through the network at once.

    What could not be read stays in its place, and is given at once where no image waits before it. There are no more
    guesses than classes. Raise `RecipeError` where a GPU has no room for as many.
    """
    batch: list[Picture | Unread] = []
    num_pictures = 0
    for each in pictures:
        if not num_pictures and isinstance(each, Unread):
            yield each
            continue
        batch.append(each)
        num_pictures += isinstance(each, Picture)
        if num_pictures == batch_size or len(batch) >= _HELD * batch_size:
            yield from _answered(classifier, batch, top)
            batch, num_pictures = [], 0
    yield from _answered(classifier, batch, top)


def ranked(log_probabilities: Tensor, classes: Sequence[str], top: int) -> list[tuple[Guess, ...]]:
    """Return the `top` classes of each row of `log_probabilities`, float [N, len(classes)].

    Among equals, which 16-bit logits often are, the order is that in which evaluation counts.
    """
    best = log_probabilities.topk(min(_EVALUATED, len(classes)), dim=1).indices
    if top > _EVALUATED:
        others = log_probabilities.scatter(1, best, -torch.inf)
        best = torch.cat([best, others.topk(min(top, len(classes)) - best.shape[1], dim=1).indices], dim=1)
    best = best[:, :top]
    rows = zip(best.tolist(), log_probabilities.gather(1, best).exp().tolist(), strict=True)
    return [tuple(Guess(classes[number], share) for number, share in zip(*row, strict=True)) for row in rows]


def _answered(classifier: Classifier, batch: Sequence[Picture | Unread], top: int) -> Iterator[Prediction | Unread]:
    pixels = [each.pixels for each in batch if isinstance(each, Picture)]
    names = [printable(name) for name in classifier.classes]
    found = _asked(classifier, torch.stack(pixels)) if pixels else torch.empty(0, len(names))
    are_numbers = iter((~found.isnan().any(dim=1)).tolist())
    guesses = iter(ranked(found, names, top))
    for each in batch:
        if isinstance(each, Unread):
            yield each
            continue
        guess = next(guesses)
        yield Prediction(each.path, guess) if next(are_numbers) else Unread(each.path, _NO_NUMBERS)


def _asked(classifier: Classifier, images: Tensor) -> Tensor:
    try:
        return classifier.log_probabilities(images)
    except torch.OutOfMemoryError:
        fix = f"try {len(images) // 2}" if len(images) > 1 else "use --device cpu"
        raise RecipeError(f"--batch-size: {len(images)}: the GPU has no room for as many images ({fix})") from None

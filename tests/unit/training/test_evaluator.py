"""Evaluation counts every image of its split once, and leaves the model as it was."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.core.results import ClassCount
from paceline.data.bad_images import BadImage
from paceline.data.batch import Batch
from paceline.data.order import EvalShard
from paceline.data.transfer import DeviceTransfer
from paceline.parallel.strategy import SingleDevice, Strategy
from paceline.training.evaluator import EvalViews, SplitEvaluator, flip_views, shift_views, single_view
from paceline.training.precision import build_precision
from paceline.training.scores import ExtraMetrics

CPU = torch.device("cpu")
NAMES = tuple("abcdefg")
INFO = DatasetInfo("made", "val", 21, NAMES, 1, (4, 4), (0.5,), (0.25,))
IMAGES = np.broadcast_to(np.arange(21, dtype=np.uint8)[:, None, None, None], (21, 4, 4, 1)).copy()
LABELS = np.arange(21, dtype=np.int64) % 7
PLACE = DeviceTransfer(CPU, torch.float32, (0.5,), (0.25,), torch.contiguous_format)


@dataclass(frozen=True)
class Shard:
    """A loader of a rank's part of the 21 images."""

    shard: EvalShard
    source: ArraySource

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of the shard."""
        for number in range(first, stop):
            indices = self.shard.indices(number)
            images = torch.from_numpy(self.source.images[indices]).permute(0, 3, 1, 2)
            labels = torch.from_numpy(self.source.labels[indices])
            yield Batch(images, labels, indices, torch.empty(len(indices), 0, dtype=torch.float64))


class Table(nn.Module):
    """A model that answers with fixed logits, chosen by the first pixel."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[(images[:, 0, 0, 0] * 0.25 * 255 + 0.5 * 255).round().long()]


def evaluator(
    shard: EvalShard,
    strategy: Strategy | None = None,
    num_images: int = 21,
    views: EvalViews | None = None,
    worst: int = 0,
) -> SplitEvaluator:
    return SplitEvaluator(
        loader=Shard(shard, ArraySource(INFO, IMAGES, LABELS)),
        num_batches=shard.num_batches,
        num_images=num_images,
        class_names=NAMES,
        transfer=PLACE,
        precision=build_precision("fp32", CPU),
        strategy=strategy or SingleDevice(),
        device=CPU,
        views=views or single_view,
        num_worst=worst,
    )


def logits() -> Tensor:
    return torch.randn(21, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch", [1, 4, 21, 64])
def test_evaluation_is_exact(batch: int) -> None:
    answers, truth = logits(), torch.from_numpy(LABELS)
    result, table, *_ = evaluator(EvalShard(21, batch))(Table(answers))
    right = answers.argmax(1) == truth
    assert result.images == 21
    assert result.top1 == right.sum().item() / 21
    assert result.top5 == (answers.topk(5).indices == truth[:, None]).sum().item() / 21
    # The reference averages in float32.
    assert result.loss == pytest.approx(functional.cross_entropy(answers, truth).item(), rel=1e-6)
    predicted = answers.argmax(1)
    counts = [
        ClassCount(name, 3, int(right[truth == number].sum()), int((predicted == number).sum()))
        for number, name in enumerate(NAMES)
    ]
    assert table.classes == tuple(counts)
    assert sum(map(sum, table.confusion)) == 21


class Recorded(SingleDevice):
    """A rank that notes what it would sum over the ranks."""

    def __init__(self, sums: list[Tensor]) -> None:
        self.sums = sums

    def sum(self, value: Tensor) -> Tensor:
        self.sums.append(value.clone())
        return value


class Replayed(SingleDevice):
    """A rank that is calls what all ranks sum to."""

    def __init__(self, totals: list[Tensor]) -> None:
        self._totals = iter(totals)

    def sum(self, value: Tensor) -> Tensor:
        return next(self._totals)


class Listed(SingleDevice):
    """A rank that hands on what it would show to every rank, and is answered that all ranks have the same."""

    def __init__(self, shown: list[Tensor], world_size: int) -> None:
        self._shown, self._world_size = shown, world_size

    def all_gather(self, value: Tensor) -> Tensor:
        self._shown.append(value)
        return value.expand(self._world_size, *value.shape)


@pytest.mark.parametrize("world_size", [2, 3, 30])
def test_ranks_together_count_what_one_rank_counts(world_size: int) -> None:
    """With 30 ranks for 21 images some have none; what each would send is summed here and given to the first."""
    shards = [EvalShard(21, 4, rank, world_size) for rank in range(world_size)]
    sums: list[list[Tensor]] = []
    for shard in shards:
        mine: list[Tensor] = []
        with pytest.raises(AssertionError, match="images were counted of 21"):  # a part is not the whole
            evaluator(shard, Recorded(mine))(Table(logits()))
        sums.append(mine)
    totals = [torch.stack(parts).sum(0) for parts in zip(*sums, strict=True)]
    together = evaluator(shards[0], Replayed(totals))(Table(logits()))
    alone = evaluator(EvalShard(21, 4))(Table(logits()))
    assert together.result.top1 == alone.result.top1
    assert together.classes.classes == alone.classes.classes and together.classes.confusion == alone.classes.confusion
    for ours, theirs in zip(together.classes.calibration, alone.classes.calibration, strict=True):
        assert replace(ours, confidence=theirs.confidence) == theirs
        assert ours.confidence == pytest.approx(theirs.confidence, rel=1e-12)  # float64 sums in another order
    assert together.result.loss == pytest.approx(alone.result.loss, rel=1e-12)
    assert together.result.ece == pytest.approx(alone.result.ece, rel=1e-12)


def test_unreadable_images_are_excluded_and_reported() -> None:
    """Of each batch of four the first is bad: six of the 21; the last batch, of one, is then empty."""
    calls = []

    class Ledger:
        def add(self, bad) -> int:
            calls.extend(image.index for image in bad)
            return len(bad)

        def sync(self) -> None:
            calls.append("synced")

    class Holed(Shard):
        def batches(self, first: int, stop: int) -> Iterator[Batch]:
            for batch in super().batches(first, stop):
                bad = BadImage(int(batch.indices[0]), "a photo", "is empty")
                yield Batch(batch.images[1:], batch.labels[1:], batch.indices[1:], batch.draws[1:], (bad,))

    whole = evaluator(EvalShard(21, 4))
    holed = replace(whole, loader=Holed(whole.loader.shard, whole.loader.source), bad_images=Ledger())
    result, *_ = holed(Table(logits()))
    assert result.images == 15 and calls == [0, 4, 8, 12, 16, 20, "synced"]


def test_an_evaluation_that_a_rank_leaves_has_no_result() -> None:
    batches = []

    def leaves() -> bool:
        batches.append("one")
        return len(batches) == 3

    model = Table(logits()).train()
    assert replace(evaluator(EvalShard(21, 4)), should_stop=leaves)(model) is None
    assert len(batches) == 3 and model.training


def test_an_evaluation_that_another_rank_left_has_no_result() -> None:
    class StoppedStrategy(SingleDevice):
        def sum(self, value: Tensor) -> Tensor:
            return value + 1 if value.dtype == torch.int64 and value.shape == (3,) else value

    assert evaluator(EvalShard(21, 4), StoppedStrategy())(Table(logits())) is None


def test_an_image_that_went_missing_ends_the_run() -> None:
    with pytest.raises(AssertionError, match="21 images were counted of 22"):
        evaluator(EvalShard(21, 4), num_images=22)(Table(logits()))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_in_evaluation_mode_inside_and_as_it_was_afterwards(training: bool) -> None:
    modes = []

    class Watched(Table):
        def forward(self, images: Tensor) -> Tensor:
            modes.append(self.training)
            return super().forward(images)

    model = Watched(logits()).train(training)
    evaluator(EvalShard(21, 8))(model)
    assert modes == [False] * 3 and model.training is training


@dataclass
class Counting(SingleDevice):
    """A rank that notes when `evaluating` is entered and left."""

    events: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        self.events.append("enter")
        yield
        self.events.append("leave")

    def sum(self, value: Tensor) -> Tensor:
        self.events.append("sum")
        return value


def test_ranks_meet_only_before_and_after_counting() -> None:
    strategy = Counting()
    evaluator(EvalShard(21, 1), strategy)(Table(logits()))
    assert strategy.events == ["enter", "leave", "sum", "sum", "sum", "sum", "sum"]


def test_the_worst_mistakes_are_those_of_the_whole_split() -> None:
    answers, truth = logits(), torch.from_numpy(LABELS)
    losses = functional.cross_entropy(answers.double(), truth, reduction="none")
    mistaken = [index for index in range(21) if answers[index].argmax() != LABELS[index]]
    expected = sorted(mistaken, key=lambda index: -losses[index])[:6]
    found = evaluator(EvalShard(21, 4), worst=6)(Table(answers)).worst
    assert [each.index for each in found] == expected and len(mistaken) > 6
    assert all(each.label == LABELS[each.index] for each in found)
    assert [each.predicted for each in found] == answers[expected].argmax(1).tolist()
    assert [each.loss for each in found] == pytest.approx(losses[expected].tolist(), rel=1e-15)


def test_the_worst_mistakes_carry_the_indices_of_the_images_that_could_be_read() -> None:
    class Holed(Shard):
        def batches(self, first: int, stop: int) -> Iterator[Batch]:
            for batch in super().batches(first, stop):
                bad = BadImage(int(batch.indices[0]), "a photo", "is empty")
                yield Batch(batch.images[1:], batch.labels[1:], batch.indices[1:], batch.draws[1:], (bad,))

    whole = evaluator(EvalShard(21, 4), worst=21)
    holed = replace(whole, loader=Holed(whole.loader.shard, whole.loader.source))
    kept = [each for each in whole(Table(logits())).worst if each.index % 4]
    assert holed(Table(logits())).worst == tuple(kept) and kept


def test_every_rank_joins_the_gather_of_mistakes() -> None:
    """A rank without images has rows all the same: a collective takes equally much from each."""
    shown: list[Tensor] = []
    right = torch.eye(7)[torch.from_numpy(LABELS)]
    found = evaluator(EvalShard(21, 4), Listed(shown, 3), worst=5)(Table(right))
    assert found.worst == () and [each.shape for each in shown] == [(5, 5)]


def test_without_mistakes_to_keep_nothing_is_gathered() -> None:
    shown: list[Tensor] = []
    assert evaluator(EvalShard(21, 4), Listed(shown, 3))(Table(logits())).worst == () and not shown


class Lopsided(nn.Module):
    """A model whose logits are the first columns of pixels, so that a mirror image gives others."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, 0, 0]


def test_a_mirrored_view_is_the_mean_of_both_logits() -> None:
    images = torch.tensor([[1.0, 2.0, 4.0, 8.0]]).view(1, 1, 1, 4)
    assert flip_views(Lopsided(), images).tolist() == [[4.5, 3.0, 3.0, 4.5]]
    assert single_view(Lopsided(), images).tolist() == [[1.0, 2.0, 4.0, 8.0]]


def test_a_mirrored_view_does_not_round_the_mean_of_16_bit_logits() -> None:
    images = torch.tensor([[1.0, 0.0, 0.0, 1.0078125]]).view(1, 1, 1, 4).bfloat16()
    assert flip_views(Lopsided(), images)[0, 0].item() == 1.00390625


def test_six_views_are_both_shifts_of_both_pairs_by_weight() -> None:
    images = torch.rand(2, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    seen = []

    class Watching(nn.Module):
        def forward(self, shown: torch.Tensor) -> torch.Tensor:
            assert shown.is_contiguous(memory_format=torch.channels_last)
            seen.append(shown)
            return shown.mean(dim=(2, 3))

    found = shift_views(Watching(), images)
    padded = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
    views = [images, padded[..., :5, :6], padded[..., 2:, 2:]]
    assert len(seen) == 6
    assert all(any(torch.equal(each, view) for each in seen) for base in views for view in (base, base.flip(3)))
    weighed = sum(share * view.double().mean(dim=(2, 3)) for view, share in zip(views, (0.5, 0.25, 0.25), strict=True))
    assert torch.allclose(found, weighed, atol=1e-6)  # a mean does not see a mirror


def test_an_evaluator_looks_through_its_views() -> None:
    class Opposite:
        def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
            return -model(images)

    result, *_ = evaluator(EvalShard(21, 8), views=Opposite())(Table(logits()))
    assert result.top1 == (logits().argmin(1) == torch.from_numpy(LABELS)).sum().item() / 21


def test_all_ranks_learn_of_progress_while_rank_0_computes_metrics() -> None:
    counts: list[int] = []
    sums: list[Tensor] = []
    measured = replace(
        evaluator(EvalShard(21, 4), Recorded(sums)),
        metrics=ExtraMetrics(("auroc",)),
        on_progress=lambda: counts.append(len(sums)),
    )
    assert measured(Table(logits())) is not None
    assert len(counts) == len(NAMES) and counts == sorted(set(counts)), "after a collective each"
    counts.clear()
    replace(measured, metrics=ExtraMetrics(("f1",)))(Table(logits()))
    assert counts == []


def test_the_prediction_for_each_image_is_listed() -> None:
    answers = logits()
    listed = replace(evaluator(EvalShard(21, 4)), lists_predictions=True)(Table(answers))
    assert listed is not None
    probabilities = answers.double().softmax(1).max(1).values
    for index, each in enumerate(listed.predictions):
        assert (each.index, each.label, each.predicted) == (index, LABELS[index], int(answers[index].argmax()))
        assert each.probability == pytest.approx(float(probabilities[index]))
    assert sum(each.label == each.predicted for each in listed.predictions) == round(21 * listed.result.top1)
    assert evaluator(EvalShard(21, 4))(Table(answers)).predictions == ()

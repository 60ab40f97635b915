"""Samplers that draw: their distributions, exactness over ranks and steps, and the digests of their values."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from paceline.core.dataset import ArraySource, TargetTable
from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.core.random import Stream, exponential, permutation, permute, uniform_pairs
from paceline.data.loaders.sampler import balanced_weights, build_sampler, count_samples
from paceline.data.order import TrainBatchSchedule, TrainOrder
from paceline.data.sampler import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    CurriculumSampler,
    DistinctWeightedSampler,
    Sampler,
    ShuffleSampler,
    SubsetSampler,
    WeightedSampler,
    choose_subset,
    rank_images,
)
from paceline.data.sources.build import build_datasets
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Synthetic

RARE = np.repeat(np.arange(4), [200, 60, 30, 10])
SECTION = Synthetic(num_images=len(RARE), num_val_images=1, num_classes=4, image_size=1)
N, BATCH = len(RARE), 24
UNEVEN = np.array([0, 1, 2, 0.5, 0, 4])


def to_steps(duration: Any) -> int:
    return int(duration.steps(steps_per_epoch=N // BATCH, batch_size=BATCH, total_steps=10 * (N // BATCH)))


@pytest.fixture(scope="module")
def source() -> ArraySource:
    train = build_datasets(SECTION, may_download=False).train
    assert isinstance(train, ArraySource)
    return replace(train, labels=RARE)


@pytest.fixture
def build(source: ArraySource, tmp_path: Path) -> Callable[..., Sampler]:
    """Build a sampler of a recipe, whose column `value` is the index of each image modulo 7."""
    (tmp_path / "values.csv").write_text("value\n" + "\n".join(str(index % 7) for index in range(N)))

    def built(**section: object) -> Sampler:
        if "column" in section:
            section.setdefault("file", str(tmp_path / "values.csv"))
        data = Data(source=SECTION, batch_size=BATCH, sampler=section)  # type: ignore[arg-type]
        sampler = build_sampler(data, source, to_steps)
        assert sampler.num_samples(N) == count_samples(data, N)
        return sampler

    return built


def draw(sampler: Sampler, num_images: int = N, epochs: int = 1) -> np.ndarray:
    """Return the samples of whole epochs."""
    size = sampler.num_samples(num_images)
    return np.concatenate([sampler.select(5, epoch, 0, size, num_images).indices for epoch in range(epochs)])


def is_drawn_by(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Return whether counts fit probabilities; draws are seeded, so this never changes."""
    return bool(chisquare(counts, probabilities / probabilities.sum() * counts.sum()).pvalue > 0.01)


SAMPLERS = [
    {"name": "shuffle"},
    {"name": "balanced"},
    {"name": "weighted", "classes": {"1": 3.0}},
    {"name": "weighted", "column": "value"},
    {"name": "weighted", "column": "value", "replacement": False, "num_samples": 100},
    {"name": "subset", "fraction": 0.5},
    {"name": "curriculum", "column": "value"},
]


@pytest.mark.parametrize("section", SAMPLERS, ids=lambda section: str(section["name"]))
def test_any_number_of_ranks_shares_the_samples_of_a_step_in_any_order_of_steps(build, section) -> None:
    whole = TrainOrder(5, N, BATCH, sampler=build(**section))
    sampler = build(**section)
    for step in reversed(range(2 * whole.steps_per_epoch)):
        for ranks in (2, 3, 4):
            parts = [TrainOrder(5, N, BATCH, rank, ranks, sampler) for rank in range(ranks)]
            assert np.concatenate([part.indices(step) for part in parts]).tolist() == whole.indices(step).tolist()
            assert np.concatenate([part.draw_keys(step) for part in parts]).tolist() == whole.draw_keys(step).tolist()


@pytest.mark.parametrize("section", SAMPLERS, ids=lambda section: str(section["name"]))
def test_samples_of_one_epoch_have_draws_of_their_own(build, section) -> None:
    order = TrainOrder(5, N, BATCH, sampler=build(**section))
    schedule = TrainBatchSchedule(order, lambda step: 1, [False], 0)
    draws = np.concatenate([schedule.draws(step) for step in range(order.steps_per_epoch)])
    assert len(np.unique(draws)) == len(draws) == order.steps_per_epoch * BATCH


@pytest.mark.parametrize(
    ("power", "shares"), [(1, [1, 1, 1, 1]), (0.5, np.sqrt([200, 60, 30, 10])), (0, [20, 6, 3, 1])]
)
def test_balanced_draws_classes_by_a_power_of_their_images_and_any_image_of_a_class(build, power, shares) -> None:
    drawn = draw(build(name="balanced", power=power), epochs=20)
    assert is_drawn_by(np.bincount(RARE[drawn]), np.asarray(shares, dtype=float))
    assert is_drawn_by(np.bincount(drawn[RARE[drawn] == 1], minlength=N)[200:260], np.ones(60))


def test_an_image_of_several_labels_counts_for_its_rarest_class(source: ArraySource) -> None:
    rows = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=np.float32)
    info = replace(source.info, class_names=("a", "b", "c"), targets=TargetTable(rows))
    weights = balanced_weights(info, np.array([0, 0, 0, 1, 2]))
    assert weights.tolist() == [1 / 4, 1 / 4, 1 / 4, 1, 1 / 4]


@pytest.mark.parametrize("scale", [1, MIN_WEIGHT * 2, MAX_WEIGHT / 4])
def test_weighted_draws_by_weight_and_never_a_weight_of_zero(scale: float) -> None:
    for sampler in (WeightedSampler(UNEVEN * scale, 5000), DistinctWeightedSampler(UNEVEN * scale, 3)):
        assert draw(sampler, 6).tolist() == draw(replace(sampler, weights=UNEVEN), 6).tolist()
    counts = np.bincount(draw(WeightedSampler(UNEVEN, 5000), 6), minlength=6)
    assert counts[UNEVEN == 0].tolist() == [0, 0] and is_drawn_by(counts[UNEVEN > 0], UNEVEN[UNEVEN > 0])


def test_the_last_weights_of_zero_are_not_drawn_at_the_end_of_the_distribution(monkeypatch) -> None:
    monkeypatch.setattr("paceline.data.sampler.uniform_pairs", lambda *args: np.full((2, 2), 1.0))
    assert WeightedSampler(np.array([3, 0.1, 0])).select(0, 0, 0, 2, 3).indices.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("weights", "size"), [([3, 1, 2], 1), ([3, 1, 2], 2), ([5, 1, 1, 0.5], 2), ([4, 3, 2, 1, 0.5], 3)]
)
def test_without_replacement_subsets_have_the_probabilities_of_successive_draws(weights, size) -> None:
    """The oracle enumerates every order in which images can be drawn one after the other."""
    expected = dict.fromkeys(map(frozenset, combinations(range(len(weights)), size)), 0.0)
    for order in permutations(range(len(weights)), size):
        left, probability = sum(weights), 1.0
        for image in order:
            probability *= weights[image] / left
            left -= weights[image]
        expected[frozenset(order)] += probability
    sampler = DistinctWeightedSampler(np.array(weights, dtype=float), size)
    drawn = draw(sampler, len(weights), epochs=800).reshape(-1, size)
    counts = Counter(frozenset(row) for row in drawn.tolist())
    assert is_drawn_by(np.array([counts[key] for key in expected]), np.array([*expected.values()]))
    # They are shuffled: the heaviest is as often last as first.
    first, last = (np.count_nonzero(drawn[:, column] == np.argmax(weights)) for column in (0, -1))
    assert is_drawn_by(np.array([first, last]), np.ones(2))


def test_without_replacement_no_image_is_drawn_twice_and_none_of_weight_zero(build) -> None:
    drawn = draw(build(name="weighted", column="value", replacement=False, num_samples=200))
    assert len(set(drawn.tolist())) == 200 and (drawn % 7 > 0).all()


@pytest.mark.parametrize("size", [1, 37, 150, 299, 300])
def test_a_subset_is_fixed_distinct_and_has_the_share_of_each_class(build, size: int) -> None:
    sampler = build(name="subset", num_images=size)
    drawn = draw(sampler, epochs=2).reshape(2, size)
    assert set(drawn[0].tolist()) == set(drawn[1].tolist()) and len(set(drawn[0].tolist())) == size
    assert size < 37 or drawn[0].tolist() != drawn[1].tolist()
    shares = np.bincount(RARE[drawn[0]], minlength=4) - np.bincount(RARE) * size / N
    assert (np.abs(shares) < 1).all()


def test_the_seed_of_a_subset_is_its_own() -> None:
    assert choose_subset(0, N, 50).tolist() != choose_subset(1, N, 50).tolist()
    assert choose_subset(0, N, 50, RARE).tolist() != choose_subset(1, N, 50, RARE).tolist()
    assert choose_subset(0, N, 50).tolist() != sorted(permutation(0, 0, N)[:50].tolist())


def test_a_curriculum_begins_with_the_easiest_and_ends_with_all(build) -> None:
    sampler = build(name="curriculum", column="value", order="descending", begin=0.25, end="40%")
    assert isinstance(sampler, CurriculumSampler)
    hardest = []
    for epoch in range(6):
        drawn = sampler.select(5, epoch, 0, N, N).indices
        counts = Counter(drawn.tolist())
        assert len(counts) == sampler.num_used(epoch) and max(counts.values()) - min(counts.values()) <= 1
        hardest.append(min(index % 7 for index in counts))
    assert [sampler.num_used(epoch) for epoch in range(6)] == [75, 131, 188, 244, 300, 300]
    assert hardest == [5, 3, 2, 1, 0, 0]


def test_any_image_of_a_curriculum_may_be_in_the_part_of_a_round_that_ends_an_epoch() -> None:
    sampler = CurriculumSampler(np.arange(10), 0.6, float("inf"))
    counts = sum(np.bincount(sampler.order(5, epoch, 10).indices, minlength=10) for epoch in range(300))
    assert counts[6:].tolist() == [0] * 4 and is_drawn_by(counts[:6] - 300, np.ones(6))


def test_equal_difficulties_are_not_in_the_order_of_the_images() -> None:
    ranked = rank_images(np.zeros(100), is_descending=False)
    assert sorted(ranked.tolist()) == list(range(100)) != ranked.tolist()
    values = np.array([2.0, 0, 1, 0])
    assert values[rank_images(values, is_descending=False)].tolist() == [0, 0, 1, 2]
    assert values[rank_images(values, is_descending=True)].tolist() == [2, 1, 0, 0]


def test_a_digest_changes_with_the_values_alone(build) -> None:
    digests = [build(**section).digest for section in (*SAMPLERS, *SAMPLERS)]
    assert digests[: len(SAMPLERS)] == digests[len(SAMPLERS) :]
    assert digests[0] == "" and all(len(each) == 16 for each in digests[1 : len(SAMPLERS)])
    assert WeightedSampler(UNEVEN).digest != WeightedSampler(UNEVEN + 1).digest
    assert SubsetSampler(np.arange(3)).digest != SubsetSampler(np.arange(4)).digest


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"name": "weighted", "classes": {"cat": 2.0}}, "data.sampler.classes: 'cat' is not a class"),
        ({"name": "weighted", "classes": dict.fromkeys("0123", 0.0)}, "data.sampler: weighted has a weight of 0 for"),
        (
            {"name": "weighted", "classes": {"0": 1e308}},
            "data.sampler.classes: the weight of synthetic/train[0], 1e+308,",
        ),
        (
            {"name": "weighted", "column": "value", "replacement": False, "num_samples": 300},
            "data.sampler.num_samples: 300 is more than the 257 images with a weight above 0 (",
        ),
        ({"name": "subset", "num_images": 301}, "data.sampler.num_images: 301 is more than the 300 training images ("),
        ({"name": "weighted", "column": "vaule"}, "data.sampler.column: "),
    ],
)
def test_weights_that_cannot_be_used_are_refused_with_place_value_and_fix(build, section, error: str) -> None:
    with pytest.raises(PacelineError) as caught:
        build(**section)
    assert str(caught.value).startswith(error) and str(caught.value).endswith(")")


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x", "", "1e300", "1e-300"])
def test_a_weight_that_is_no_number_of_at_least_zero_is_named(build, tmp_path: Path, value: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text("value,rest\n" + "\n".join(f"{value if index == 9 else 1},x" for index in range(N)))
    with pytest.raises((RecipeError, DataError), match=r"data\.sampler\.column: .*train\[9\].*\(correct it\)"):
        build(name="weighted", column="value", file=str(path))


def test_labels_that_come_with_the_images_alone_are_refused(build, monkeypatch) -> None:
    monkeypatch.setattr("paceline.data.loaders.sampler.get_labels", lambda source: None)
    for section in (
        {"name": "balanced"},
        {"name": "weighted", "classes": {"1": 2.0}},
        {"name": "subset", "fraction": 0.1},
    ):
        with pytest.raises(RecipeError, match=r"data\.sampler: .*needs labels.*\("):
            build(**section)
    assert draw(build(name="subset", fraction=0.1, stratified="off")).size == 30


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1024, 5000])
def test_permuted_positions_are_a_permutation(n: int) -> None:
    whole = permute(3, 1, np.arange(n), n)
    assert sorted(whole.tolist()) == list(range(n))
    assert permute(3, 1, np.array([n - 1, 0]), n).tolist() == whole[[n - 1, 0]].tolist()
    if n > 10:
        assert len({tuple(permute(seed, epoch, np.arange(n), n)) for seed in (3, 4) for epoch in (0, 1)}) == 4


def test_any_image_comes_at_any_position_of_permuted_epochs() -> None:
    seen = np.stack([permute(7, epoch, np.arange(7), 7) for epoch in range(600)])
    for position in range(7):
        assert is_drawn_by(np.bincount(seen[:, position], minlength=7), np.ones(7))
    neighbors = np.bincount(seen[:, 0] * 7 + seen[:, 1], minlength=49)[~np.eye(7, dtype=bool).ravel()]
    assert is_drawn_by(neighbors, np.ones(42))


def test_positions_of_a_billion_images_are_permuted_without_a_table() -> None:
    order = TrainOrder(1, 10**9, 4096, sampler=ShuffleSampler())
    first, second = order.indices(0), order.indices(1)
    assert len(np.unique([first, second])) == 8192 and first.max() < 10**9
    assert is_drawn_by(np.histogram([first, second], bins=16, range=(0, 10**9))[0], np.ones(16))


def test_exponential_is_the_logarithm_to_the_last_bits() -> None:
    uniforms = np.concatenate(
        [uniform_pairs(1, Stream.SAMPLER, 0, np.arange(5000)).ravel(), [0, 2**-53, 0.5, 1 - 2**-53]]
    )
    assert np.allclose(exponential(uniforms), -np.log1p(-uniforms), rtol=1e-15, atol=0)
    assert len(np.unique(uniforms)) == len(uniforms) and is_drawn_by(np.histogram(uniforms, 20, (0, 1))[0], np.ones(20))

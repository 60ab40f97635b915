"""`core.philox`: the published generator, and numbers that depend on nothing but what they are keyed by."""

import numpy as np
import pytest

from paceline.core.random import (
    Stream,
    permutation,
    permute,
    philox,
    stable_argsort,
    step_seed,
    uniform,
    uniform_pairs,
)

# Random123 (D. E. Shaw Research), examples/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def seed_of(key: str) -> int:
    low, high = words(key)
    return high << 32 | low


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, expected):
    counters = np.array(words(counter), dtype=np.uint64)[:, None]
    assert np.stack(philox(tuple(counters), seed_of(key)))[:, 0].tolist() == words(expected)


def test_philox_of_many_counters_is_philox_of_each_and_leaves_them_alone():
    counters = np.arange(40, dtype=np.uint64).reshape(4, 10)
    before = counters.copy()
    each = [np.stack(philox(tuple(counters[:, n : n + 1]), 5)) for n in range(10)]
    assert np.array_equal(np.stack(philox(tuple(counters), 5)), np.hstack(each))
    assert np.array_equal(counters, before)


def test_integers_and_arrays_give_equal_words():
    counters = np.arange(40, dtype=np.uint64).reshape(4, 10)
    arrays = np.stack(philox(tuple(counters), 5))
    for n in range(10):
        assert list(philox(tuple(int(word) for word in counters[:, n]), 5)) == arrays[:, n].tolist()


def test_uniform_is_the_words_of_philox_at_draw_epoch_index_and_stream():
    draws = uniform(9, Stream.AUGMENT, 4, np.array([6]), 8)
    counters = np.array([[0, 1], [4, 4], [6, 6], [Stream.AUGMENT] * 2], dtype=np.uint64)
    assert np.array_equal(draws[0], np.stack(philox(tuple(counters), 9)).T.ravel() / 2.0**32)


@pytest.mark.parametrize("num_draws", [0, 1, 3, 4, 5, 9])
def test_a_draw_does_not_depend_on_how_many_are_drawn(num_draws):
    indices = np.arange(7)
    most = uniform(1, Stream.AUGMENT, 2, indices, 12)
    assert np.array_equal(uniform(1, Stream.AUGMENT, 2, indices, num_draws), most[:, :num_draws])


@pytest.mark.parametrize("indices", [[], [3], [6, 0, 3], [2, 2, 2], list(range(10))[::-1]])
def test_a_sample_does_not_depend_on_the_other_indices(indices):
    chosen = np.array(indices, dtype=np.int64)
    everything = uniform(1, Stream.AUGMENT, 2, np.arange(10), 5)
    assert np.array_equal(uniform(1, Stream.AUGMENT, 2, chosen, 5), everything[chosen])


def test_uniform_differs_by_seed_stream_epoch_index_and_draw():
    base = uniform(1, Stream.AUGMENT, 2, np.array([3, 4]), 5)
    others = [
        uniform(0, Stream.AUGMENT, 2, np.array([3, 4]), 5),
        uniform(1 + 2**32, Stream.AUGMENT, 2, np.array([3, 4]), 5),
        uniform(1, Stream.ORDER, 2, np.array([3, 4]), 5),
        uniform(1, Stream.AUGMENT, 3, np.array([3, 4]), 5),
    ]
    values = np.concatenate([base, *others]).ravel()
    assert len(np.unique(values)) == len(values) == 50


def test_uniform_is_roughly_uniform_and_its_draws_are_roughly_uncorrelated():
    """5 standard errors of 100,000 (20,000 for correlations) independent draws; the seed is fixed, so no flake."""
    draws = uniform(3, Stream.AUGMENT, 1, np.arange(20_000), 5)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    shares = np.histogram(draws, bins=10, range=(0, 1))[0] / draws.size
    assert np.abs(shares - 0.1).max() < 5 * np.sqrt(0.1 * 0.9 / draws.size)
    assert np.abs(np.corrcoef(draws.T) - np.eye(5)).max() < 5 / np.sqrt(len(draws))


def test_the_streams_never_change():
    """Their numbers are part of what every random value is keyed by."""
    later = {"SAMPLER": 6, "PERMUTATION": 7, "SUBSET": 8, "FOLDS": 9}
    streams = {"ORDER": 0, "AUGMENT": 1, "STEP": 2, "SAMPLE": 3, "SEARCH": 4, "ADAPTERS": 5, **later}
    assert {stream.name: stream.value for stream in Stream} == streams


@pytest.mark.parametrize("n", [0, 1, 2, 10, 1797])
def test_a_permutation_visits_every_sample_once(n):
    order = permutation(0, 0, n)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))


def test_permutations_differ_between_epochs_and_seeds():
    orders = [permutation(seed, epoch, 100) for seed in (0, 1, 2**40) for epoch in range(3)]
    assert len({order.tobytes() for order in orders}) == 9


@pytest.mark.parametrize(
    ("seed", "epoch", "order"),
    [
        (0, 0, [2, 8, 0, 6, 1, 5, 7, 9, 3, 4]),
        (0, 1, [2, 4, 3, 5, 9, 8, 0, 1, 6, 7]),
        (1, 0, [9, 1, 7, 6, 3, 8, 4, 0, 2, 5]),
        (2**62 + 5, 3, [6, 3, 1, 9, 4, 5, 2, 0, 8, 7]),
    ],
)
def test_the_order_of_a_seed_never_changes(seed, epoch, order):
    """A new order would make every run in the world irreproducible, so it is written down here."""
    assert permutation(seed, epoch, 10).tolist() == order


def test_drawn_samples_of_a_seed_never_change():
    samples = [320172003, 39290093, 487505712, 343252685, 755674001, 264229937]
    assert permute(3, 1, np.arange(6), 10**9).tolist() == samples
    draws = [[3340168606781288, 1026476464964569], [4317155611718578, 4874833450214119]]
    assert (uniform_pairs(3, Stream.SAMPLER, 1, np.arange(2)) * 2.0**53).tolist() == draws


@pytest.mark.parametrize(
    ("seed", "step", "rank", "expected"),
    [
        (0, 0, 0, 7969087149448024173),
        (0, 1, 0, 6722859695921636457),
        (0, 0, 1, 6678899627856966910),
        (7, 2**33, 3, 4649224688263621859),
    ],
)
def test_the_seed_of_a_step_never_changes(seed, step, rank, expected):
    assert step_seed(seed, step, rank) == expected


def test_step_seeds_differ_by_seed_step_and_rank_and_fit_63_bits():
    steps = (0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**40)
    seeds = [step_seed(seed, step, rank) for seed in (0, 1, 2**62) for step in steps for rank in range(8)]
    assert len(set(seeds)) == len(seeds) == 168
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


@pytest.mark.parametrize("num_draws", [1, 5])
def test_many_samples_are_drawn_for_as_few_are(num_draws):
    """Beyond what is computed at once."""
    indices = np.arange(20_000)[::-1]
    draws = uniform(4, Stream.AUGMENT, 3, indices, num_draws)
    parts = [uniform(4, Stream.AUGMENT, 3, indices[start : start + 7], num_draws) for start in range(0, 20_000, 7)]
    assert np.array_equal(draws, np.concatenate(parts))


def test_a_long_order_is_that_of_the_words_of_philox():
    n = 20_000
    zeros = np.zeros(n, dtype=np.uint64)
    high, low, _, _ = philox((zeros, zeros + 3, np.arange(n, dtype=np.uint64), zeros + int(Stream.ORDER)), 2**40 + 5)
    keys = high << np.uint64(32) | low
    assert np.array_equal(permutation(2**40 + 5, 3, n), np.argsort(keys, kind="stable"))


@pytest.mark.parametrize("kinds", [1, 2, 50, 10_000])
@pytest.mark.parametrize("shift", [0, 9, 52])
def test_sorting_by_keys_is_stable_whichever_bits_are_equal(kinds, shift):
    keys = np.random.default_rng(kinds).integers(0, kinds, 3000, dtype=np.uint64) << np.uint64(shift)
    assert np.array_equal(stable_argsort(keys), np.argsort(keys, kind="stable"))

"""Near duplicates by features and thumbnails."""

import numpy as np

from paceline.inference.probe.duplicates import find_near_duplicates


def test_identical_images_have_a_similarity_of_1_and_others_are_no_pair() -> None:
    draws = np.random.default_rng(0)
    thumbnails = draws.integers(0, 256, (30, 32, 32), dtype=np.uint8)
    thumbnails[20] = thumbnails[4]
    features = draws.normal(size=(30, 8)).astype(np.float32)
    pairs, similarities = find_near_duplicates(features, thumbnails)
    assert pairs.tolist() == [[4, 20]]
    np.testing.assert_allclose(similarities, [1.0], atol=1e-6)

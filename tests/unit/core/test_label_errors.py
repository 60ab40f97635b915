"""Likely wrong labels by confident learning."""

import numpy as np

from paceline.core.label_errors import find_label_errors


def test_labels_that_were_swapped_are_found_and_ranked() -> None:
    rng = np.random.default_rng(1)
    true = rng.integers(0, 3, 300)
    probabilities = np.full((300, 3), 0.05)
    probabilities[np.arange(300), true] = 0.9
    probabilities[7] = (0.49, 0.46, 0.05)  # a doubtful image with its own label is none
    true[7] = 0
    labels = true.copy()
    wrong = [11, 50, 200]
    labels[wrong] = (labels[wrong] + 1) % 3
    probabilities[50, labels[50]] = 0.01
    found = find_label_errors(probabilities, labels)
    assert sorted(found) == wrong and next(iter(found)) == 50
    assert all(likely == true[position] for position, likely in found.items())


def test_a_class_of_which_the_model_is_unsure_has_a_lower_threshold() -> None:
    """0.6 is below the mean of a sure class, and above that of an unsure one (Northcutt et al., section 3.1)."""
    probabilities = np.array([[0.95, 0.05]] * 20 + [[0.5, 0.5]] * 20 + [[0.4, 0.6], [0.6, 0.4]])
    labels = np.array([0] * 20 + [1] * 20 + [0, 1])
    assert find_label_errors(probabilities, labels) == {40: 1}


def test_no_images_and_absent_classes_are_no_errors() -> None:
    assert find_label_errors(np.zeros((0, 2)), np.zeros(0, dtype=np.int64)) == {}
    assert find_label_errors(np.array([[0.1, 0.9], [0.2, 0.8]]), np.array([0, 0])) == {}

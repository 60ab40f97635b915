"""The linear probe classifies the output of the stage that tells the classes best."""

import numpy as np
import pytest

from paceline.inference.probe.answers import answer
from paceline.inference.probe.backbone import SplitFeatures


def split_of(seed: int, best: str) -> SplitFeatures:
    """Return 100 samples of two classes, of which only the output of `best` depends on the class."""
    draws = np.random.default_rng(seed)
    labels = np.arange(100) % 2
    outputs = {name: draws.normal(size=(100, 8)).astype(np.float32) for name in ("", "early", "late")}
    outputs[best][:, 0] += 6 * labels
    thumbnails = draws.integers(0, 256, (100, 32, 32), dtype=np.uint8)
    features = outputs.pop("")
    return SplitFeatures(np.arange(100), labels, features, thumbnails, outputs)


@pytest.mark.parametrize("best", ["", "early", "late"])
def test_the_stage_that_tells_the_classes_best_is_chosen(best: str) -> None:
    found = answer(split_of(0, best), split_of(1, best), 2, "", 100)
    assert found.stage == best
    for is_val in (False, True):
        accuracy = found.separability.accuracy(found.separability.linear, is_val=is_val)
        assert accuracy is not None and accuracy.value > 0.95

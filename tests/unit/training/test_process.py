"""Where a rank is: a change means that it gets on."""

from paceline.training.process import ProgressReporter


def test_it_names_the_stage_and_counts_the_batches_of_an_evaluation() -> None:
    here = ProgressReporter()
    assert here() == (0, "start")
    here.read_progress = lambda: (12, "backward")
    assert here() == (12, "backward")
    here.read_progress = lambda: (12, "")
    assert here() == (12, "between stages")
    here.read_progress = lambda: (12, "evaluate")
    seen = [here()]
    here.batches += 1
    assert [*seen, here()] == [(12, "evaluate"), (12, "evaluate, 1")]
    here.read_progress = lambda: (12, "")  # the clock is off
    assert here() == (12, "between stages, 1")

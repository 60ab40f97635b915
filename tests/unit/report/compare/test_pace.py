"""Why two groups differ in images/s, and what that is called."""

from dataclasses import replace

import pytest


@pytest.fixture
def second(made, compared, tmp_path):
    """Return a function that holds a changed run to an unchanged one, and returns what was found of it."""

    def work(**changes):
        base = made.Made(spread=(2500.0, 2700.0))
        paths = [made.write(tmp_path / "a", base), made.write(tmp_path / "b", replace(base, **changes))]
        found = compared(*paths)
        return found.groups[1], found.sentences[0]

    return work


@pytest.mark.parametrize("change", [{"ranks": 2}, {"cores": 80}])
def test_other_hardware_is_called_that(second, change):
    found, said = second(batch=256, epoch_s=10, **change)
    assert found.pace_by == "hardware"
    assert "2.00x by hardware (images/s) times 1.00x by statistics (images needed)" in said


def test_what_another_learning_rate_seems_to_gain_is_called_noise(second):
    found, said = second(lr=0.5, epoch_s=10)
    assert found.pace_by == "noise"
    assert "2.00x by images/s, which is noise as no setting that differs changes them, times 1.00x by images" in said


def test_what_is_as_fast_has_nothing_to_explain(second):
    found, said = second(lr=0.5)
    assert found.pace_by == "noise"
    assert "1.00x by images/s times 1.00x by images needed." in said


def test_another_rate_with_other_code_may_be_more_than_noise(made, compared, tmp_path):
    paths = [
        made.write(
            tmp_path / digit, made.Made(lr=lr, epoch_s=epoch_s, own_parts={"nets:Mixer": {"sha256": digit * 64}})
        )
        for digit, lr, epoch_s in (("1", 0.1, 20), ("2", 0.5, 10))
    ]
    assert compared(*paths).groups[1].pace_by == "software"


def test_other_settings_and_versions_on_the_same_hardware_are_not_called_hardware(second):
    found, said = second(batch=256, torch="2.11.0", epoch_s=10)
    assert found.pace_by == "software"
    assert "2.00x by images/s times 1.00x by images needed." in said and "hardware" not in said


@pytest.mark.parametrize(
    "epoch_s, spread, by", [(20.4, (2450.0, 2650.0), "scatter"), (10, (5000.0, 5400.0), "software")]
)
def test_of_single_runs_what_lies_within_their_windows_is_scatter(second, epoch_s, spread, by):
    assert second(batch=256, epoch_s=epoch_s, spread=spread)[0].pace_by == by


def test_a_ratio_that_steady_windows_do_not_make_is_none_of_them(second):
    """Such as one of evaluations on the way, which throughput leaves out."""
    assert second(batch=256, epoch_s=10)[0].pace_by == "software"


def test_of_several_runs_the_interval_says_what_is_scatter(made, compared, tmp_path):
    def seeds(name, batch, *epoch_s):
        return [
            made.write(tmp_path / f"{name}{seed}", made.Made(batch=batch, seed=seed, epoch_s=each))
            for seed, each in enumerate(epoch_s)
        ]

    first = seeds("a", 128, 20, 22, 18)
    near, far = compared(*first, *seeds("b", 256, 19, 23, 18), *seeds("c", 512, 10, 11, 9)).groups[1:]
    assert (near.pace_by, far.pace_by) == ("scatter", "software")
    assert near.hardware.low < 1 < near.hardware.high < far.hardware.low

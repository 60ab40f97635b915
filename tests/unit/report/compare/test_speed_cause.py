"""Why two groups differ in images/s, and what that is called."""

import json
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
    found, text = second(batch=256, epoch_s=10, **change)
    assert found.pace_by == "hardware"
    assert "2.00x by hardware (images/s) times 1.00x by statistics (images needed)" in text


@pytest.mark.parametrize(
    "visible, by",
    [
        ([["H200"] * 8, ["H200"]], "software"),
        ([["H200", "T400"], ["H200"]], "software"),
        ([["H200"], ["H100"]], "hardware"),
        ([["x" * 200 + "1"], ["x" * 200 + "2"]], "hardware"),
    ],
)
def test_gpus_of_another_model_are_other_hardware(made, compared, tmp_path, visible, by):
    paths = [
        on_machine(made.write(tmp_path / str(batch), made.Made(batch=batch, epoch_s=batch)), cuda_devices=gpus)
        for batch, gpus in zip((20, 10), visible, strict=True)
    ]
    assert compared(*paths).groups[1].pace_by == by


def test_all_ranks_gpus_are_looked_at(made, compared, tmp_path):
    paths = [
        on_machine(made.write(tmp_path / str(batch), made.Made(batch=batch, epoch_s=batch, ranks=2)), cuda_devices=gpus)
        for batch, gpus in ((20, ["H200", "T400"]), (10, ["H200", "H200"]))
    ]
    assert compared(*paths).groups[1].pace_by == "hardware"


@pytest.mark.parametrize("what", ["cpu", "torch", "paceline"])
def test_long_settings_that_differ_at_the_end_are_different(made, compared, tmp_path, what):
    paths = [
        on_machine(made.write(tmp_path / end, made.Made(seed=int(end))), **{what: "x" * 200 + end}) for end in "12"
    ]
    for path in paths:
        on_machine(path, cuda_devices=[])  # so that the device is the processor
    assert len(compared(*paths).groups) == 2


def on_machine(path, **facts):
    """Write other facts of its machine into a run."""
    machine = path / "machine.json"
    machine.write_text(json.dumps({**json.loads(machine.read_text()), **facts}))
    return path


@pytest.mark.parametrize("field", ["layer_decay: 0.5", "nesterov: true", "momentum: 0.0"])
def test_a_setting_that_adds_work_to_an_optimizer_step_is_not_noise(second, made, field):
    found, _ = second(recipe=made.RECIPE.replace("name: sgd", f"name: sgd\n  {field}"), epoch_s=10)
    assert found.pace_by == "software"


def test_another_validation_share_is_not_called_noise(second, made):
    """Its evaluations are longer, which are part of the time."""
    recipe = made.RECIPE.replace("name: cifar100", "name: cifar100\n    val_fraction: 0.5")
    assert second(recipe=recipe, epoch_s=10)[0].pace_by == "software"


def test_a_gain_by_another_learning_rate_is_noise(second):
    found, text = second(lr=0.5, epoch_s=10)
    assert found.pace_by == "noise"
    assert "2.00x by images/s, which is noise as no differing setting affects speed, times 1.00x by images" in text


def test_equal_speed_needs_no_explanation(second):
    found, text = second(lr=0.5)
    assert found.pace_by == "noise"
    assert "1.00x by images/s times 1.00x by images needed." in text


def test_another_rate_with_other_code_may_be_more_than_noise(made, compared, tmp_path):
    paths = [
        made.write(
            tmp_path / digit, made.Made(lr=lr, epoch_s=epoch_s, own_parts={"nets:Mixer": {"sha256": digit * 64}})
        )
        for digit, lr, epoch_s in (("1", 0.1, 20), ("2", 0.5, 10))
    ]
    assert compared(*paths).groups[1].pace_by == "software"


def test_other_settings_and_versions_on_the_same_hardware_are_not_called_hardware(second):
    found, text = second(batch=256, torch="2.11.0", epoch_s=10)
    assert found.pace_by == "software"
    assert "2.00x by images/s times 1.00x by images needed." in text and "hardware" not in text


@pytest.mark.parametrize(
    "epoch_s, spread, by", [(20.4, (2450.0, 2650.0), "scatter"), (10, (5000.0, 5400.0), "software")]
)
def test_a_ratio_within_the_windows_of_single_runs_is_scatter(second, epoch_s, spread, by):
    assert second(batch=256, epoch_s=epoch_s, spread=spread)[0].pace_by == by


def test_a_ratio_that_steady_windows_do_not_make_is_none_of_them(second):
    """Such as one of evaluations on the way, which throughput leaves out."""
    assert second(batch=256, epoch_s=10)[0].pace_by == "software"


def test_several_runs_have_an_interval_of_the_cause(made, compared, tmp_path):
    def seeds(name, batch, *epoch_s):
        return [
            made.write(tmp_path / f"{name}{seed}", made.Made(batch=batch, seed=seed, epoch_s=each))
            for seed, each in enumerate(epoch_s)
        ]

    first = seeds("a", 128, 20, 22, 18)
    near, far = compared(*first, *seeds("b", 256, 19, 23, 18), *seeds("c", 512, 10, 11, 9)).groups[1:]
    assert (near.pace_by, far.pace_by) == ("scatter", "software")
    assert near.hardware.low < 1 < near.hardware.high < far.hardware.low


def test_a_model_that_differs_too_is_not_credited_to_hardware(second, made):
    recipe = made.RECIPE.replace("name: resnet50_nersc", "name: resnet50_nersc\n  width: 0.25")
    found, text = second(recipe=recipe, epoch_s=10, cores=80)
    assert found.pace_by == "mixed"
    assert "2.00x by images/s (other hardware and other settings)" in text


def test_ranks_that_share_the_cores_of_one_machine_are_a_setting(made, compared, tmp_path):
    paths = [
        on_machine(made.write(tmp_path / str(ranks), made.Made(ranks=ranks, epoch_s=20 / ranks)), cuda_devices=[])
        for ranks in (1, 2)
    ]
    for path in paths:
        result = path / "result.json"
        values = json.loads(result.read_text())
        result.write_text(json.dumps({**values, "provenance": {"device": "cpu"}}))
    assert compared(*paths).groups[1].pace_by == "software"


def test_the_notes_name_another_model(made, compared, tmp_path):
    recipe = made.RECIPE.replace("name: resnet50_nersc", "name: resnet50_nersc\n  width: 0.25")
    notes = compared(
        made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(recipe=recipe))
    ).notes
    assert any("another model" in note and "model.width 0.25 against -" in note for note in notes)


def starve(path, share):
    """Mark a run's result as CPU-starved."""
    result = json.loads((path / "result.json").read_text())
    result["verdict"] = {"bottleneck": "cpu-starved", "evidence": "They did.", "ceiling": "", "try": ""}
    result["cpu"] = {
        "rank": 0, "cores": 2, "ranks": 1, "threads": 2, "wall_s": 1.0, "run_s": 1.0, "waited_s": 1.0, "lost_s": 1.0,
        "share": share, "own_share": 0.0, "throttled_share": 0.0, "others_cores": 1.0, "pressure": 1.0, "switches": 1,
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    return path


@pytest.mark.parametrize("which", [0, 1])
def test_a_speed_up_over_cpu_starved_runs_has_no_cause(made, compared, tmp_path, which):
    base = made.Made(spread=(2500.0, 2700.0))
    paths = [
        made.write(tmp_path / "a", base),
        made.write(tmp_path / "b", replace(base, batch=256, epoch_s=10, cores=2)),
    ]
    starve(paths[which], 0.62)
    found = compared(*paths)
    assert found.groups[1].pace_by == "starved"
    assert "by hardware" not in found.sentences[0] and "CPU-starved" in found.sentences[0]
    assert any(note.startswith(f"CPU-starved: {'ab'[which]} (62 %).") for note in found.notes)

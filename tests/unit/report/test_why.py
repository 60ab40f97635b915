"""`paceline why` ranks the differences that can explain a gap, and blames nothing when there is none."""

from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.results import EvalResult
from paceline.core.watch_result import StepPoint, WatchResult
from paceline.report.render import render_html
from paceline.report.why_causes import MIN_SCORE, find_effect, find_score
from paceline.report.why_compare import compare_sides
from paceline.report.why_page import build_why_page
from paceline.report.why_sides import Side, read_side

STAGES = {"data_wait": 0.01, "forward": 0.03, "loss": 0.001, "backward": 0.05, "optimizer": 0.005, "other": 0.004}
SETTINGS = {
    "version.torch": "2.6.0",
    "threads": "2",
    "loader.num_workers": "4",
    "loader.batch_size": "32",
    "input.shape": "3x32x32",
    "optimizer.lr": "0.1",
    "torch.seed": "0",
    "ranks": "1",
    "steps": "200",
}


def side(name="a", *, stages=None, pauses=None, settings=None, samples=32.0, kind="watched script", **fields):
    """Return a run whose steps scatter by 2 %."""
    stages = STAGES | (stages or {})
    step_s = sum(stages.values())
    return Side(
        path=Path(name),
        kind=kind,
        settings=SETTINGS | (settings or {}),
        steps=200,
        stages=stages,
        pauses=pauses or {},
        blocks=[step_s * (1 + 0.02 * (n % 3 - 1)) for n in range(60)],
        samples=samples,
        **fields,
    )


CAUSES = {
    "loader.num_workers": ({"stages": {"data_wait": 0.06}}, {"loader.num_workers": "1"}),
    "threads": ({"stages": {"forward": 0.05, "backward": 0.09}}, {"threads": "1"}),
    "input.shape": ({"stages": {"data_wait": 0.03, "forward": 0.1, "backward": 0.2}}, {"input.shape": "3x64x64"}),
    "loader.batch_size": ({"samples": 8.0}, {"loader.batch_size": "8"}),
    "argv.--eval-every": ({"pauses": {"evaluate": 0.1}}, {"argv.--eval-every": "1"}),
    "argv.--save-every": ({"pauses": {"checkpoint": 0.1}}, {"argv.--save-every": "1"}),
    "argv.--log-every": ({"stages": {"log": 0.04}}, {"argv.--log-every": "1"}),
    "code.train.py:Images.__getitem__": ({"stages": {"data_wait": 0.1}}, {"code.train.py:Images.__getitem__": "1234"}),
    "code.train.py:Net.forward": ({"stages": {"forward": 0.1}}, {"code.train.py:Net.forward": "1234"}),
    "torch.detect_anomaly": ({"stages": {"forward": 0.1, "backward": 0.3}}, {"torch.detect_anomaly": "True"}),
    "optimizer.class": ({"stages": {"optimizer": 0.05}}, {"optimizer.class": "Adam"}),
    "ddp.bucket_bytes_cap": ({"stages": {"exposed_communication": 0.05}}, {"ddp.bucket_bytes_cap": "1"}),
    "model.parameters": ({"stages": {"forward": 0.1, "backward": 0.3}}, {"model.parameters": "20000000"}),
    "version.torch": ({"stages": {"forward": 0.05, "backward": 0.09, "data_wait": 0.02}}, {}),
    "load of other processes": ({"stages": {"forward": 0.06, "backward": 0.1}, "lost_share": 0.5}, {}),
}
DISTRACTORS = {"torch.seed": "7", "version.torch": "2.7.0", "argv.--tag": "b", "optimizer.lr": "0.2"}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_comes_first_among_differences_that_explain_less(name):
    fields, settings = CAUSES[name]
    result = compare_sides(
        side(lost_share=0.0), side("b", settings=DISTRACTORS | settings, **{"lost_share": 0.0} | fields)
    )
    assert result.speed.verdict == "slower"
    assert result.causes[0].difference.name == name
    assert name not in {each.name for each in result.also_different}
    assert "torch.seed" in {each.name for each in result.also_different}


def test_a_faster_run_is_explained_too():
    slow = side(stages={"data_wait": 0.06}, settings={"loader.num_workers": "1"})
    result = compare_sides(slow, side("b"))
    assert (result.speed.verdict, result.causes[0].difference.name) == ("faster", "loader.num_workers")


def test_more_workers_do_not_explain_a_longer_wait_as_well_as_fewer():
    scores = [
        compare_sides(side(), side("b", stages={"data_wait": 0.06}, settings={"loader.num_workers": number})).causes
        for number in ("1", "8")
    ]
    assert scores[0][0].score > 0.9
    assert not scores[1] or scores[1][0].score < 0.2


@pytest.mark.parametrize("factor", [1.0, 1.04])
def test_nothing_is_blamed_within_the_spread_of_runs(factor):
    stages = {name: each_s * factor for name, each_s in STAGES.items()}
    result = compare_sides(side(), side("b", stages=stages, settings=DISTRACTORS))
    assert result.speed.verdict == "same"
    assert result.causes == ()
    assert {each.name for each in result.also_different} == set(DISTRACTORS)


def test_load_does_not_explain_one_part_that_grew_alone():
    slow = {"stages": {"forward": 0.04}, "pauses": {"checkpoint": 0.03}, "lost_share": 0.3}
    result = compare_sides(side(lost_share=0.0), side("b", settings={"argv.--save-every": "1"}, **slow))
    assert [each.difference.name for each in result.causes] == ["argv.--save-every", "load of other processes"]


def test_slower_augmentation_slows_a_model_on_the_same_cores():
    change = {"stages": {"forward": 0.06, "backward": 0.08}, "settings": {"data.augment": "rand_augment"}}
    (cause,) = compare_sides(side(), side("b", **change)).causes
    assert cause.difference.name == "data.augment"
    change["settings"] |= {"machine.gpu": "H100"}
    assert not compare_sides(side(settings={"machine.gpu": "H100"}), side("b", **change)).causes


def test_a_gap_without_a_difference_is_not_explained():
    result = compare_sides(side(), side("b", stages={"forward": 0.1}))
    assert (result.speed.verdict, result.causes) == ("slower", ())


def test_an_argument_that_is_also_a_setting_is_named_once():
    workers = {"loader.num_workers": "1", "argv.--workers": "1"}
    a = side(settings={"argv.--workers": "4"})
    result = compare_sides(a, side("b", stages={"data_wait": 0.06}, settings=workers))
    (cause,) = result.causes
    assert cause.difference.name == "loader.num_workers"
    (argument,) = result.also_different
    assert argument.name == "argv.--workers"
    assert find_score(argument, result.causes) == cause.score
    assert find_score(argument.model_copy(update={"name": "argv.--other"}), result.causes) == 0


def test_two_arguments_of_equal_values_are_both_named():
    settings = {"argv.--foo": "given", "argv.--bar": "given"}
    result = compare_sides(side(), side("b", stages={"forward": 0.1}, settings=settings))
    assert {each.difference.name for each in result.causes} == {"argv.--foo", "argv.--bar"}
    assert result.also_different == ()


def losses(*values):
    return {"losses": dict(enumerate(values, 1)), "last_losses": [values[-1] + 0.01 * (n % 3) for n in range(32)]}


def test_a_worse_end_is_explained_by_what_changes_training():
    changed = {"optimizer.lr": "0.0001", "torch.seed": "1", "threads": "1", "argv.--tag": "b"}
    result = compare_sides(side(**losses(2.3, 1.0, 0.5)), side("b", settings=changed, **losses(2.4, 2.3, 2.2)))
    assert (result.outcome.verdict, result.outcome.first_step) == ("worse", 1)
    assert [each.difference.name for each in result.outcome_causes] == ["optimizer.lr", "torch.seed"]


def test_equal_first_losses_rule_out_seed_and_data():
    changed = {"optimizer.weight_decay": "0.1", "loader.batch_size": "16"}
    result = compare_sides(side(**losses(2.3, 1.0, 0.5)), side("b", settings=changed, **losses(2.3, 1.5, 1.2)))
    assert result.outcome.first_step == 2
    assert result.outcome_causes[0].difference.name == "optimizer.weight_decay"


def test_losses_that_are_nan_in_both_do_not_differ():
    nan = float("nan")
    result = compare_sides(side(**losses(2.3, nan, 0.5)), side("b", **losses(2.3, nan, 1.2)))
    assert result.outcome.first_step == 3


def test_accuracy_within_the_interval_of_its_images_is_no_difference():
    evals = [EvalResult(images=400, top1=top1, loss=1.0) for top1 in (0.90, 0.88, 0.60)]
    a, close, far = (side(str(n), evaluation=each, settings={"seed": str(n)}) for n, each in enumerate(evals))
    assert compare_sides(a, close).outcome.verdict == "same"
    assert compare_sides(a, far).outcome.verdict == "worse"


def test_a_script_and_a_run_are_refused():
    with pytest.raises(RecipeError, match=r"why: b is a run.*name two of one kind"):
        compare_sides(side(), side("b", kind="run"))


def test_the_page_shows_causes_and_hostile_values_escaped():
    evil = "<script>alert(1)</script>"
    result = compare_sides(
        side(), side("b", stages={"data_wait": 0.06}, settings={"loader.num_workers": "1", evil: evil})
    )
    text = render_html(build_why_page(result))
    assert "loader.num_workers" in text
    assert evil not in text


EFFECTS = {
    "train.eval_every": ("evaluate",),
    "data.eval_batch_size": ("evaluate",),
    "checkpoint.every": ("checkpoint",),
    "model.checkpoint_activations": ("forward", "loss", "backward", "captured_step"),
    "data.batch_size": (),
    "data.image_size": (),
    "optim.implementation": ("optimizer",),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_fields_of_a_recipe_affect_these_stages(name):
    assert find_effect(name).stages == EFFECTS[name]


OUTPUTS = ("--out", "--save-dir", "--ckpt-path", "--logdir", "--log-dir", "--model-dir", "-o", "--run-dir")


@pytest.mark.parametrize("name", OUTPUTS)
def test_folders_for_results_are_not_put_back(name):
    assert find_effect(f"argv.{name}").speed < MIN_SCORE


@pytest.mark.parametrize("name", ["--data-dir", "--train-dir", "--val-dir", "--model", "--model-name"])
def test_other_folders_and_names_are(name):
    assert find_effect(f"argv.{name}").speed >= MIN_SCORE


@pytest.mark.parametrize(("per_point", "blocks"), [(1, 90), (10, 9), (11, 9)])
def test_blocks_of_a_watched_script_have_no_step_of_the_warm_up(tmp_path, per_point, blocks):
    """Its first step takes 100 s, and a point of the curve is a mean over some steps."""
    step_s = [100.0, *[0.1] * 99]
    parts = [step_s[begin : begin + per_point] for begin in range(0, 100, per_point)]
    ends = [min(per_point * (place + 1), 100) for place in range(len(parts))]
    curve = [
        StepPoint(step=end, step_s=sum(each) / len(each), data_wait_s=0, exposed_s=0)
        for end, each in zip(ends, parts, strict=True)
    ]
    result = WatchResult(
        paceline="1", command=("sh",), exit_code=0, verdict={}, steps=100, warmup_steps=10, measured_steps=90,
        step_s=0.1, curve=tuple(curve),
    )  # fmt: skip
    (tmp_path / "watch").mkdir()
    (tmp_path / "result.json").write_text(result.model_dump_json())
    assert read_side(tmp_path).blocks == pytest.approx([0.1] * blocks)


def test_losses_of_a_run_count_only_if_every_step_was_logged(runs, tmp_path):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL)
    logged = read_side(rundir.path)  # every fourth step
    assert logged.losses == {}
    assert logged.last_losses
    rows = [{"step": step, "loss": 1.0 / step, "images_per_s": 2700.0} for step in range(1, 7)]
    runs.write_lines(rundir.steps, rows)
    assert read_side(rundir.path).losses == {row["step"]: row["loss"] for row in rows}

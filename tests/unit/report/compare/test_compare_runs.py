"""Comparing groups of runs: who reaches the target when, and what the speed-up is made of."""

import json
from dataclasses import replace

import pytest

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.statistics import difference_interval


def test_the_tutorials_statement_comes_from_run_directories_alone(made, compared, tmp_path):
    """One V100 with batch 128 against 16 with batch 2048: NERSC's logs, epoch 77 in 1,865 s and in 226 s."""
    base = made.Made(epochs=100, best=0.75 * 100 / 77, epoch_s=1865 / 77)
    small = made.write(tmp_path / "small", base)
    large = made.write(tmp_path / "large", replace(base, batch=2048, warmup="16ep", ranks=16, lr=0.4, epoch_s=226 / 77))
    none = made.write(tmp_path / "none", replace(base, batch=2048, ranks=16, lr=0.4, best=0.7117))
    found = compared(small, large, none, target=0.75)
    assert [each.name for each in found.groups] == [
        "batch 128, 1 rank, lr 0.1",
        "batch 2048 with warm-up, 16 ranks, lr 0.4",
        "batch 2048 without warm-up, 16 ranks, lr 0.4",
    ]
    assert found.sentences[0].startswith(
        "Batch 2048 with warm-up, 16 ranks, lr 0.4 reaches 75 % in 0.121 of the time of batch 128, 1 rank, lr 0.1 "
        "(no interval: there is one run of each): 8.25x as fast, 8.25x by hardware (images/s) times 1.00x by statistics"
    )
    assert "Batch 2048 without warm-up, 16 ranks, lr 0.4 does not reach 75 %: its best is 71.17 %." in found.sentences


def test_warm_up_is_named_only_if_it_differs(made, compared, tmp_path):
    small = made.write(tmp_path / "small", made.Made())
    large = made.write(tmp_path / "large", made.Made(batch=2048, warmup="16ep"))
    assert [each.name for each in compared(small, large).groups] == ["batch 128", "batch 2048 with warm-up"]


def test_the_speed_up_is_the_product_of_its_two_factors(made, compared, tmp_path):
    first = made.seeds(tmp_path / "a", made.Made(epoch_s=20), [0.80, 0.86, 0.83])
    second = made.seeds(tmp_path / "b", made.Made(batch=512, epoch_s=7), [0.78, 0.70, 0.75])
    found = compared(*first, *second)
    each = found.groups[1]
    assert each.speedup.value == pytest.approx(each.hardware.value * each.statistical.value)  # rounding
    assert each.speedup.value == pytest.approx(found.groups[0].to_target_s.value / each.to_target_s.value)  # rounding
    assert each.hardware.value == pytest.approx(20 / 7)  # rounding


def test_ratios_of_runs_that_scatter_have_intervals(made, compared, tmp_path):
    first = [made.write(tmp_path / f"a{s}", made.Made(seed=s, epoch_s=20 + s)) for s in range(3)]
    second = [made.write(tmp_path / f"b{s}", made.Made(batch=512, seed=s, epoch_s=7 + s / 4)) for s in range(3)]
    each = compared(*first, *second).groups[1]
    assert 1 < each.speedup.low < each.speedup.value < each.speedup.high
    alone = compared(*first, second[0]).groups[1]
    assert alone.speedup.low is None and alone.to_target_s.low is None


def test_runs_that_differ_in_their_seed_alone_are_a_group(made, compared, tmp_path):
    first = made.seeds(tmp_path, made.Made(), [0.80, 0.82, 0.81])
    second = made.seeds(tmp_path, made.Made(batch=256), [0.79, 0.80, 0.78])
    found = compared(first[0], second[0], *first[1:], *second[1:])
    assert [[run.seed for run in each.runs] for each in found.groups] == [[0, 1, 2], [0, 1, 2]]
    assert [each.settings for each in found.groups] == [{"data.batch_size": "128"}, {"data.batch_size": "256"}]
    assert found.groups[1].gap == difference_interval([0.79, 0.80, 0.78], [0.80, 0.82, 0.81])
    assert found.groups[0].gap is None and found.groups[0].speedup is None
    assert found.sentences[1] == (
        "Batch 256 ends at 79.00 % top-1, 2.00 points below batch 128 (-4.27 to +0.27, so there may be no difference)."
    )


def test_equal_accuracies_are_the_same(made, compared, tmp_path):
    found = compared(made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(batch=256)))
    assert found.sentences[1] == (
        "Batch 256 ends at 80.00 % top-1, the same as batch 128 (no interval: there is one run of each)."
    )


def test_another_source_is_described_by_its_own_settings(made, compared, tmp_path):
    folder, pack = (
        made.Made(recipe=made.RECIPE.replace("    name: cifar100", f"    name: {source}"))
        for source in ("folder\n    channels: 3", "pack\n    cache_gb: 50")
    )
    found = compared(made.write(tmp_path / "a", folder), made.write(tmp_path / "b", pack))
    (note,) = (each for each in found.notes if "source" in each)
    assert note == (
        "pack reads its data from another source than folder "
        "(data.source.name=pack, data.source.cache_gb=50); paceline assumes the same images."
    )


@pytest.mark.parametrize("change", [{"ranks": 2}, {"torch": "2.11.0"}, {"code": "3c4d"}, {"warmup": "1ep"}])
def test_runs_on_other_ranks_or_versions_are_another_group(made, compared, tmp_path, change):
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(seed=1, **change))]
    assert len(compared(*paths).groups) == 2


def test_runs_that_differ_in_nothing_are_compared_one_by_one(made, compared, tmp_path):
    """As before and after a change of code: nothing else can be meant by naming both."""
    before = made.write(tmp_path / "before", made.Made())
    after = made.write(tmp_path / "after", made.Made(epoch_s=10))
    found = compared(before, after)
    assert [each.name for each in found.groups] == ["before", "after"]
    assert found.groups[1].speedup.value == pytest.approx(2)  # rounding
    assert found.sentences[0].startswith("after reaches 80 % in 0.500 of the time of before")


def test_the_same_seeds_twice_are_two_groups_of_them(made, compared, tmp_path):
    """As three seeds before and after a change of code."""
    before = [made.write(tmp_path / f"before{seed}", made.Made(seed=seed)) for seed in range(3)]
    after = [made.write(tmp_path / f"after{seed}", made.Made(seed=seed, epoch_s=10)) for seed in range(2)]
    found = compared(*before, *after)
    assert [[run.seed for run in each.runs] for each in found.groups] == [[0, 1, 2], [0, 1]]
    assert [each.name for each in found.groups] == ["before0", "after0"]
    assert found.groups[1].speedup.value == pytest.approx(2)  # rounding


def test_without_a_target_it_is_the_highest_that_all_runs_reach(made, compared, tmp_path):
    paths = [*made.seeds(tmp_path, made.Made(), [0.8, 0.7]), made.write(tmp_path / "c", made.Made(batch=64, best=0.75))]
    found = compared(*paths)
    assert (found.target, found.target_from) == (0.7, "lowest_best")
    assert [each.reached for each in found.groups] == [2, 1]


def test_recipes_that_stop_at_a_target_give_it(made, compared, tmp_path):
    stops = made.RECIPE.replace("stop: off", "stop:\n    top1: 0.6\n    patience: 2")
    paths = [
        made.write(tmp_path / "a", made.Made(recipe=stops)),
        made.write(tmp_path / "b", made.Made(batch=64, recipe=stops)),
    ]
    assert (compared(*paths).target, compared(*paths).target_from) == (0.6, "recipes")
    assert (compared(*paths, target=0.7).target, compared(*paths, target=0.7).target_from) == (0.7, "asked")


def test_a_target_of_the_recipes_is_reached_when_the_run_would_stop(made, compared, tmp_path):
    """Accuracy rises by 0.1 an epoch of 20 s; a target on the command line has no patience."""
    stops = made.RECIPE.replace("stop: off", "stop:\n    top1: 0.6\n    patience: 2")
    path = made.write(tmp_path / "a", made.Made(recipe=stops))
    assert compared(path).groups[0].to_target_s.value == 7 * 20
    assert compared(path, target=0.6).groups[0].to_target_s.value == 6 * 20
    rows = [{"epoch": e, "images_seen": 9 * e, "trained_s": 3.0 * e, "top1": t}
            for e, t in enumerate((0.6, 0.5, 0.7, 0.6), start=1)]  # fmt: skip
    made.lines(path / "evals.jsonl", rows)
    assert compared(path).groups[0].to_target_s.value == 12
    made.lines(path / "evals.jsonl", rows[:3])
    assert compared(path).groups[0].reached == 0


def stops(made, patience=None, top1=0.6):
    """Return a recipe that stops at an accuracy, or without a patience one that does not."""
    text = "stop: off" if patience is None else f"stop:\n    top1: {top1}\n    patience: {patience}"
    return made.RECIPE.replace("stop: off", text)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_runs_of_identical_curves_reach_a_target_of_the_recipes_at_one_time(made, compared, tmp_path, order):
    """Whether or not their recipes stop there."""
    paths = [
        made.write(tmp_path / "a", made.Made(recipe=stops(made, 3))),
        made.write(tmp_path / "b", made.Made(batch=64, recipe=stops(made))),
    ]
    found = compared(*(paths[place] for place in order))
    assert [each.to_target_s.value for each in found.groups] == [8 * 20, 8 * 20]
    assert found.groups[1].speedup.value == 1
    assert found.notes == (
        "A run reaches the target with 3 evaluations in a row, the lowest train.stop.patience of the recipes that stop "
        "at a target. Recipes differ in it: b (none).",
    )


def test_recipes_of_one_patience_need_no_note(made, compared, tmp_path):
    paths = [made.write(tmp_path / f"b{batch}", made.Made(batch, recipe=stops(made, 2))) for batch in (1, 2)]
    assert compared(*paths).notes == ()


@pytest.mark.parametrize("other", [{"patience": 3}, {"patience": 3, "top1": 0.55}])
def test_a_run_that_has_stopped_by_its_own_recipe_has_reached_the_target(made, compared, tmp_path, other):
    """It ends with its first evaluation there, so that there cannot be more in a row."""
    early = made.Made(64, epochs=6, best=0.6, status="target_reached", recipe=stops(made, 1))
    paths = [
        made.write(tmp_path / "a", made.Made(recipe=stops(made, **other))),
        made.write(tmp_path / "b", early),
    ]
    found = compared(*paths)
    assert [each.to_target_s.value for each in found.groups] == [6 * 20, 6 * 20]
    assert found.notes[0] == (
        "A run reaches the target with 1 evaluation in a row, the lowest train.stop.patience of the recipes that stop "
        "at a target. Recipes differ in it: a (3)."
    )


def test_a_run_that_reached_the_target_at_an_unknown_time_counts(made, compared, tmp_path):
    path = made.write(tmp_path / "a", made.Made())
    made.lines(path / "evals.jsonl", [{"top1": 0.6}])
    assert compared(path).groups[0].reached == 1


def test_a_group_with_one_run_at_the_target_has_no_interval_and_the_reason(made, compared, tmp_path):
    first = made.seeds(tmp_path / "a", made.Made(), [0.80, 0.81])
    second = made.seeds(tmp_path / "b", made.Made(batch=64), [0.80, 0.60])
    text = compared(*first, *second, target=0.75).sentences[0]
    assert "(no interval: there is one run of batch 64 that reached the target)" in text


@pytest.mark.parametrize("target", [0.0, -1.0, 75.0, float("nan")])
def test_a_target_that_is_no_accuracy_is_refused(made, compared, tmp_path, target):
    with pytest.raises(
        RecipeError, match=r"^--target: \S+ is not an accuracy \(write a number from 0 to 1, such as 0.75\)$"
    ):
        compared(made.write(tmp_path / "a", made.Made()), target=target)


def test_averaged_weights_are_compared_if_the_run_has_any(made, compared, tmp_path):
    path = made.write(tmp_path / "a", made.Made())
    made.lines(path / "evals.jsonl", [{"epoch": 1.0, "images_seen": 9, "trained_s": 3.0, "top1": 0.1, "ema_top1": 0.6}])
    assert compared(path).groups[0].accuracy.value == 0.6


def test_another_metric_has_its_own_target(made, compared, tmp_path):
    found = compared(made.write(tmp_path / "a", made.Made()), metric="top5")
    assert found.metric == "top5" and found.target == pytest.approx(0.95)  # 0.8 + 0.15 is not exact in binary


def test_hours_are_those_of_all_ranks_and_all_processes_without_those_between(made, compared, tmp_path):
    path = made.write(tmp_path / "a", made.Made(ranks=4))
    assert compared(path).groups[0].gpu_hours.value == pytest.approx(4 * 160 / 3600)  # rounding
    values = json.loads((path / "result.json").read_text())
    goodput = {"share": 0.5, "wall_s": 1000.0, "useful_s": 500.0, "startup_s": 0.0, "data_wait_s": 0.0, "eval_s": 0.0,
               "checkpoint_s": 0.0, "rework_s": 100.0, "down_s": 400.0, "other_s": 0.0, "starts": 2}  # fmt: skip
    (path / "result.json").write_text(json.dumps({**values, "goodput": goodput}))
    assert compared(path).groups[0].gpu_hours.value == pytest.approx(4 * 600 / 3600)  # rounding


def test_a_single_run_is_no_error(made, compared, tmp_path):
    (text,) = compared(made.write(tmp_path / "a", made.Made())).sentences
    assert text == "There is nothing to compare: there is only one run (name a run with other settings)."
    (text,) = compared(*made.seeds(tmp_path, made.Made(), [0.8, 0.7])).sentences
    assert "2 runs differ only in the seed" in text


def test_runs_without_evaluations_are_named(made, compared, tmp_path):
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(batch=64))]
    (paths[1] / "evals.jsonl").unlink()
    found = compared(*paths)
    assert "batch 64 was not evaluated" in found.sentences[0].lower()
    why = "train.eval_every is off, or it ended before that"
    assert found.notes == (f"batch 64: b was never evaluated ({why}).",)
    (paths[0] / "evals.jsonl").unlink()
    assert compared(*paths).target is None and compared(*paths).sentences == ()


def test_a_run_that_has_not_finished_is_compared_as_far_as_it_came(made, compared, tmp_path):
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(64, status="unfinished"))]
    found = compared(*paths)
    assert found.groups[1].speedup.value == pytest.approx(1) and found.groups[1].gpu_hours is None  # rounding
    assert found.notes == ("batch 64: b was not finished: paceline compares the logs so far, and no GPU-hours.",)


def test_runs_on_other_data_are_named(made, compared, tmp_path):
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(64, train_images=5000))]
    (text,) = compared(*paths).notes
    assert text.startswith("batch 64 uses other data than batch 128 (5,000 train images against 50,000)")


def test_data_in_another_form_count_as_the_same_with_a_note(made, compared, tmp_path):
    packed = made.RECIPE.replace("name: cifar100", "name: pack\n    root: /data/c.pack")
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(recipe=packed))]
    (text,) = compared(*paths).notes
    assert "data.source.name=pack, data.source.root=/data/c.pack" in text and "assumes the same images" in text


def test_seeds_that_miss_the_target_are_counted(made, compared, tmp_path):
    found = compared(*made.seeds(tmp_path, made.Made(), [0.8, 0.6]), target=0.75)
    assert found.groups[0].reached == 1
    assert "1 of 2 runs reach the target; its times are means over these alone" in found.notes[0]


def test_runs_that_share_a_seed_give_a_note_on_narrow_intervals(made, compared, tmp_path):
    twice = [made.write(tmp_path / name, made.Made()) for name in "ab"]
    other = made.write(tmp_path / "c", made.Made(batch=64))
    (text,) = compared(*twice, other).notes
    assert text == "batch 128: some runs share a seed, so they vary less than usual: intervals are too narrow."


@pytest.mark.parametrize(
    "recipe, text",
    [
        ("", "recipe.yaml: is missing or empty"),
        ("a: &x [1]\nb: *x\n", "recipe.yaml: has anchors, aliases or deep nesting"),
        ("a: [", "recipe.yaml: is not valid YAML"),
        ("- a\n", "recipe.yaml: is not a mapping"),
        ("[" * 99, "recipe.yaml: has anchors, aliases or deep nesting"),
    ],
)
def test_a_recipe_that_cannot_be_read_makes_a_group_of_its_own(made, compared, tmp_path, recipe, text):
    paths = [made.write(tmp_path / name, made.Made(recipe=recipe)) for name in ("a", "b")]
    found = compared(*paths)
    assert [each.name for each in found.groups] == ["a", "b"]
    assert f"a: {text}" in found.notes[0]


def test_an_invalid_run_directory_is_an_error_in_one_line(compared, tmp_path):
    with pytest.raises(PacelineError, match=r"is not a run directory \(name one that paceline train has written\)$"):
        compared(tmp_path)


def test_numbers_that_are_none_are_no_error(made, compared, tmp_path):
    path = made.write(tmp_path / "a", made.Made())
    row = '{"epoch": NaN, "top1": 0.5, "trained_s": 1e999, "images_seen": "x"}\n{"top1": NaN}\n{"top1": 7}\nx\n'
    (path / "evals.jsonl").write_text(row)
    found = compared(path, made.write(tmp_path / "b", made.Made(batch=64)))
    assert found.groups[0].accuracy.value == 0.5 and found.groups[0].to_target_s is None
    assert found.sentences[0].endswith("but the time of batch 128 is unknown.")

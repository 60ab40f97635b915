"""For every preset a profile has a run of a few steps, and probes that fit it."""

from math import prod

import pytest

from paceline.core.dataset import DatasetInfo
from paceline.lab.patches import build_measurement_patch
from paceline.lab.probes import build_base_trial, build_instrumented_trials, build_probes
from paceline.lab.trial import Trial, apply_patch, format_patch
from paceline.recipe.load import Patch, load, preset_names
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe

NOTHING = Patch()
SIZES = {"digits": (8, 8), "fashion_mnist": (28, 28), "folder": None, "manifest": None}


def measured(name: str, *words: str, steps: int = 40) -> Recipe:
    said = Patch.parse(list(words))
    recipe = load(name, said).recipe
    return apply_patch(recipe, build_measurement_patch(recipe, steps, said))


def info(recipe: Recipe, split: str) -> DatasetInfo:
    """Return a dataset of the kind that the recipe is made for."""
    name = recipe.data.source.name
    channels = 1 if name in ("digits", "fashion_mnist") else 3
    return DatasetInfo(
        name=name,
        split=split,
        num_images=50_000,
        class_names=tuple("abcdefghij"),
        channels=channels,
        image_size=SIZES.get(name, (32, 32)),
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_recipe_becomes_a_run_of_steps_alone_with_probes_that_fit(name: str) -> None:
    recipe = measured(name)
    ranks = 1 if recipe.parallel.strategy == "dataparallel" else 2
    asides = build_instrumented_trials(load(name).recipe, ranks, 40, NOTHING, trace=True)
    trials, left_out = build_probes(recipe, ranks, 1)
    assert left_out == []
    expected = ["free-data", "free-copy", "free-communication", "free-model"]
    assert [trial.name for trial in trials] == [each for each in expected if ranks > 1 or each != "free-communication"]
    assert [trial.name for trial in asides] == ["trace"]
    for trial in (build_base_trial(1), *asides, *trials):
        varied = apply_patch(recipe, trial.patch)
        plan = Plan.derive(varied, ranks, info(varied, "train"), info(varied, "val"))
        assert (plan.total_steps, plan.eval_every, plan.checkpoint_every) == (recipe.measure.warmup_steps + 40, 0, 0)
        assert varied.measure.clock == "on" and varied.log.report == "off"
        assert prod(size for _, size in plan.train_sizes) == plan.image_size  # one size, and it is the whole


def test_the_learning_rate_is_small_and_constant_for_all_that_an_optimizer_moves() -> None:
    recipe = measured("cifar10-94")
    assert recipe.schedule.name == "constant"
    assert (recipe.optim.name, recipe.optim.lr, recipe.optim.sgd_lr) == ("muon", 0.24e-3, 106e-3)
    assert (recipe.optim.momentum, recipe.optim.newton_schulz_steps) == (0.6, 3)  # what costs time stays


def test_user_settings_of_evaluation_checkpoints_sizes_and_logging_are_kept() -> None:
    words = ("train.eval_every=20st", "checkpoint.every=10st", "checkpoint.keep=1", "log.every=5st")
    recipe = measured("cifar10-cpu", *words, "measure.warmup_steps=3", "data.progressive.start_size=20")
    assert recipe.train.steps == 43
    assert (str(recipe.train.eval_every), str(recipe.checkpoint.every), recipe.checkpoint.keep) == ("20st", "10st", 1)
    assert str(recipe.log.every) == "5st" and recipe.data.progressive.start_size == 20


def test_what_cannot_be_in_a_few_steps_is_taken_out() -> None:
    words = ("checkpoint.keep=1", "train.stop.top1=0.9", "train.eval_train=on", "log.every=1%", "schedule.name=plateau")
    recipe = measured("cifar-base", *words, "parallel.check_replicas=1%")
    assert (recipe.checkpoint.every, recipe.checkpoint.keep, recipe.train.stop) == ("off", 3, "off")
    assert (recipe.train.eval_train, recipe.parallel.check_replicas, str(recipe.log.every)) == ("off", "off", "10st")


def test_nothing_ends_a_measured_run_early() -> None:
    words = ("train.metrics=[f1,top3]", "train.monitor=auroc", "train.patience=3", "train.max_time=1s")
    train = measured("digits", *words).train
    assert (train.eval_every, train.metrics, train.monitor) == ("off", (), "auto")
    assert (train.patience, train.max_time) == ("off", "off")
    train = measured("digits", *words, "train.eval_every=10st").train
    assert (train.metrics, train.monitor, train.patience, train.max_time) == (("f1", "top3"), "auroc", "off", "off")


def test_the_patch_of_a_recipe_without_such_settings_does_not_name_them() -> None:
    patch = build_measurement_patch(load("digits").recipe, 40, NOTHING)
    assert not {"train.metrics", "train.patience", "train.max_time"} & {path for path, _ in patch.assignments}


def test_a_clock_that_is_off_is_put_on() -> None:
    off = Patch((("measure.clock", "off"), ("measure.warmup_steps", 10)))
    recipe = apply_patch(load("digits").recipe, off)
    assert apply_patch(recipe, build_measurement_patch(recipe, 40, NOTHING)).measure.clock == "on"


def test_nothing_but_stages_is_measured_in_runs_that_are_compared() -> None:
    """Whatever a user or a recipe asks for: what slows steps down would slow some runs down more than others."""
    words = ("measure.communication=on", "measure.trace=5", "measure.nvtx=on")
    measure = measured("digits", *words).measure
    assert (measure.communication, measure.trace, measure.nvtx) == ("off", "off", "off")
    assert build_base_trial(3) == Trial("base", NOTHING, 3)


@pytest.mark.parametrize(
    ("ranks", "trace", "said", "runs"),
    [
        (2, False, (), {"buckets": ["measure.communication=on"]}),
        (2, True, (), {"trace": ["measure.trace=40", "measure.communication=on"]}),
        (2, False, ("measure.communication=on",), {"buckets": ["measure.communication=on"]}),
        (2, False, ("measure.communication=off",), {}),
        (2, True, ("measure.communication=off",), {"trace": ["measure.trace=40"]}),
        (2, False, ("parallel.strategy=fsdp",), {}),
        (2, False, ("parallel.sync_gradients=false",), {}),
        (1, False, (), {}),
        (1, True, (), {"trace": ["measure.trace=40"]}),
        (1, True, ("measure.trace=2",), {"trace": ["measure.trace=2"]}),
        (1, False, ("measure.trace=2",), {"trace": ["measure.trace=2"]}),
    ],
)
def test_what_slows_steps_down_is_measured_in_one_run_aside(ranks, trace, said, runs) -> None:
    patch = Patch.parse(list(said))
    trials = build_instrumented_trials(load("digits", patch).recipe, ranks, 40, patch, trace=trace)
    assert {trial.name: format_patch(trial.patch) for trial in trials} == runs


@pytest.mark.parametrize(
    ("name", "said", "probe", "patch"),
    [
        ("digits", (), "free-data", ["data.replay=host"]),
        ("digits", ("log.samples=true",), "free-copy", ["data.replay=device", "log.samples=false"]),
        ("digits", (), "free-communication", ["parallel.sync_gradients=false"]),
        (
            "digits",
            ("parallel.compression=powersgd", "parallel.powersgd_rank=2", "parallel.static_graph=true"),
            "free-communication",
            [
                "parallel.sync_gradients=false",
                "parallel.compression=off",
                "parallel.powersgd_rank=auto",
                "parallel.static_graph=false",
            ],
        ),
        ("digits", (), "free-model", ["model.name=empty", "model.width=1.0"]),
        (
            "digits",
            ("train.compile=true", "model.drop_path=0.1"),
            "free-model",
            ["model.name=empty", "train.compile=off", "model.width=1.0", "model.drop_path=0.0"],
        ),
        ("folder-finetune", (), "free-model", ["model.name=empty", "model.weights=off"]),
        (
            "digits",
            ("model.freeze=backbone", "model.width=1.0"),
            "free-model",
            ["model.name=empty", "model.freeze=off"],
        ),
        ("cifar10-94", (), "free-model", ["model.name=empty", "optim.name=sgd", "optim.lr=0.00024"]),
        (
            "digits",
            ("optim.layer_decay=0.7",),
            "free-model",
            ["model.name=empty", "model.width=1.0", "optim.layer_decay=off"],
        ),
    ],
)
def test_a_probe_sets_one_thing_free_and_resets_what_has_no_effect_beside_it(name, said, probe, patch) -> None:
    trials, _ = build_probes(measured(name, *said), ranks=2, repeats=3)
    trial = next(trial for trial in trials if trial.name == probe)
    assert format_patch(trial.patch) == patch
    assert trial.repeats == 3 and trial.explains


def test_a_probe_of_what_is_so_already_is_none() -> None:
    def names(*words: str, ranks: int = 2) -> list[str]:
        return [trial.name for trial in build_probes(measured("digits", *words), ranks, 1)[0]]

    assert names("data.replay=host") == ["free-copy", "free-communication", "free-model"]
    assert names("data.replay=device") == ["free-communication", "free-model"]
    assert names("parallel.sync_gradients=false") == ["free-data", "free-copy", "free-model"]
    assert names("model.name=empty", "model.width=1") == ["free-data", "free-copy", "free-communication"]
    assert names(ranks=1) == ["free-data", "free-copy", "free-model"]

"""`recipe.plan`: the integers of a run, and every way in which they do not come out."""

import json
import math
from dataclasses import replace

import pytest

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import DataError, RecipeError
from paceline.core.units import Duration
from paceline.recipe.plan import Plan, divide_batch, lr_factor, lr_sentence

TRAIN = DatasetInfo("toy", "train", 1000, ("a", "b", "c"), 1, (28, 28), (0.5,), (0.25,))
VAL = replace(TRAIN, split="val", num_images=100)


@pytest.fixture
def plan(resolve):
    """Return a function that plans the smallest recipe with overrides over it, for a world and a dataset."""

    def derive(*words: str, world_size: int = 1, train: DatasetInfo = TRAIN, val: DatasetInfo = VAL) -> Plan:
        return Plan.derive(resolve(*words).recipe, world_size, train, val)

    return derive


def test_every_integer_of_a_worked_example(plan):
    """4 ranks x 2 micro-batches of 12 are 96; 1,000 images are 10 such steps and 40 left over; 2.5 epochs are 25."""
    words = ["data.batch_size=96", "train.accumulate=2", "train.epochs=2.5", "train.eval_every=1ep"]
    words += ["checkpoint.every=20%", "log.every=200img", "optim.lr=0.1", "optim.lr_scaling=linear"]
    words += ["optim.base_batch_size=24", "schedule.warmup=1ep"]
    words += ["checkpoint.keep_every=1ep", "parallel.check_replicas=2ep"]
    assert plan(*words, world_size=4) == Plan(
        world_size=4,
        batch_size=96,
        rank_batch=24,
        micro_batch=12,
        eval_batch=24,
        train_images=1000,
        val_images=100,
        num_classes=3,
        channels=1,
        image_size=28,
        eval_image_size=28,
        train_sizes=((0, 28),),
        steps_per_epoch=10,
        dropped_images=40,
        total_steps=25,
        eval_every=10,
        checkpoint_every=5,
        checkpoint_every_s=0.0,
        checkpoint_keep_every=10,
        check_replicas_every=20,
        log_every=2,
        peak_lr=0.4,
        lr_sentence="0.1 at batch 24 -> 0.4 at batch 96 (linear scaling), 1 epoch of warm-up",
    )


def test_a_plan_is_json(plan):
    """JSON has no tuples, so the notes and sizes come back as lists."""
    derived = plan(val=replace(VAL, notes=("2 files left out",)))
    values = derived.to_dict()
    lists = {"notes": ["val: 2 files left out"], "train_sizes": [[0, 28]], "class_images": [0, 0]}
    assert json.loads(json.dumps(values)) == {**values, **lists}
    assert Plan(**values) == derived


def test_a_plan_passes_on_what_each_split_wants_a_user_to_know(plan):
    train, val = replace(TRAIN, notes=("x", "y")), replace(VAL, notes=("z",))
    assert plan(train=train, val=val).notes == ("train: x", "train: y", "val: z")
    assert plan().notes == ()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_world_changes_what_a_rank_does_and_nothing_of_the_experiment(plan, world_size):
    alone, together = plan(), plan(world_size=world_size)
    assert together.rank_batch * world_size == alone.rank_batch
    shared = {"world_size": 1, "rank_batch": 128, "micro_batch": 128, "eval_batch": 256}
    assert replace(together, **shared) == alone


@pytest.mark.parametrize(("setting", "eval_batch"), [("auto", 32), ("100", 100)])
def test_eval_batch_size_is_twice_the_micro_batch_or_as_set(plan, setting, eval_batch):
    words = ["data.batch_size=64", "train.accumulate=2", f"data.eval_batch_size={setting}"]
    assert plan(*words, world_size=2).eval_batch == eval_batch


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["train.epochs=1"], 10), (["train.epochs=3"], 30), (["train.epochs=0.25"], 2), (["train.epochs=0.26"], 3),
        (["train.epochs=0.001"], 1), (["train.steps=1"], 1), (["train.steps=777"], 777),
    ],
)  # fmt: skip
def test_the_length_of_a_run_is_steps_given_or_epochs_to_the_nearest_step(plan, words, steps):
    assert plan("data.batch_size=100", *words).total_steps == steps


CADENCES = [
    ("1st", 1), ("7st", 7), ("1ep", 10), ("0.5ep", 5), ("2ep", 20), ("10%", 4), ("100%", 40),
    ("300img", 3), ("149img", 1), ("1img", 1), ("0.001%", 1), ("1000ep", 10_000),
]  # fmt: skip
CADENCE_FIELDS = {"train.eval_every": "eval_every", "checkpoint.every": "checkpoint_every", "log.every": "log_every"}


@pytest.mark.parametrize(("text", "steps"), CADENCES)
@pytest.mark.parametrize("field", CADENCE_FIELDS)
def test_a_cadence_is_the_nearest_number_of_steps_and_at_least_one(plan, field, text, steps):
    derived = plan("data.batch_size=100", "train.epochs=4", f"{field}={text}")
    assert getattr(derived, CADENCE_FIELDS[field]) == steps


@pytest.mark.parametrize("field", ["train.eval_every", "checkpoint.every"])
def test_a_cadence_that_is_off_is_never(plan, field):
    assert getattr(plan(f"{field}=off"), CADENCE_FIELDS[field]) == 0


def test_a_plan_counts_the_steps_of_a_duration_and_the_epoch_of_a_step(plan):
    derived = plan("data.batch_size=100", "train.epochs=4")
    durations = [Duration(2, "ep"), Duration(25, "%"), Duration(3, "st"), Duration(450, "img"), Duration(0, "st")]
    assert [derived.steps(duration) for duration in durations] == [20, 10, 3, 4, 0]
    assert [derived.epoch_of(step) for step in (0, 9, 10, 39)] == [0, 0, 1, 3]


@pytest.mark.parametrize(
    ("size", "setting", "image_size"),
    [((28, 28), "auto", 28), (None, "auto", 224), (None, "96", 96), ((28, 28), "32", 32), ((20, 30), "32", 32)],
)
def test_the_image_size_is_as_set_or_the_data_sets_or_224(plan, size, setting, image_size):
    info = replace(TRAIN, image_size=size)
    assert plan(f"data.image_size={setting}", train=info).image_size == image_size


@pytest.mark.parametrize(("setting", "image_size"), [("auto", 28), ("160", 160)])
def test_evaluation_sees_the_size_of_training_or_its_own(plan, setting, image_size):
    derived = plan(f"data.eval_image_size={setting}")
    assert (derived.image_size, derived.eval_image_size) == (28, image_size)


def sizes(derived: Plan) -> list[int]:
    """Return the size of the first step of each epoch, after seeing that it is the one of all its steps."""
    found = [
        {derived.train_size(step) for step in range(start, min(start + derived.steps_per_epoch, derived.total_steps))}
        for start in range(0, derived.total_steps, derived.steps_per_epoch)
    ]
    assert all(len(epoch) == 1 for epoch in found)
    return [epoch.pop() for epoch in found]


def test_without_progress_every_step_has_the_whole_size(plan):
    assert sizes(plan("train.epochs=3", "data.image_size=96")) == [96, 96, 96]


@pytest.mark.parametrize(
    ("progressive", "expected"),
    [
        # Halves are rounded to even multiples, as numpy does for FFCV: 160 + 32 x 4/8 is 5.5 x 32.
        ("{start_size: 160, begin: 5ep, end: 13ep}", [160] * 9 + [192] * 7),
        ("{start_size: 128, begin: 4ep, end: 12ep}", [128] * 7 + [160] * 3 + [192] * 6),
        ("{start_size: 128, begin: 4ep, end: 12ep, multiple: 16}", [128] * 6 + [144] + [160] * 3 + [176] + [192] * 5),
        ("{start_size: 100, begin: 0ep, end: 4ep, multiple: 64}", [100, 128, 128, 192] + [192] * 12),
        ("{start_size: 128, begin: 8ep, end: 8ep}", [128] * 9 + [192] * 7),
        ("{start_size: 128}", [128] * 9 + [160] * 3 + [192] * 4),
    ],
)  # fmt: skip
def test_the_size_rises_epoch_by_epoch_along_a_rounded_line(plan, progressive, expected):
    derived = plan("data.batch_size=100", "train.epochs=16", "data.image_size=192", f"data.progressive={progressive}")
    assert sizes(derived) == expected
    assert [size for _, size in derived.train_sizes] == sorted(set(expected))


def test_the_size_never_passes_the_whole_one(plan):
    words = ["train.epochs=10", "data.image_size=200", "data.progressive={start_size: 120, multiple: 64, end: 100%}"]
    assert max(sizes(plan(*words))) == 192 <= 200


@pytest.mark.parametrize(
    ("epochs", "notes"),
    [
        (4, ("data.progressive: the run ends at step 40, at 24 of 28 pixels",)),
        (8, ()),
    ],
)
def test_a_plan_notes_that_the_run_ends_below_full_image_size(plan, epochs, notes):
    """It rises at the start of epochs, of which the last begins at 75 % of 4 and at 88 % of 8."""
    words = ["data.batch_size=100", f"train.epochs={epochs}", "data.progressive={start_size: 16, multiple: 4}"]
    assert plan(*words).notes == notes


@pytest.mark.parametrize(
    ("milestones", "notes"),
    [
        ("[40st, 50st]", ("schedule: the run ends at step 40, before its first milestone at 40",)),
        ("[100ep]", ("schedule: the run ends at step 40, before its first milestone at 1,000",)),
        ("[39st, 100ep]", ()),
    ],
)
def test_a_plan_notes_that_the_learning_rate_never_falls(plan, milestones, notes):
    words = ["data.batch_size=100", "train.epochs=4", f"schedule={{name: step, milestones: {milestones}}}"]
    assert plan(*words).notes == notes


def test_a_start_that_is_not_below_the_size_of_the_set_is_refused(plan, refusal):
    assert refusal(plan, "data.progressive={start_size: 28}") == (
        "data.progressive.start_size: 28 does not rise to image size 28 (lower it)"
    )


def test_a_rise_that_ends_before_it_begins_is_refused(plan, refusal):
    assert refusal(plan, "train.epochs=10", "data.progressive={start_size: 8, begin: 60%, end: 50%}") == (
        "data.progressive.end: 50% comes before begin 60% (swap them)"
    )


@pytest.mark.parametrize(
    ("augment", "batch_size", "ranks", "accumulate", "message"),
    [
        ("mixup", 12, 4, 1, "12 does not divide evenly over 4 ranks into the pairs of mixup (try 16)"),
        ("cutmix", 15, 1, 1, "15 does not divide evenly over 1 rank into the pairs of cutmix (try 16)"),
        ("mixup, cutmix", 8, 1, 8,
         "8 does not divide evenly over 1 rank x 8 micro-batches into the pairs of mixup and cutmix (try 16)"),
        ("mixup", 13, 4, 1, "13 does not divide evenly over 4 ranks into the pairs of mixup (try 16)"),
    ],
)  # fmt: skip
def test_a_batch_that_would_part_a_pair_is_refused(resolve, refusal, augment, batch_size, ranks, accumulate, message):
    words = [f"data.augment=[{augment}]", f"data.batch_size={batch_size}", f"train.accumulate={accumulate}"]
    assert refusal(divide_batch, resolve(*words).recipe, ranks) == f"data.batch_size: {message}"


def test_the_batch_that_is_proposed_for_few_images_has_pairs(plan, refusal):
    few = replace(TRAIN, num_images=45)
    assert refusal(plan, "data.augment=[mixup]", world_size=4, train=few) == (
        "data.batch_size: 128 is more than the 45 training images (try 8)"
    )


def test_pairs_do_not_change_what_a_rank_computes_at_once(plan):
    assert plan("data.augment=[mixup]", "data.batch_size=48", "train.accumulate=2", world_size=4).micro_batch == 6


@pytest.mark.parametrize(
    ("batch_size", "ranks", "accumulate", "message"),
    [
        (500, 8, 1, "500 does not divide evenly over 8 ranks (try 504)"),
        (100, 3, 1, "100 does not divide evenly over 3 ranks (try 99)"),
        (101, 3, 1, "101 does not divide evenly over 3 ranks (try 102)"),
        (1, 4, 1, "1 does not divide evenly over 4 ranks (try 4)"),
        (5, 1, 2, "5 does not divide evenly over 1 rank x 2 micro-batches (try 6)"),
        (100, 8, 3, "100 does not divide evenly over 8 ranks x 3 micro-batches (try 96)"),
        (1, 1024, 2, "1 does not divide evenly over 1,024 ranks x 2 micro-batches (try 2048)"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does(
    resolve, refusal, batch_size, ranks, accumulate, message
):
    recipe = resolve(f"data.batch_size={batch_size}", f"train.accumulate={accumulate}").recipe
    assert refusal(divide_batch, recipe, ranks) == f"data.batch_size: {message}"
    assert refusal(Plan.derive, recipe, ranks, TRAIN, VAL) == f"data.batch_size: {message}"


def test_the_batch_that_is_proposed_divides_and_none_is_nearer(resolve, refusal):
    refused = 0
    for batch_size in range(1, 40):
        for ranks in (2, 3, 8):
            recipe = resolve(f"data.batch_size={batch_size}").recipe
            if batch_size % ranks == 0:
                assert divide_batch(recipe, ranks) == batch_size // ranks
                continue
            refused += 1
            proposed = int(refusal(divide_batch, recipe, ranks).rpartition("try ")[2].rstrip(")"))
            nearest = min(abs(batch_size - candidate) for candidate in range(ranks, 80, ranks))
            assert (proposed % ranks, abs(batch_size - proposed)) == (0, nearest)
    assert refused > 50


@pytest.mark.parametrize(
    ("ranks", "num_images", "fix"),
    [
        (1, 100, "try 8"),
        (8, 100, "try 8"),
        (1, 127, "try 8"),
        (1, 5, "try 5"),
        (8, 5, "add images, or use fewer ranks"),
        (1, 0, "add images, or use fewer ranks"),
    ],
)
def test_a_batch_of_more_images_than_there_are_is_refused_with_one_that_fits(plan, refusal, ranks, num_images, fix):
    assert refusal(plan, world_size=ranks, train=replace(TRAIN, num_images=num_images)) == (
        f"data.batch_size: 128 is more than the {num_images} training images ({fix})"
    )


def test_classes_that_are_weighed_twice_are_noted(resolve):
    def notes(*words):
        return [each for each in Plan.derive(resolve(*words).recipe, 1, TRAIN, VAL).notes if "class_weights" in each]

    both = ("data.sampler=balanced", "train.class_weights=balanced")
    assert notes(both[0]) == notes(both[1]) == []
    (note,) = notes(*both)
    assert note.startswith("train.class_weights: ") and note.endswith("(set class_weights=off)")


def test_samples_of_a_sampler_are_not_called_images(resolve, refusal):
    recipe = resolve("data.sampler=own:Few").recipe
    message = refusal(Plan.derive, recipe, 1, TRAIN, VAL, num_samples=100)
    assert message == "data.batch_size: 128 is more than the 100 samples per epoch of own:Few (try 8)"
    notes = Plan.derive(recipe, 1, TRAIN, VAL, num_samples=200).notes
    assert any("leaves 72 of 200 samples per epoch of own:Few" in note for note in notes)


def test_a_batch_that_drops_many_images_is_noted_with_a_better_one(plan):
    derived = plan("data.batch_size=256", train=replace(TRAIN, num_images=392))
    (note,) = [note for note in derived.notes if note.startswith("data.batch_size: ")]
    assert "256 leaves 136 of 392 training images (35 %) out of each epoch, which has 1 step" in note
    assert note.endswith("(try data.batch_size=32)")
    tried = plan("data.batch_size=32", train=replace(TRAIN, num_images=392))
    assert not [note for note in tried.notes if note.startswith("data.batch_size: ")]


def test_a_batch_of_all_images_is_one_step_an_epoch(plan):
    derived = plan(train=replace(TRAIN, num_images=128))
    assert (derived.steps_per_epoch, derived.dropped_images) == (1, 0)


def test_an_empty_validation_split_is_refused_unless_nothing_is_evaluated(plan):
    nothing = replace(VAL, num_images=0)
    with pytest.raises(DataError) as caught:
        plan(val=nothing)
    assert str(caught.value) == ("data.source: there are no validation images (name some, or set train.eval_every=off)")
    with pytest.raises(DataError, match=r"no validation images: photos has one image per class, so none is held"):
        plan(val=replace(nothing, notes=("photos has one image per class, so none is held out",)))
    assert plan("train.eval_every=off", val=nothing).val_images == 0


@pytest.mark.parametrize(
    ("word", "channels", "message"),
    [
        ("data.mean=[0.5]", 3, "data.mean: [0.5] does not fit 3 channels (give 3 numbers)"),
        ("data.std=[0.5, 0.5, 0.5]", 1, "data.std: [0.5, 0.5, 0.5] does not fit 1 channel (give 1 number)"),
        ("data.mean=[]", 1, "data.mean: [] does not fit 1 channel (give 1 number)"),
    ],
)
def test_statistics_of_another_number_of_channels_are_refused(plan, refusal, word, channels, message):
    assert refusal(plan, word, train=replace(TRAIN, channels=channels)) == message


def test_images_that_are_not_square_need_a_size(plan, refusal):
    """The dataset says (height, width); people say width x height."""
    assert refusal(plan, train=replace(TRAIN, image_size=(20, 30))) == (
        "data.image_size: the images are 30x20, not square (set data.image_size)"
    )


@pytest.mark.parametrize(
    ("scaling", "batch_size", "factor"),
    [
        ("linear", 128, 1.0), ("linear", 2048, 16.0), ("linear", 64, 0.5),
        ("sqrt", 128, 1.0), ("sqrt", 2048, 4.0), ("sqrt", 64, math.sqrt(0.5)),
    ],
)  # fmt: skip
def test_the_learning_rate_follows_the_batch_size(resolve, scaling, batch_size, factor):
    words = [f"optim.lr_scaling={scaling}", "optim.base_batch_size=128", f"data.batch_size={batch_size}"]
    recipe = resolve(*words).recipe
    assert lr_factor(recipe.optim, recipe.data.global_batch_size) == factor


def test_the_learning_rate_stays_where_it_is_not_scaled(resolve):
    assert lr_factor(resolve("data.batch_size=2048").recipe.optim, 2048) == 1.0


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_the_peak_does_not_depend_on_the_number_of_ranks(plan, ranks):
    words = ["optim.lr=0.1", "optim.lr_scaling=sqrt", "optim.base_batch_size=32", "data.batch_size=128"]
    assert plan(*words, world_size=ranks).peak_lr == 0.2


SQRT = ["optim.lr=0.1", "optim.lr_scaling=sqrt", "optim.base_batch_size=128", "data.batch_size=2048"]
LINEAR = ["optim.lr=0.1", "optim.lr_scaling=linear", "optim.base_batch_size=256", "data.batch_size=96"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*SQRT, "schedule.warmup=16ep"], "0.1 at batch 128 -> 0.4 at batch 2048 (sqrt scaling), 16 epochs of warm-up"),
        ([*SQRT, "schedule.warmup=1ep"], "0.1 at batch 128 -> 0.4 at batch 2048 (sqrt scaling), 1 epoch of warm-up"),
        (
            [*LINEAR, "schedule.warmup=500st"],
            "0.1 at batch 256 -> 0.0375 at batch 96 (linear scaling), 500 steps of warm-up",
        ),
        (
            [*LINEAR, "schedule.warmup=50000img"],
            "0.1 at batch 256 -> 0.0375 at batch 96 (linear scaling), 50,000 images of warm-up",
        ),
        (
            [*LINEAR, "schedule.warmup=2.5%"],
            "0.1 at batch 256 -> 0.0375 at batch 96 (linear scaling), 2.5 % of the run of warm-up",
        ),
        (["optim.lr=0.1"], "0.1 (batch 128, no scaling), no warm-up"),
        (
            ["optim.lr=0.1", "optim.layer_decay=0.75"],
            "0.1 (batch 128, no scaling), each layer before the classifier 0.75 times that of the next, no warm-up",
        ),
        (["optim.lr=1e-5", "schedule.warmup=0.5ep"], "1e-05 (batch 128, no scaling), 0.5 epochs of warm-up"),
        (["schedule.name=one_cycle"], "0.1 (batch 128, no scaling), rising for 30 % of the run"),
        (
            [*SQRT, "schedule={name: one_cycle, peak_at: 5ep}"],
            "0.1 at batch 128 -> 0.4 at batch 2048 (sqrt scaling), rising for 5 epochs",
        ),
    ],
)
def test_the_decision_about_the_learning_rate_is_one_sentence(resolve, words, sentence):
    recipe = resolve(*words).recipe
    batch_size = recipe.data.global_batch_size
    peak_lr = recipe.optim.lr * lr_factor(recipe.optim, batch_size)
    assert lr_sentence(recipe.optim, recipe.schedule, batch_size, peak_lr) == sentence


def test_checkpoints_in_time_have_no_cadence_in_steps(plan):
    made = plan("checkpoint.every=1.5min")
    assert (made.checkpoint_every, made.checkpoint_every_s) == (0, 90.0)
    assert plan("checkpoint.every=off").checkpoint_every_s == 0


@pytest.mark.parametrize("every", ["3st", "10min"])
def test_checkpoints_to_keep_for_good_are_ones_that_are_written(plan, every):
    with pytest.raises(RecipeError, match=f"checkpoint.keep_every: 10st is not a multiple of checkpoint.every {every}"):
        plan(f"checkpoint.every={every}", "checkpoint.keep_every=10st")
    assert plan("checkpoint.every=5st", "checkpoint.keep_every=10st").checkpoint_keep_every == 10

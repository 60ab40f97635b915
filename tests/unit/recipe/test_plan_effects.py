"""`check_effects` and notes of the plan: settings without effect on the data or in a short run are refused."""

from dataclasses import replace

import pytest

from paceline.core.dataset import DatasetInfo
from paceline.core.pixels import PixelFormat
from paceline.recipe.load import load, preset_names
from paceline.recipe.plan import Plan, worker_timeout_warning

GREY = DatasetInfo("toy", "train", 1000, ("a", "b", "c"), 1, (28, 28), (0.5,), (0.25,))
COLOUR = replace(GREY, channels=3, mean=(0.5,) * 3, std=(0.25,) * 3)
PHOTOS = replace(COLOUR, image_size=None)
WHOLE = "has no effect on digits, whose images have one size and are resized whole"


@pytest.fixture
def plan(resolve):
    """Return a function that plans the smallest recipe with overrides over it, for a dataset."""

    def derive(*words: str, info: DatasetInfo = GREY) -> Plan:
        return Plan.derive(resolve(*words).recipe, 1, info, replace(info, split="val"))

    return derive


def test_an_average_that_the_run_is_too_short_for_is_noted(plan):
    note = "train.ema: the run ends at step 10, before the first update of the average"
    assert note in plan("train.steps=10", "train.ema.every=11").notes
    assert note not in plan("train.steps=10", "train.ema.every=10").notes


@pytest.mark.parametrize(
    ("worker_timeout", "timeout", "is_noted"),
    [("5min", "2min", True), ("60s", "1min", True), ("59s", "1min", False), ("1h", "2h", False)],
)
def test_a_wait_for_workers_that_the_run_ends_before_is_noted(resolve, worker_timeout, timeout, is_noted):
    """As soon as both end at once: which of them is reported would be chance."""
    recipe = resolve(f"data.worker_timeout={worker_timeout}", f"parallel.timeout={timeout}").recipe
    wait, limit = recipe.data.worker_timeout, recipe.parallel.timeout
    ends = f"parallel.timeout of {limit} ends the run first, without naming the image at which a worker hangs"
    note = f"data.worker_timeout: {wait} has no effect: {ends} (set it lower than that)"
    assert worker_timeout_warning(recipe.data, recipe.parallel, 1) == (note if is_noted else "")
    assert worker_timeout_warning(recipe.data, recipe.parallel, 0) == ""


def test_no_preset_has_a_run_end_before_its_workers_can_be_blamed():
    assert len(preset_names()) > 20
    recipes = {name: load(name).recipe for name in preset_names()}
    assert [name for name, each in recipes.items() if worker_timeout_warning(each.data, each.parallel, 1)] == []


SIZING = [
    ("data.eval_crop=0.9", f"data.eval_crop: 0.9 {WHOLE} (set data.eval_crop=0.875)"),
]


@pytest.mark.parametrize("words", [["data.auto_image_size=64"], ["data.auto_image_size=64", "data.image_size=32"]])
def test_a_size_of_photographs_without_effect_is_refused(plan, refusal, words):
    info = PHOTOS if len(words) == 2 else COLOUR
    assert refusal(plan, *words, info=info).startswith(
        "data.auto_image_size: 64 has no effect on images of one size, or"
    )
    assert plan(words[0], info=PHOTOS).image_size == 64


@pytest.mark.parametrize(("word", "message"), SIZING)
def test_ways_to_size_photographs_are_refused_for_pixels_of_one_size(plan, refusal, word, message):
    assert refusal(plan, word) == message
    assert plan(word, info=PHOTOS).image_size == 224


# matrix: 35
def test_skipping_bad_images_is_refused_where_none_is_read_later(plan, refusal):
    assert refusal(plan, "data.on_bad_image=skip") == (
        "data.on_bad_image: skip has no effect on digits, whose images are all in memory (set data.on_bad_image=fail)"
    )
    assert plan("data.on_bad_image=skip", info=PHOTOS).image_size == 224


def test_no_preset_sizes_pixels_of_one_size_as_photographs():
    photographs = {"folder", "manifest"}
    others = [data for name in preset_names() if (data := load(name).recipe.data).source.name not in photographs]
    assert len(others) > 20
    assert {(data.eval_crop, data.eval_resize) for data in others} == {(0.875, "crop")}
    assert not any(section.name == "resize" for data in others for section in data.augment)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_padding_of_a_whole_image_is_refused(plan, refusal, mode):
    """Torch cannot reflect so much, and a crop from zeros could hold nothing else."""
    word = "data.augment=[flip, {{name: pad_crop, padding: {}, mode: {}}}]"
    assert refusal(plan, word.format(28, mode)) == (
        "data.augment[1].padding: 28 is not less than the side of training images of 28x28 (lower it)"
    )
    assert plan(word.format(27, mode)).image_size == 28


def test_padding_fits_the_smallest_images_that_are_trained_on(plan, refusal):
    words = ["data.augment=[pad_crop]", "train.epochs=20"]
    assert refusal(plan, *words, "data.progressive={start_size: 4, multiple: 4}").startswith(
        "data.augment[0].padding: 4 is not less than the side of training images of 4x4 "
    )
    assert plan(*words, "data.progressive={start_size: 8, multiple: 4}").train_size(0) == 8


def test_a_square_that_blanks_every_image_wherever_it_lies_is_refused(plan, refusal):
    """From a corner pixel, 2 x 28 - 1 pixels reach the other end of 28, 2 x 28 - 2 do not."""
    word = "data.augment=[{{name: cutout, size: {}}}]"
    assert refusal(plan, word.format(55)) == (
        "data.augment[0].size: 55 always blanks the whole of training images of 28x28 (lower it)"
    )
    assert plan(word.format(54)).image_size == 28


@pytest.mark.parametrize("strengths", ["hue: 0.1", "saturation: 0.4", "saturation: 0, hue: 0.5"])
def test_jitter_without_effect_on_grey_images_is_refused(plan, refusal, strengths):
    word = f"data.augment=[{{name: color_jitter, brightness: 0, contrast: 0, {strengths}}}]"
    assert refusal(plan, word) == (
        "data.augment[0]: color_jitter only changes brightness and contrast of gray images (set one)"
    )
    assert plan(word, info=COLOUR).channels == 3


WIDE = [PixelFormat(5), PixelFormat(3, "uint16"), PixelFormat(1, "float32")]


@pytest.mark.parametrize("form", WIDE)
def test_augmentation_of_colors_needs_8_bit_gray_or_rgb(plan, refusal, form):
    info = replace(COLOUR, channels=form.channels, pixels=form.pixels, mean=(), std=())
    moving = "pad_crop,flip,rotate,{name: affine, shear_degrees: 9},random_erasing,cutout,mixup,cutmix"
    assert plan(f"data.augment=[{moving}]", info=info).channels == form.channels
    for name in ("color_jitter", "rand_augment", "trivial_augment"):
        message = refusal(plan, f"data.augment=[flip,{name}]", info=info)
        assert message.startswith(f"data.augment[1]: {name} ") and message.endswith("(leave it out)")
        assert f"of {form.pixels}" in message


@pytest.mark.parametrize("word", ["data.augment=[color_jitter]", "data.augment=[{name: color_jitter, brightness: 0}]"])
def test_jitter_of_which_something_is_left_may_change_grey_images(plan, word):
    assert plan(word).channels == 1


def test_a_batch_in_which_versions_of_one_image_would_be_mixed_is_refused(plan, refusal):
    words = ("data.sampler={name: repeated, repeats: 3}", "data.augment=[mixup]")
    message = refusal(plan, *words, "data.batch_size=4")
    assert message.startswith("data.batch_size: 4 is too small for mixup of images that repeat 3 times (try 6, or ")
    assert (
        plan(*words, "data.batch_size=6").steps_per_epoch == plan(words[0], "data.batch_size=6").steps_per_epoch == 166
    )


def test_a_batch_that_is_one_image_alone_is_refused(plan, refusal):
    word = "data.sampler={name: repeated, repeats: 8}"
    message = refusal(plan, word, "data.batch_size=8")
    assert message.startswith("data.batch_size: 8 is too small for images that repeat 8 times (try 16, or lower ")
    assert plan(word, "data.batch_size=9").steps_per_epoch == 111


def test_hard_examples_that_are_never_drawn_are_noted(plan):
    word = "data.sampler={name: hard, after: 3}"
    assert any(note.startswith("data.sampler.after: the run ends ") for note in plan(word, "train.epochs=3").notes)
    assert not any("data.sampler" in note for note in plan(word, "train.epochs=4").notes)

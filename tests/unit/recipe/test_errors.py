"""`recipe.errors`: an invalid recipe is one line that names the field, the value and the fix."""

import pytest
from pydantic import ValidationError

from paceline.recipe.errors import explain
from paceline.recipe.schema import Recipe

VALUE = "is a value where a section is needed (set a field below it)"
NO_DURATION = "is not a duration (write 5ep, 500st, 50000img or 10%)"
NO_TIME = "is wall-clock time, which differs between machines (use ep, st, img or %)"
AT_MOST_2 = "should have at most 2 values"
SIZES = "sets the size of the image, so it comes first, and only once"
OF_STEP = "warmup, warmup_start, warmup_shape, warmup_by, name, milestones, factor"
OF_ADAM = (
    "lr, lr_scaling, base_batch_size, weight_decay, decay_norm_and_bias, norm_and_bias_lr, layer_decay, "
    "implementation, name, betas, eps"
)
WITH_MOMENTUM = "lars, muon, rmsprop, schedule_free, sgd"
WITH_FINAL = "cosine, linear, one_cycle, polynomial"
OPTIMIZERS = "sgd, adam, adamw, rmsprop, novograd, lars, lamb, muon, schedule_free, package.module:Name"
AUGMENTS = (
    "pad_crop, flip, rotate, affine, color_jitter, rand_augment, rand_augment_timm, trivial_augment, auto_augment, "
    "augmix, three_augment, vertical_flip, grayscale, solarize, gaussian_blur, random_erasing, cutout, "
    "random_resized_crop, resize, mixup, cutmix, package.module:Name"
)

UNKNOWN_KEYS = [
    (["sed=1"], "sed: no such field (did you mean 'seed'?)"),
    (["dat.batch_size=3"], "dat: no such field (did you mean 'data'?)"),
    (["data.batchsize=3"], "data.batchsize: no such field (did you mean 'data.batch_size'?)"),
    (["data.source.nme=3"], "data.source.nme: no such field (did you mean 'data.source.name'?)"),
    (
        ["data.source={name: synthetic, channel: 1}"],
        "data.source.channel: no such field (did you mean 'data.source.channels'?)",
    ),
    (["optim.momentun=1"], "optim.momentun: no such field (did you mean 'optim.momentum'?)"),
    (["optim.name=adam", "optim.beta=1"], "optim.beta: no such field (did you mean 'optim.betas'?)"),
    (
        ["optim.name=adam", "optim.momentum=1"],
        f"optim.momentum: has no effect with adam, only with {WITH_MOMENTUM} (adam has {OF_ADAM})",
    ),
    (["schedule.warmupp=1ep"], "schedule.warmupp: no such field (did you mean 'schedule.warmup'?)"),
    (
        ["data.augment=[rotate, {name: flip, pp: 1}]"],
        "data.augment[1].pp: no such field (did you mean 'data.augment[1].p'?)",
    ),
    (["train.stop={top: 0.5, top1: 0.5}"], "train.stop.top: no such field (did you mean 'train.stop.top1'?)"),
    (["log.tensorbord=on"], "log.tensorbord: no such field (did you mean 'log.tensorboard'?)"),
    (["lr=0.1"], "lr: no such field (did you mean 'optim.lr'?)"),
    (["epochs=3"], "epochs: no such field (did you mean 'train.epochs'?)"),
    (["batch_size=3"], "batch_size: no such field (did you mean 'data.batch_size'?)"),
    (["train.lr=3"], "train.lr: no such field (did you mean 'optim.lr'?)"),
    (["train.warmup=3"], "train.warmup: no such field (did you mean 'schedule.warmup' or 'train.ema.warmup'?)"),
    (
        ["log.xyz=on"],
        "log.xyz: no such field (one of every, tensorboard, sinks, samples, worst, explain, predictions, report, "
        "price_per_hour, quote)",
    ),
]

WRONG_VALUES = [
    (["seed=x"], "seed: 'x' should be a whole number"),
    (["seed=1.5"], "seed: 1.5 should be a whole number"),
    (["seed=-1"], "seed: -1 should be greater than or equal to 0"),
    (["seed=9223372036854775808"], "seed: 9223372036854775808 should be less than 9223372036854775808"),
    (["seed=[1]"], "seed: [1] should be a whole number"),
    (["optim.lr=x"], "optim.lr: 'x' should be a number"),
    (["optim.lr=0"], "optim.lr: 0 should be greater than 0"),
    (["optim.lr=.nan"], "optim.lr: nan should be a finite number"),
    (["optim.lr=.inf"], "optim.lr: inf should be a finite number"),
    (["optim.lr="], "optim.lr: None should be a number"),
    (["optim.nesterov=3"], "optim.nesterov: 3 should be true or false"),
    (["model.norm=sync"], "model.norm: 'sync' should be 'batch', 'sync_batch', 'group' or 'none'"),
    (["measure.clock=yes"], "measure.clock: 'yes' should be 'on' or 'off'"),
    (["train.eval_every=3"], f"train.eval_every: 3 {NO_DURATION}"),
    (["schedule.warmup=5"], f"schedule.warmup: 5 {NO_DURATION}"),
    (["checkpoint.grace=5"], "checkpoint.grace: 5 is not a duration (write 90s, 30min or 2h)"),
    (
        ["checkpoint.every=5"],
        "checkpoint.every: 5 is not a duration (write 5ep, 500st, 50000img, 10%, 90s, 30min or 2h)",
    ),
    (["train.eval_every=30min"], f"train.eval_every: '30min' {NO_TIME}"),
    (["train.eval_every=0ep"], "train.eval_every: '0ep' never happens (use 1st for every step)"),
    (["checkpoint.every=0.0%"], "checkpoint.every: '0%' never happens (use 1st for every step)"),
    (["log.every=off"], f"log.every: 'off' {NO_DURATION}"),
    (["parallel.timeout=3ep"], "parallel.timeout: '3ep' is not a wall-clock time (use s, min or h)"),
    (["parallel.timeout=0s"], "parallel.timeout: '0s' is not a wall-clock time (use s, min or h)"),
]

UNIONS = [
    (["data.eval_batch_size=x"], "data.eval_batch_size: 'x' should be a whole number, or 'auto'"),
    (["data.eval_batch_size=0"], "data.eval_batch_size: 0 should be greater than 0, or 'auto'"),
    (["data.workers=-1"], "data.workers: -1 should be greater than or equal to 0, or 'auto'"),
    (["data.workers=[1]"], "data.workers: [1] should be a whole number, or 'auto'"),
    (["train.epochs=0"], "train.epochs: 0 should be greater than 0, or 'auto'"),
    (["data.mean=x"], "data.mean: 'x' should be a list, or 'auto'"),
    (["data.mean=[0.5, b]"], "data.mean[1]: 'b' should be a number"),
    (["data.std=[0.5, 0]"], "data.std[1]: 0 should be greater than 0"),
    (["train.stop=on"], f"train.stop: 'on' {VALUE}"),
    (["train.stop={top1: 2}"], "train.stop.top1: 2 should be less than or equal to 1"),
    (["train.stop={patience: 2}"], "train.stop.top1: is needed (set train.stop.top1=...)"),
]

LISTS = [
    (["data.augment=flip"], "data.augment: 'flip' should be a list"),
    (["data.augment=[3]"], f"data.augment[0]: 3 {VALUE}"),
    (["data.augment=[flip, flipp]"], f"data.augment[1]: 'flipp' is not one of {AUGMENTS} (did you mean 'flip'?)"),
    (["data.augment=[{p: 0.5}]"], "data.augment[0]: {'p': 0.5} names no variant (write {name: ...})"),
    (["data.augment=[{name: affine, scale: [1]}]"], "data.augment[0].scale: [1] is too short (write 2 values)"),
    (["data.augment=[{name: affine, scale: []}]"], "data.augment[0].scale: [] is too short (write 2 values)"),
    (["data.augment=[{name: affine, scale: [1, 2, 3]}]"], f"data.augment[0].scale: [1, 2, 3] {AT_MOST_2}"),
    (["data.augment=[flip, {name: affine, scale: [1, x]}]"], "data.augment[1].scale[1]: 'x' should be a number"),
    (["data.augment=[{name: affine, scale: [2, 1]}]"], "data.augment[0].scale: [2.0, 1.0] falls (write [1.0, 2.0])"),
    (["data.augment=[flip, resize]"], f"data.augment: resize {SIZES}"),
    (["optim.name=adam", "optim.betas=[0.9, 1]"], "optim.betas[1]: 1 should be less than 1"),
    (["schedule={name: step, milestones: []}"], "schedule.milestones: [] should have at least 1 value"),
    (["schedule={name: step, milestones: [1ep, 3]}"], f"schedule.milestones[1]: 3 {NO_DURATION}"),
]

VARIANTS = [
    (["optim.name=sdg"], f"optim.name: 'sdg' is not one of {OPTIMIZERS} (did you mean 'sgd'?)"),
    (["optim.name=3"], f"optim.name: '3' is not one of {OPTIMIZERS}"),
    (["optim=sgd"], f"optim: 'sgd' {VALUE}"),
    (["optim="], f"optim: None {VALUE}"),
    (["model=[]"], f"model: [] {VALUE}"),
    (["data.source=cifar10"], f"data.source: 'cifar10' {VALUE}"),
    (["schedule.name=step"], "schedule.milestones: is needed (set schedule.milestones=...)"),
    (
        ["schedule.name=step", "schedule.final=0"],
        f"schedule.final: has no effect with step, only with {WITH_FINAL} (step has {OF_STEP}); 1 more like this",
    ),
    (["data.source.name=manifest"], "data.source.train: is needed (set data.source.train=...)"),
    (["data.source.name=webdataset"], "data.source.train: is needed (set data.source.train=...); 1 more like this"),
]

NO_EFFECT = [
    (
        ["optim.base_batch_size=128"],
        "optim: base_batch_size has no effect with lr_scaling none (set lr_scaling=linear or sqrt)",
    ),
    (["optim.lr_scaling=sqrt"], "optim: lr_scaling sqrt needs the batch size lr was chosen for (set base_batch_size)"),
    (
        ["optim.decay_norm_and_bias=false", "optim.weight_decay=0"],
        "optim: decay_norm_and_bias=false has no effect with weight_decay 0 (set weight_decay)",
    ),
    (["optim.nesterov=true", "optim.momentum=0"], "optim: nesterov has no effect with momentum 0 (set momentum=0.9)"),
    (
        ["train.stop.top1=0.5", "train.eval_every=off"],
        "train: stop has no effect with eval_every off (set eval_every=1ep)",
    ),
    (
        ["schedule.name=plateau", "train.eval_every=off"],
        "schedule.name: plateau has no effect with train.eval_every off (set train.eval_every=1ep)",
    ),
]

SEVERAL = [
    (["optim.lr=a", "seed=x"], "seed: 'x' should be a whole number; 1 more like this"),
    (["optim.lr=a", "seed=x", "model.width=b"], "seed: 'x' should be a whole number; 2 more like this"),
    (["data.mean=[a, b, c]"], "data.mean[0]: 'a' should be a number; 2 more like this"),
    (
        ["seed=x", "optim.momentun=1"],
        "optim.momentun: no such field (did you mean 'optim.momentum'?); 1 more like this",
    ),
    (["train.stop={top: 0.5}"], "train.stop.top: no such field (did you mean 'train.stop.top1'?); 1 more like this"),
]


@pytest.mark.parametrize(("words", "message"), UNKNOWN_KEYS)
def test_an_unknown_key_is_refused_at_every_level_with_the_nearest_one(resolve, refusal, words, message):
    assert refusal(resolve, *words) == message


@pytest.mark.parametrize(("words", "message"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_what_it_should_be(resolve, refusal, words, message):
    assert refusal(resolve, *words) == message


@pytest.mark.parametrize(("words", "message"), UNIONS)
def test_of_a_union_all_branches_are_named_and_no_branch_is_counted_as_another_error(resolve, refusal, words, message):
    assert refusal(resolve, *words) == message


@pytest.mark.parametrize(("words", "message"), LISTS)
def test_an_item_of_a_list_is_named_by_its_index(resolve, refusal, words, message):
    assert refusal(resolve, *words) == message


@pytest.mark.parametrize(("words", "message"), VARIANTS)
def test_a_section_that_is_no_variant_is_refused_with_those_there_are(resolve, refusal, words, message):
    assert refusal(resolve, *words) == message


@pytest.mark.parametrize(("words", "message"), NO_EFFECT)
def test_a_setting_without_effect_is_an_error(resolve, refusal, words, message):
    assert refusal(resolve, *words) == message


@pytest.mark.parametrize(("words", "message"), SEVERAL)
def test_of_several_errors_the_most_useful_comes_first_and_the_others_are_counted(resolve, refusal, words, message):
    assert refusal(resolve, *words) == message


def test_a_long_value_is_cut_off(resolve, refusal):
    assert refusal(resolve, f"seed={'x' * 100}") == f"seed: '{'x' * 56}... should be a whole number"


@pytest.mark.parametrize("value", ["a\nb", "a\x1b[31mb", "\u2028"])
def test_a_value_of_several_lines_is_still_refused_in_one(resolve, refusal, value):
    escaped = value.encode("unicode_escape").decode().replace("\\x1b", "\\e")
    assert refusal(resolve, f'seed="{escaped}"') == f"seed: {value!r} should be a whole number"


def test_the_path_and_the_message_come_apart():
    values = {"train": {"epochs": 1}, "optim": {"name": "sgd", "lr": "x"}}
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(values)
    assert explain(caught.value, values) == ("optim.lr", "'x' should be a number")

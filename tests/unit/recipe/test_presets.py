"""Every shipped recipe loads, says what it is, and is the same after a trip through a file."""

import re
import shlex
from functools import cache

import pytest

from paceline.cli.args import split_recipe_args
from paceline.core.run_dir import RunDir
from paceline.core.units import Duration
from paceline.recipe.load import PRESETS, load, preset_names, preset_summary
from paceline.recipe.plan import lr_factor
from paceline.recipe.schema import Recipe
from paceline.recipe.yaml import read_yaml_file, read_yaml_text, to_yaml_text

SC20_RUNGS = ("sc20/bs256", "sc20/bs256-amp", "sc20/bs256-amp-nhwc", "sc20/bs256-amp-nhwc-extra-opts")
SC20_PROFILES = tuple(f"{name}-prof" for name in SC20_RUNGS)
SC20_PEAK_LR = {
    "sc20/bs128": 0.1,
    "sc20/bs128-opt": 0.1,
    **dict.fromkeys((*SC20_RUNGS, *SC20_PROFILES), 0.1414),
    "sc20/bs512-opt": 0.2,
    "sc20/bs1024-opt": 0.2828,
    "sc20/bs1024-warmup-opt": 0.2828,
    "sc20/bs2048-opt": 0.4,
    "sc20/bs2048-warmup-opt": 0.4,
}
EXPECTED = {
    *SC20_PEAK_LR,
    "cifar-base",
    "cifar10-94",
    "cifar10-95",
    "cifar10-96",
    "cifar10-cpu",
    "cifar10-resnet18",
    "cifar100-75",
    "cifar100-78",
    "course/wideresnet-cifar10-assessment",
    "course/wideresnet-fashion",
    "course/wideresnet-fashion-momentum",
    "course/wideresnet-fashion-novograd",
    "course/wideresnet-fashion-warmup",
    "ddp-post/dataparallel",
    "ddp-post/ddp",
    "ddp-post/ddp-amp",
    "ddp-post/single",
    "deit3-small",
    "digits",
    "fashion-cpu",
    "folder",
    "folder-finetune",
    "imagenet-resnet18-16ep",
    "imagenet-resnet50-16ep",
    "jsc/resnet50-imagenet",
    "quant/resnet18-imagenet",
    "quant/resnet18-imagenet-bs512",
    "quant/resnet18-imagenet-bs512-o1",
    "quant/resnet18-imagenet-bs512-o2",
    "quant/resnet18-imagenet-o1",
    "quant/resnet18-imagenet-o2",
    "quant/resnet18-imagenet-o3",
    "synthetic",
    "timm-a1",
    "timm-a2",
    "timm-a3",
    "torchvision-v2",
}
LABELS = ("Target", "Hardware", "Time", "Command", "Source")
VARIANTS = {
    ("sc20/bs128", "sc20/bs256"): {"data.batch_size"},
    ("sc20/bs256", "sc20/bs256-amp"): {"train.precision"},
    ("sc20/bs256-amp", "sc20/bs256-amp-nhwc"): {"model.memory_format"},
    ("sc20/bs256-amp-nhwc", "sc20/bs256-amp-nhwc-extra-opts"): {"optim.implementation", "train.cudnn_benchmark"},
    ("sc20/bs256-amp-nhwc-extra-opts", "sc20/bs128-opt"): {"data.batch_size"},
    **{
        (name, f"{name}-prof"): {
            *("train.epochs", "train.steps", "train.eval_every"),
            *("checkpoint.every", "measure.nvtx", "measure.warmup_steps"),
        }
        for name in SC20_RUNGS
    },
    ("sc20/bs256-amp-nhwc-extra-opts", "sc20/bs512-opt"): {"data.batch_size", "train.epochs"},
    ("sc20/bs512-opt", "sc20/bs1024-opt"): {"data.batch_size"},
    ("sc20/bs1024-opt", "sc20/bs2048-opt"): {"data.batch_size"},
    ("sc20/bs1024-opt", "sc20/bs1024-warmup-opt"): {"schedule.warmup", "schedule.warmup_by"},
    ("sc20/bs2048-opt", "sc20/bs2048-warmup-opt"): {"schedule.warmup", "schedule.warmup_by"},
    ("course/wideresnet-fashion", "course/wideresnet-fashion-momentum"): {"model.norm", "optim.momentum"},
    ("course/wideresnet-fashion-momentum", "course/wideresnet-fashion-warmup"): {
        "schedule.warmup",
        "schedule.warmup_start",
        "schedule.warmup_by",
    },
    ("ddp-post/single", "ddp-post/dataparallel"): {"data.rank_batch_size", "parallel.strategy"},
    ("ddp-post/single", "ddp-post/ddp"): {"model.norm"},
    ("ddp-post/ddp", "ddp-post/ddp-amp"): {"train.precision"},
    ("quant/resnet18-imagenet", "quant/resnet18-imagenet-o1"): {"train.precision"},
    ("quant/resnet18-imagenet", "quant/resnet18-imagenet-o2"): {"train.precision"},
    ("quant/resnet18-imagenet", "quant/resnet18-imagenet-o3"): {"train.precision"},
    ("quant/resnet18-imagenet", "quant/resnet18-imagenet-bs512"): {"data.batch_size"},
    ("quant/resnet18-imagenet-bs512", "quant/resnet18-imagenet-bs512-o1"): {"train.precision"},
    ("quant/resnet18-imagenet-bs512", "quant/resnet18-imagenet-bs512-o2"): {"train.precision"},
    ("timm-a1", "timm-a2"): {"data.augment", "optim.weight_decay", "train.epochs", "train.label_smoothing"},
    ("timm-a2", "timm-a3"): {
        *("data.augment", "data.image_size", "data.eval_image_size", "data.sampler.name", "data.sampler.repeats"),
        *("model.drop_path", "optim.lr", "schedule.warmup_start", "schedule.final", "train.epochs"),
    },
    ("imagenet-resnet50-16ep", "imagenet-resnet18-16ep"): {
        "data.batch_size",
        "model.name",
        "optim.lr",
        "optim.base_batch_size",
        "optim.weight_decay",
    },
}
NAMES = preset_names()
shipped = cache(load)
lines_of_preset = cache(lambda file: read_yaml_file(PRESETS / file).lines)


def header(name):
    """Return the header of a preset as a mapping from its labels to their text, continuation lines joined."""
    lines = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#") for line in lines[: next(i for i, line in enumerate(lines) if line[0] != "#")]]
    labelled: dict[str, str] = {}
    label = ""
    for comment in comments[1:]:
        match = re.match(r" ([A-Z][A-Za-z ]*): (.+)", comment)
        label, text = (match[1], match[2]) if match else (label, comment.strip())
        assert match is None or label not in labelled, f"{name} has {label} twice"
        labelled[label] = f"{labelled.get(label, '')} {text}".strip()
    return labelled


def flat(values, prefix=""):
    """Return the leaves of nested mappings by their dotted paths; a list is a leaf."""
    leaves = {}
    for key, value in values.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def test_there_are_52_presets_and_they_are_the_files_of_the_folder():
    files = [path for path in PRESETS.rglob("*") if path.is_file()]
    assert len(NAMES) == 52
    assert set(NAMES) == EXPECTED
    assert sorted(f"{name}.yaml" for name in NAMES) == sorted(str(path.relative_to(PRESETS)) for path in files)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_comes_back_from_yaml_as_an_equal_recipe_with_an_equal_hash(name):
    recipe = shipped(name).recipe
    values = recipe.to_dict()
    read = read_yaml_text(to_yaml_text(values), "again.yaml").values
    assert read == values
    again = Recipe.model_validate(read)
    assert (again, again.hash) == (recipe, recipe.hash)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (number % 5 > 0)) for number, name in enumerate(NAMES)]
)
def test_every_preset_loads_again_from_a_run_directory(name, tmp_path):
    recipe = shipped(name).recipe
    run = RunDir(tmp_path / "run")
    run.create()
    run.write_json("plan.json", {})
    run.recipe.write_text(f"# recipe {recipe.hash}\n" + to_yaml_text(recipe.to_dict()), encoding="utf-8")
    again = load(str(run.path))
    assert (again.recipe, again.name) == (recipe, "run")


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_opens_with_a_sentence_that_lists_show(name):
    summary = preset_summary(name)
    assert len(summary) > 20
    assert summary.endswith(".")
    assert not summary.startswith("#")


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_its_result_hardware_time_command_and_source(name):
    labelled = header(name)
    assert set(LABELS) <= set(labelled)
    assert all(labelled[label] for label in LABELS)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_every_preset_is_that_preset_with_overrides_that_load(name):
    program, verb, *words = shlex.split(header(name)["Command"])
    assert (program, verb) == ("paceline", "train")
    if "--ranks" in words:
        at = words.index("--ranks")
        assert words[at + 1].isdecimal()
        del words[at : at + 2]
    named, patch = split_recipe_args(words)
    recipe = load(named, patch).recipe
    assert named == name
    values = flat(recipe.to_dict())
    for path, value in patch.assignments:
        assert values[path] == value


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_preset_names_the_preset_and_line_that_set_it(name):
    stack = shipped(name).stack
    assert stack.origins
    for path, place in stack.origins.items():
        file, line = place.rsplit(":", 1)
        assert lines_of_preset(file)[path] == int(line)


@pytest.mark.parametrize(("base", "variant"), VARIANTS)
def test_a_variant_differs_from_its_base_only_as_named(base, variant):
    before, after = flat(shipped(base).recipe.to_dict()), flat(shipped(variant).recipe.to_dict())
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} == VARIANTS[
        base, variant
    ]


@pytest.mark.parametrize("name", sorted(SC20_PEAK_LR))
def test_sc20_scales_the_learning_rate_with_the_square_root_of_the_batch(name):
    recipe = shipped(name).recipe
    # Four decimals, as the values above are written.
    assert round(recipe.optim.lr * lr_factor(recipe.optim, recipe.data.global_batch_size), 4) == SC20_PEAK_LR[name]


def test_sc20_warms_up_for_8_epochs_at_1024_and_16_at_2048_and_else_not():
    warmups = {name: str(shipped(name).recipe.schedule.warmup) for name in SC20_PEAK_LR}
    assert {name: warmup for name, warmup in warmups.items() if warmup != "0st"} == {
        "sc20/bs1024-warmup-opt": "8ep",
        "sc20/bs2048-warmup-opt": "16ep",
    }


def test_sc20_starts_in_float32_contiguous_with_a_loop_and_without_trying_algorithms():
    recipe = shipped("sc20/bs128").recipe
    assert (recipe.train.precision, recipe.model.memory_format) == ("fp32", "contiguous")
    assert (recipe.optim.implementation, recipe.train.cudnn_benchmark) == ("loop", "off")


COURSE = {
    "fashion": ("sgd", 0.01, 32, "sync_batch"),
    "fashion-momentum": ("sgd", 0.01, 32, "batch"),
    "fashion-warmup": ("sgd", 0.01, 32, "batch"),
    "fashion-novograd": ("novograd", 0.01, 32, "batch"),
    "cifar10-assessment": ("novograd", 0.15, 256, "sync_batch"),
}


@pytest.mark.parametrize("exercise", COURSE)
def test_an_exercise_of_the_course_has_the_optimizer_rate_batch_per_gpu_and_norms_that_it_prints(exercise):
    recipe = shipped(f"course/wideresnet-{exercise}").recipe
    optim = recipe.optim
    assert (optim.name, optim.lr, recipe.data.rank_batch_size, recipe.model.norm) == COURSE[exercise]
    assert optim.lr_scaling == "none"


def test_fashion_mnist_is_not_normalised_in_the_course():
    data = shipped("course/wideresnet-fashion").recipe.data
    assert (data.mean, data.std) == ((0.0,), (1.0,))


AS_TORCH_IS = ("course/wideresnet-fashion", "ddp-post/single", "jsc/resnet50-imagenet")


@pytest.mark.parametrize("name", AS_TORCH_IS)
def test_where_a_program_left_all_to_torch_its_preset_has_torchs_defaults(name):
    recipe = shipped(name).recipe
    assert (recipe.train.precision, recipe.train.cudnn_benchmark) == ("torch_default", "off")
    assert (recipe.model.memory_format, recipe.optim.implementation) == ("contiguous", "foreach")


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("sc20/bs128", 6),
        ("course/wideresnet-fashion", 0),
        ("course/wideresnet-cifar10-assessment", 0),
        ("ddp-post/ddp", 10),
    ],
)
def test_pixels_come_from_as_many_workers_as_they_did_there_and_change_on_the_host(name, workers):
    data = shipped(name).recipe.data
    assert (data.loader, data.workers) == ("auto", workers)
    assert data.augment_on == ("host" if data.augment else "auto")


def test_the_assessment_of_the_course_has_its_numbers():
    recipe = shipped("course/wideresnet-cifar10-assessment").recipe
    optim, stop = recipe.optim, recipe.train.stop
    assert (optim.betas, optim.weight_decay, optim.grad_averaging) == ((0.95, 0.0), 0.0, True)
    assert recipe.train.accuracy == "on"
    assert (recipe.schedule.warmup, recipe.train.epochs) == (Duration(5, "ep"), 40)
    assert (stop.top1, stop.patience) == (0.85, 2)
    assert [section.name for section in recipe.data.augment] == ["flip", "rotate", "affine", "color_jitter"]


def test_progress_from_160_to_192_pixels_is_between_epochs_11_and_13_of_16():
    progressive = shipped("imagenet-resnet50-16ep").recipe.data.progressive
    steps = {"steps_per_epoch": 312, "batch_size": 4096, "total_steps": 16 * 312}
    assert progressive.begin.steps(**steps) == 11 * 312
    assert progressive.end.steps(**steps) == 13 * 312


def test_no_name_means_digits():
    assert load().recipe == load("digits").recipe
    assert load().name == "digits"

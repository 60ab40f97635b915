"""`recipe.schema`: documented, frozen, with valid defaults; its JSON schema and its hash can be relied on."""

import hashlib
import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.core.errors import RecipeError
from paceline.recipe.load import Patch, load, preset_names
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import Section
from paceline.recipe.schema.train import Ema
from paceline.recipe.yaml import read_yaml_text

SCHEMA: dict[str, Any] = Recipe.model_json_schema()
SECTIONS: dict[str, dict[str, Any]] = {"Recipe": SCHEMA, **SCHEMA["$defs"]}
FIELDS = {f"{name}.{key}": node for name, section in SECTIONS.items() for key, node in section["properties"].items()}

TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
}  # fmt: skip
BOUNDS: dict[str, Any] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
    "pattern": lambda value, bound: re.search(bound, value) is not None,
    "const": lambda value, bound: value == bound,
    "enum": lambda value, bound: value in bound,
    "anyOf": lambda value, options: any(fits(value, option) for option in options),
    "oneOf": lambda value, options: sum(fits(value, option) for option in options) == 1,
    "$ref": lambda value, name: fits(value, SECTIONS[name.rpartition("/")[2]]),
    "items": lambda value, node: all(fits(item, node) for item in value),
    "prefixItems": lambda value, nodes: all(fits(item, node) for item, node in zip(value, nodes, strict=False)),
    "required": lambda value, keys: set(keys) <= set(value),
    "properties": lambda value, nodes: all(fits(value[key], node) for key, node in nodes.items() if key in value),
}
SILENT = {"$defs", "title", "description", "default", "discriminator", "type", "additionalProperties"}


def fits(value: object, node: dict[str, Any]) -> bool:
    """Say whether `value` is valid under JSON schema `node`; knows the keywords that a recipe's schema uses."""
    assert set(node) <= set(BOUNDS) | SILENT, f"teach this test {set(node) - set(BOUNDS) - SILENT}"
    if "type" in node:
        is_truth = isinstance(value, bool)
        if not isinstance(value, TYPES[node["type"]]) or is_truth != (node["type"] == "boolean"):
            return False
    if node.get("additionalProperties") is False and not set(value) <= set(node["properties"]):  # type: ignore[call-overload]
        return False
    return all(check(value, node[keyword]) for keyword, check in BOUNDS.items() if keyword in node)


def sections(value: object):
    """Yield every section in a recipe."""
    if isinstance(value, tuple):
        for item in value:
            yield from sections(item)
    if isinstance(value, Section):
        yield value
        for name in type(value).model_fields:
            yield from sections(getattr(value, name))


def test_every_field_of_every_section_is_documented():
    """`name` is: its section's docstring says what choosing it means. A `$ref` is described by its section."""
    documented = {path for path, node in FIELDS.items() if len(node.get("description", "")) > 8 or "$ref" in node}
    names = {path for path, node in FIELDS.items() if "const" in node}
    assert len(documented) > 60
    assert set(FIELDS) - documented - names == set()


def test_every_section_is_documented():
    described = [name for name, section in SECTIONS.items() if len(section.get("description", "")) > 8]
    assert len(described) > 20
    assert described == list(SECTIONS)


def test_every_section_refuses_unknown_keys():
    assert [name for name, section in SECTIONS.items() if section["additionalProperties"] is not False] == []


def test_every_default_is_valid():
    defaults = {path: node for path, node in FIELDS.items() if "default" in node}
    assert len(defaults) > 60
    assert [path for path, node in defaults.items() if not fits(node["default"], node)] == []


def test_only_what_cannot_be_guessed_is_required():
    required = {f"{name}.{key}" for name, section in SECTIONS.items() for key in section.get("required", [])}
    lists = {"Manifest.train", "WebDataset.train", "WebDataset.val"}
    places = {"Pack.root", "Lmdb.root", "HuggingFace.root"}
    own = {f"Own{part}.name" for part in ("Source", "Sampler", "Optim", "Augment", "Sink", "Loss", "Callback")}
    ours = {
        "Recipe.train",
        "Stop.top1",
        "Distill.teacher",
        "Step.milestones",
        "Progressive.start_size",
        "Curriculum.column",
    }
    assert required == {*ours, *lists, *places, *own, "OwnOptim.lr"}


def test_every_section_of_a_recipe_is_frozen(resolve):
    words = ["train.stop.top1=0.9", "data.augment=[flip, rotate]"]
    found = list(sections(resolve(*words).recipe))
    assert len(found) == 16
    for section in found:
        for name in type(section).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(section, name, getattr(section, name))


@pytest.mark.parametrize("name", preset_names())
def test_the_json_schema_takes_every_preset_as_written_and_as_resolved(name):
    loaded = load(name)
    assert fits(loaded.stack.values, SCHEMA)
    assert fits(loaded.recipe.to_dict(), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "data: {augment: [flip, {name: pad_crop, padding: 2}], mean: [0.5], workers: 0}",
        "optim: {name: adam, betas: [0.9, 0.99]}\nschedule: {name: step, milestones: [30%, 2ep]}",
        "train: {steps: 5, stop: {top1: 0.9}, eval_every: 100img}\ncheckpoint: {every: off}",
    ],
)
def test_the_json_schema_takes_a_recipe_that_loads(resolve, text):
    loaded = resolve(text=text if "train:" in text else f"{text}\ntrain: {{epochs: 1}}\n")
    assert fits(loaded.stack.values, SCHEMA)
    assert fits(loaded.recipe.to_dict(), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "sed: 1", "seed: x", "seed: -1", "seed: 1.5", "optim: {name: sdg}", "optim: {name: adam, momentum: 0.9}",
        "data: {augment: [flipp]}", "data: {augment: [{name: flip, p: 2}]}", "data: {workers: -1}",
        "train: {epochs: 1, eval_every: 30min}", "train: {epochs: 1, stop: on}", "train: {epochs: 1, stop: {}}",
        "optim: {name: adam, betas: [0.9]}", "parallel: {timeout: 3ep}", "schedule: {name: step, milestones: []}",
    ],
)  # fmt: skip
def test_the_json_schema_refuses_what_does_not_load(text):
    values = {"train": {"epochs": 1}, **read_yaml_text(text, "r.yaml").values}
    assert fits({"train": {"epochs": 1}}, SCHEMA)
    assert not fits(values, SCHEMA)


def test_the_json_schema_is_json():
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train: {epochs: 2}", "train: {epochs: 2.0}"),
        ("train: {epochs: 2, eval_every: 1ep}", "train: {eval_every: '1.0 ep', epochs: 2}"),
        ("train: {epochs: 2}\nseed: 0", "train: {epochs: 2}"),
        ("train: {epochs: 2}\noptim: {lr: 0.1}", "optim: {lr: 1e-1, name: sgd}\ntrain: {epochs: 2}"),
        ("train: {epochs: 2}\ndata: {augment: [flip]}", "train: {epochs: 2}\ndata: {augment: [{p: 0.5, name: flip}]}"),
    ],
)
def test_equivalent_recipes_are_equal_with_equal_hashes(resolve, one, other):
    first, second = resolve(text=one).recipe, resolve(text=other).recipe
    assert first == second
    assert first.hash == second.hash


def test_recipes_that_differ_anywhere_have_different_hashes(resolve):
    changes = [
        [], ["seed=1"], ["data.batch_size=64"], ["data.workers=0"], ["data.mean=[0.5]"], ["data.mean=[0.25]"],
        ["data.source.name=synthetic"], ["data.source={name: synthetic, num_images: 8}"], ["data.augment=[flip]"],
        ["data.augment=[flip, rotate]"], ["data.augment=[rotate, flip]"], ["data.augment=[{name: flip, p: 0.25}]"],
        ["model.name=resnet50_cifar"], ["model.width=0.5"], ["optim.lr=0.2"], ["optim.lr=0.2000001"],
        ["optim.name=adam"], ["optim.name=adamw"], ["schedule.name=cosine"], ["schedule.warmup=5ep"],
        ["schedule.warmup=5st"], ["schedule.warmup=33.333%"], ["schedule.warmup=33.333333%"], ["train.epochs=2"],
        ["train.steps=1"], ["train.stop.top1=0.5"], ["train.precision=bf16"], ["parallel.device=cpu"],
        ["checkpoint.every=off"], ["measure.clock=off"], ["log.every=1st"], ["log.samples=true"],
        ["train.loss=bce"], ["train.loss=focal"], ["train.metrics=[f1]"], ["train.metrics=[auroc]"],
        ["train.label_threshold=0.3"], ["train.distill.teacher=x"],
        ["train.monitor=loss"], ["train.patience=1"], ["train.patience=1ep"], ["train.max_time=1h"],
        ["data.sampler=repeated"], ["data.sampler={name: repeated, repeats: 4}"], ["data.sampler='a:B'"],
        ["data.augment=[mixup]"], ["data.augment=[{name: mixup, until: 1ep}]"],
        ["data.augment=[{name: mixup, p: 0.5}]"], ["train.clip_agc=0.01"], ["data.sampler=balanced"],
        ["data.sampler={name: weighted, classes: {a: 2}}"], ["data.sampler={name: weighted, column: a}"],
        ["data.sampler={name: subset, fraction: 0.5}"], ["data.sampler={name: curriculum, column: a}"],
    ]  # fmt: skip
    hashes = [resolve(*words).recipe.hash for words in changes]
    assert len(set(hashes)) == len(hashes) == 54
    assert all(re.fullmatch("[0-9a-f]{12}", each) for each in hashes)


def test_recipes_keep_their_hashes_from_before_a_field_was_added(resolve):
    """The hash leaves out the default of a later field, so that results of one recipe stay comparable."""
    recipe = resolve("data.augment=[mixup, {name: cutmix, p: 0.5}]").recipe
    values = recipe.to_dict()
    mixup, cutmix = values["data"]["augment"]
    del mixup["p"], mixup["until"], cutmix["until"]
    added = (
        "loss",
        "metrics",
        "monitor",
        "patience",
        "max_time",
        "callbacks",
        "clip_agc",
        "label_threshold",
        "distill",
    )
    for name in added:
        del values["train"][name]
    for section, name in (
        ("data", "interpolation"),
        ("data", "auto_image_size"),
        ("data", "sampler"),
        ("data", "split"),
        ("data", "cache"),
        ("data", "cache_gb"),
        ("model", "checkpoint_activations"),
        ("model", "weights_sha256"),
        ("model", "unfreeze"),
        ("model", "lora"),
        ("parallel", "bind"),
        ("log", "explain"),
        ("log", "predictions"),
        ("log", "price_per_hour"),
        ("log", "quote"),
    ):
        del values[section][name]
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    assert recipe.hash == hashlib.sha256(text.encode()).hexdigest()[:12]
    defaults = ["data.augment=[mixup, {name: cutmix, p: 0.5, until: off}]", "data.sampler=shuffle"]
    defaults += ["train.loss=cross_entropy", "train.metrics=[]", "train.monitor=auto", "train.patience=off"]
    defaults += ["train.callbacks=[]"]
    assert resolve(*defaults, "train.max_time=off").recipe.hash == recipe.hash


def test_a_folder_keeps_its_hash_from_before_pixels_was_added(resolve):
    source = "data.source={{name: folder, root: x{}}}"
    recipe = resolve(source.format("")).recipe
    assert recipe.hash == "0b349fe6c2e7"
    assert resolve(source.format(", pixels: uint8")).recipe.hash == recipe.hash
    assert resolve(source.format(", pixels: uint16")).recipe.hash != recipe.hash


def test_a_manifest_keeps_its_hash_from_before_it_had_several_labels():
    manifest = {"name": "manifest", "train": "a.csv"}
    values = {"data": {"source": manifest, "batch_size": 4}, "train": {"epochs": 1}}
    assert Recipe.model_validate(values).hash == "81d8aa4f02a8"
    for more in ({"separator": ";"}, {"class_columns": "auto"}):
        values["data"]["source"] = {**manifest, **more}
        assert Recipe.model_validate(values).hash != "81d8aa4f02a8"


def test_the_name_of_a_variant_is_written_first(resolve):
    values = resolve("data.augment=[{p: 0.25, name: flip}]").recipe.to_dict()
    variants = [values["optim"], values["schedule"], values["data"]["source"], values["data"]["augment"][0]]
    assert [next(iter(variant)) for variant in variants] == ["name"] * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.precision=bf16_master", "parallel.strategy=fsdp"], "(set train.precision=bf16)"),
        (
            ["train.precision=fp16_master", "optim.name=schedule_free", "schedule.name=constant"],
            "(set train.precision=fp16)",
        ),
        (["optim.name=schedule_free"], "(set schedule.name=constant)"),
        (["train.precision=fp16_pure", "optim.name=adamw"], "(set train.precision=fp16_master)"),
        (["train.precision=bf16", "parallel.strategy=dataparallel"], "(set train.precision=fp32, or strategy=ddp)"),
        (["train.precision=fp16_pure", "parallel.compression=powersgd"], "(set train.precision=bf16_pure)"),
        (["train.compile=max-autotune", "train.accumulate=2"], "(set train.compile=max-autotune-no-cudagraphs)"),
        (["optim.name=lars", "optim.momentum=0", "optim.nesterov=true"], "(set momentum=0.9)"),
        (["optim.name=novograd", "optim.betas=[0, 0.9]", "optim.grad_averaging=true"], "(set betas=[0.95, 0.98])"),
        (["train.precision=bf16_pure", "parallel.compression=bf16"], "(set compression=off)"),
        (["parallel.static_graph=true", "train.accumulate=2"], "(set train.accumulate=1, or static_graph=false)"),
        (["parallel.strategy=fsdp", "model.memory_format=channels_last"], "(set model.memory_format=auto)"),
        (["parallel.strategy=dataparallel", "model.norm=sync_batch"], "(set parallel.strategy=ddp)"),
        (["parallel.strategy=dataparallel", "train.compile=true"], "(set train.compile=off)"),
        (["parallel.strategy=fsdp", "parallel.bucket_mb=5"], "(set strategy=ddp)"),
        (["parallel.powersgd_rank=2"], "(set compression=powersgd)"),
        (["model.zero_init_residual=true", "model.norm=none"], "(leave it)"),
        (["schedule.warmup=0st", "schedule.warmup_shape=constant"], "(set warmup=5ep)"),
        (["schedule.warmup=0st", "schedule.warmup_by=epoch"], "has no effect without warm-up (set warmup=5ep)"),
        (["schedule.warmup=2.5ep", "schedule.warmup_by=epoch"], "whole epochs, and warmup is 2.5ep (set warmup=5ep)"),
        (["schedule.warmup=20st", "schedule.warmup_by=epoch"], "whole epochs, and warmup is 20st (set warmup=5ep)"),
        (
            ["schedule.warmup_by=epoch", "schedule.warmup_shape=constant", "schedule.warmup_start=0.1"],
            "has no effect with warmup_shape constant (set warmup_by=step)",
        ),
        (["train.eval_every=off", "train.eval_train=on"], "(set eval_every=1ep)"),
        (["measure.nvtx=ops", "measure.trace=5"], "(set nvtx=on, or trace=off)"),
        (["optim.layer_decay=1.5"], "optim.layer_decay: 1.5 should be less than or equal to 1, or 'off'"),
        (["train.class_weights=even"], "is not a class weighting (write balanced, off or {CLASS: WEIGHT})"),
        (["train.class_weights={}"], "{} names no class (write balanced, off or {CLASS: WEIGHT})"),
        (
            ["train.class_weights={a: 0}"],
            "train.class_weights: the weight of 'a', 0, is not a number greater than 0 (give one)",
        ),
        (["train.class_weights={a: true}"], "the weight of 'a', True, is not a number greater than 0 (give one)"),
        (["data.augment=[mixup, flip]"], "only mixup or cutmix may follow it"),
        (
            ["data.augment=[{name: mixup, until: 0ep}]"],
            "data.augment[0].until: 0ep mixes no image (set until=off for the whole run, or leave the section out)",
        ),
        (
            ["data.sampler=repeated", "data.order=stored"],
            "order stored has no effect with sampler repeated (set order=random)",
        ),
        (["train.clip_agc=0.01", "train.clip_norm=1"], "clip_agc 0.01 and clip_norm 1 both clip (set one to off)"),
        (
            ["train.clip_agc=0.01", "parallel.strategy=fsdp"],
            "train.clip_agc: 0.01 needs whole weights, which fsdp shards (set parallel.strategy=ddp)",
        ),
        (["data.sampler={name: repeated, repeats: 1}"], "data.sampler.repeats: 1 should be greater than or equal to 2"),
        (["data.sampler=weighted"], "weighted needs weights from one place (set either classes or column)"),
        (["data.sampler={name: weighted, classes: {a: 1}, column: b}"], "(set either classes or column)"),
        (["data.sampler={name: weighted, classes: {}}"], "classes names no class (write {CLASS: WEIGHT})"),
        (["data.sampler={name: weighted, classes: {a: -1}}"], "should be greater than or equal to 0"),
        (
            ["data.sampler={name: weighted, classes: {a: 1}, file: b}"],
            "no effect without column (set column, or file=off)",
        ),
        (["data.sampler={name: weighted, column: b, replacement: false}"], "(set num_samples)"),
        (["data.sampler=subset"], "subset needs a size (set either fraction or num_images)"),
        (["data.sampler={name: subset, fraction: 0}"], "data.sampler.fraction: 0 should be greater than 0, or 'off'"),
        (["data.augment=[mixup, cutmix, mixup]"], "data.augment: mixup is named twice (name it once)"),
        (["data.augment=[cutmix, cutmix]"], "data.augment: cutmix is named twice (name it once)"),
        (
            ["data.augment=[{name: color_jitter, brightness: 0, contrast: 0, saturation: 0}]"],
            "color_jitter has no effect with all strengths 0 (set one, or leave it out)",
        ),
        (
            ["data.augment=[{name: random_erasing, scale: [0.1, 1.5]}]"],
            "data.augment[0].scale[1]: 1.5 should be less than or equal to 1",
        ),
        (["data.augment=[{name: random_erasing, scale: [1, 1]}]"], "fits (lower scale[0], or set ratio)"),
        (["data.augment=[{name: random_erasing, scale: [0.5, 1], ratio: [2, 3]}]"], "(lower scale[0], or set ratio)"),
        (["data.augment=[{name: random_erasing, scale: [0.5, 1], ratio: [0.3, 0.5]}]"], "or set ratio)"),
        (
            ["data.augment=[{name: random_resized_crop, scale: [0.1, 1.5]}]"],
            "data.augment[0].scale[1]: 1.5 should be less than or equal to 1",
        ),
        (["data.progressive.start_size=32", "data.image_size=32"], "(lower it)"),
    ],
)
def test_choices_that_do_not_go_together_are_refused_with_what_to_set(words, message):
    with pytest.raises(RecipeError) as caught:
        load("digits", Patch.parse(words))
    assert str(caught.value).endswith(message)


def test_on_and_true_stand_for_a_sections_defaults():
    for word in ("on", "true"):
        assert load("digits", Patch.parse([f"train.ema={word}"])).recipe.train.ema == Ema()
    assert load("digits", Patch.parse(["train.ema=false"])).recipe.train.ema == "off"
    assert load("digits", Patch.parse(["train.compile=true"])).recipe.train.compile == "default"
    assert load("digits", Patch.parse(["train.compile=false"])).recipe.train.compile == "off"

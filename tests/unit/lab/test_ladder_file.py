"""Ladder files are read and written, and errors name the file and the line."""

from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.ladder import stack_patch
from paceline.lab.ladder_file import dump_ladder, list_ladders, load_ladder
from paceline.lab.patches import merge_patches
from paceline.lab.trial import apply_patch
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import resolve_batch

FULL = """# Two rungs on digits.
recipe: digits
steps: 7
warmup_steps: 3
repeats: 2
rungs:
  - name: base
  - name: bf16
    explains: half the bits
    set: {train.precision: bf16}
    expects: [forward, backward]
    on: cpu
    ranks: 2
    batch_factor: 3
    keep: always
    data: pack
    cache: cold
    parity: free
"""


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a ladder file and returns its name."""

    def write(text: str, name: str = "own.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_file_gives_all_its_settings(written):
    ladder = load_ladder(written(FULL))
    assert (ladder.name, ladder.summary, ladder.recipe) == ("own", "Two rungs on digits.", "digits")
    assert (ladder.steps, ladder.warmup_steps, ladder.repeats, ladder.is_open_ended) == (7, 3, 2, False)
    base, bf16 = ladder.rungs
    assert (base.patch, base.keep, base.data, base.cache, base.parity) == (Patch(), "if-faster", "none", "warm", "same")
    assert bf16.patch == Patch((("train.precision", "bf16"),))
    assert (bf16.expects, bf16.on, bf16.ranks, bf16.batch_factor) == (("forward", "backward"), "cpu", 2, 3)
    assert (bf16.keep, bf16.data, bf16.cache, bf16.parity) == ("always", "pack", "cold", "free")


@pytest.mark.parametrize("name", [*list_ladders(), "full"])
def test_what_is_written_of_a_ladder_is_read_as_the_same(written, name: str):
    odd = FULL.replace("set: {", "set: {train.eval_every: 'off', model.args: {a: null, b: [1e-05, '1e5']}, ")
    ladder = load_ladder(written(odd, "full.yaml") if name == "full" else name)
    assert load_ladder(written(dump_ladder(ladder), f"{name}.yaml")) == ladder


def test_unset_fields_are_left_to_the_recipe_and_to_defaults(written):
    ladder = load_ladder(written("recipe: digits\nrungs: [{name: base}]\n"))
    assert (ladder.summary, ladder.warmup_steps, ladder.steps, ladder.repeats) == ("", None, 50, 3)


def test_a_recipe_file_is_looked_for_beside_the_ladder(written, tmp_path):
    ladder = load_ladder(written("recipe: mine.yaml\nrungs: [{name: base}]\n"))
    assert ladder.recipe == str(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: d\nrungs:\n  - name: a\n  - name: b\n    explain: x\n", ":5: rungs[1].explain: no such field (did"),
        (
            "recipe: d\nrungs:\n  - name: a\n    expects: [foward]\n",
            ":4: rungs[0].expects[0]: 'foward' is not a stage (did",
        ),
        ("recipe: d\nrungs:\n  - name: a\n    on: gpu\n", ":4: rungs[0].on: 'gpu' should be 'any', 'cuda', 'cpu' or"),
        ("recipe: d\nrungs:\n\n  - explains: a\n", ":4: rungs[0].name: is needed (set rungs[0].name="),
        ("recipe: d\nrungs: []\n", ":2: rungs: [] should have at least 1 value"),
        ("rungs: [{name: a}]\n", ":1: recipe: is needed (set recipe="),
        ("recipe: d\nrungs: [{name: a}, {name: a}]\n", ":1: rungs: two are called 'a' (rename one)"),
        ("recipe: d\nstep: 3\nrungs: [{name: a}]\n", ":2: step: no such field (did you mean 'steps'?)"),
        ("recipe: d\nsteps: 0\nrungs: [{name: a}]\n", ":2: steps: 0 should be greater than 0"),
        (
            "recipe: d\nrungs:\n  - name: a\n  - name: b\n    set: {optim.lr: 0.4}\n",
            ":4: rungs[1]: set: optim.lr trains differently from the rung below (leave it out, or add `parity: free`)",
        ),
        (
            "recipe: d\nrungs:\n  - name: a\n    set: {schedule: {name: cosine}}\n",
            ":3: rungs[0]: set: schedule.name trains differently",
        ),
        ("recipe: d\nrungs: [3]\n", ":2: rungs[0]: 3 is a value where a section is needed"),
        ("recipe: d\nrungs: 3\n", ":2: rungs: 3 should be a list"),
    ],
)
def test_what_does_not_fit_is_reported_in_one_line_with_the_file_and_the_line(written, text, message):
    name = written(text)
    with pytest.raises(RecipeError) as raised:
        load_ladder(name)
    assert str(raised.value).startswith(f"{name}{message}")
    assert "\n" not in str(raised.value)


def test_a_name_that_is_no_ladder_is_reported_with_the_closest(tmp_path):
    with pytest.raises(RecipeError, match=r"'cup': is not a ladder \(did you mean 'cpu'\?\): use one of auto, "):
        load_ladder("cup")
    with pytest.raises(RecipeError, match=r"none.yaml: no such ladder file \(see `paceline ladder --list`\)"):
        load_ladder(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("name", list_ladders())
def test_a_shipped_ladder_has_a_summary_and_rungs_that_explain_themselves(name):
    ladder = load_ladder(name)
    assert 20 < len(ladder.summary) < 120
    assert ladder.summary.endswith(".")
    assert all(rung.explains for rung in ladder.rungs)


@pytest.mark.parametrize("name", ["auto", "cpu", "ddp-post", "sc20"])
def test_each_rung_of_a_shipped_ladder_fits_its_recipe_and_those_below(name):
    ladder = load_ladder(name)
    recipe = load(ladder.recipe).recipe
    patch, seen = Patch(), set()
    for rung in ladder.rungs:
        if rung.on != "any":  # it is dropped where it is not faster, and what stands on it must fit without it
            assert apply_patch(recipe, stack_patch(recipe, patch, rung, None)[0]) != apply_patch(recipe, patch)
            continue
        patch, _ = stack_patch(recipe, patch, rung, None)
        seen.add(apply_patch(recipe, patch).hash)
    assert len(seen) == sum(rung.on == "any" for rung in ladder.rungs)


@pytest.mark.parametrize(
    ("name", "words", "batches"),
    [
        ("ddp-post", (), {"single": 256, "DataParallel": 1024, "DDP 2": 512, "DDP 4": 1024, "AMP": 1024}),
        ("ddp-post", ("data.rank_batch_size=16",), {"single": 16, "DDP 2": 32, "DDP 4": 64}),
        ("quant", ("data.source.root=photos", "data.batch_size=8"), {"16 bits": 8, "batch 512": 16, "DDP on 4": 16}),
    ],
)
def test_batches_of_rungs_are_multiples_of_the_one_that_is_requested(name, words, batches):
    ladder = load_ladder(name)
    recipe = load(ladder.recipe, Patch.parse(list(words))).recipe
    patch, found = Patch(), {}
    for rung in ladder.rungs:
        patch, added = stack_patch(recipe, patch, rung, None)
        found[rung.name] = resolve_batch(apply_patch(recipe, patch), 1).data.global_batch_size
        assert ("data.batch_size" in dict(added.assignments)) == (rung.batch_factor is not None)
    assert {rung: found[rung] for rung in batches} == batches


def test_the_ladders_of_the_tutorials_and_of_a_cpu_are_shipped():
    assert {"auto", "cpu", "data", "ddp-post", "quant", "sc20"} <= set(list_ladders())


def test_fields_of_a_variant_go_when_another_is_chosen():
    recipe = load("digits").recipe
    below = Patch((("optim.name", "adam"), ("optim.betas", [0.8, 0.9]), ("seed", 3)))
    laid = merge_patches(recipe, below, Patch((("optim.name", "sgd"), ("optim.lr", 0.2))))
    assert laid == Patch((("seed", 3), ("optim.name", "sgd"), ("optim.lr", 0.2)))
    assert apply_patch(recipe, laid).optim.name == "sgd"


def test_fields_of_a_variant_stay_where_the_same_one_is_named_again():
    recipe = load("digits").recipe
    below = Patch((("optim.name", "adam"), ("optim.lr", 0.3)))
    laid = merge_patches(recipe, below, Patch((("optim.name", "adam"),)))
    assert apply_patch(recipe, laid).optim.lr == 0.3


def test_the_last_setting_holds():
    recipe = load("digits").recipe
    laid = merge_patches(recipe, Patch((("seed", 3), ("optim.lr", 0.3))), Patch((("seed", 4),)))
    assert laid == Patch((("optim.lr", 0.3), ("seed", 4)))


def test_a_tilde_in_the_name_of_a_file_is_home(monkeypatch, tmp_path):
    (tmp_path / "own.yaml").write_text("recipe: digits\nrungs: [{name: a}]\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_ladder("~/own.yaml").name == Path("own.yaml").stem


def test_a_mapping_is_the_settings_in_it(written):
    text = "recipe: d\nrungs:\n  - name: a\n    set: {optim: {name: adam, lr: 0.1}, seed: 3}\n    parity: free\n"
    assert load_ladder(written(text)).rungs[0].patch == Patch((("optim.name", "adam"), ("optim.lr", 0.1), ("seed", 3)))


def test_another_variant_in_a_mapping_replaces_the_one_below():
    recipe = load("digits").recipe
    below = Patch((("optim.name", "adam"), ("optim.betas", [0.8, 0.9])))
    laid = merge_patches(recipe, below, Patch((("optim", {"name": "sgd", "momentum": 0.8}),)))
    assert laid == Patch((("optim.name", "sgd"), ("optim.momentum", 0.8)))
    assert apply_patch(recipe, laid).optim.name == "sgd"

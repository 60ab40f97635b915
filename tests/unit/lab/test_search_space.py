"""Candidates fit the recipe and the machine, and those for the bottleneck come first."""

import pytest

from paceline.lab.ladder_file import Rung
from paceline.lab.search_space import (
    Hardware,
    build_batch_candidate,
    build_named_candidate,
    find_next_candidate,
    list_candidates,
    parse_ceiling,
)
from paceline.lab.trial import apply_patch, format_patch
from paceline.measure.bottleneck import RunSettings, advise_faster_data
from paceline.recipe.load import Patch, load, preset_names
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe

DIGITS = load("digits").recipe
CPU = Hardware("cpu", 1, 4)
GPU = Hardware("cuda", 1, 16)
PLACES = (CPU, GPU, Hardware("cuda", 4, 8), Hardware("cpu", 2, 1))
BOTTLENECKS = ("input-bound", "copy-bound", "compute-bound", "launch-bound", "communication-bound", "straggler-bound")


def verdict_of(bottleneck: str, to_try: str = "", ceiling: str = "") -> dict[str, str]:
    return {"bottleneck": bottleneck, "evidence": "", "ceiling": ceiling, "try": to_try}


def names(recipe: Recipe, place: Hardware, verdict: dict[str, str], *, allow_batch: bool = False) -> list[str]:
    return [move.name for move in list_candidates(recipe, place, verdict, allow_batch=allow_batch)]


def presets() -> list[Recipe]:
    """Return all shipped recipes; those of files get a root."""
    found = []
    for name in preset_names():
        try:
            found.append(load(name).recipe)
        except ValueError:
            found.append(load(name, Patch.parse(["data.source.root=/data"])).recipe)
    return found


@pytest.mark.parametrize("num_places", [1, pytest.param(len(PLACES), marks=pytest.mark.long)])
def test_every_move_over_every_shipped_recipe_fits_it_and_changes_it(num_places: int) -> None:
    """On all places, or each recipe on the place after that of the last one."""
    num_moves = 0
    for number, preset in enumerate(presets()):
        for place in [*PLACES, *PLACES][number % len(PLACES) :][:num_places]:
            recipe = resolve_batch(preset, place.ranks)
            found = list_candidates(recipe, place, verdict_of("input-bound", "data.workers=3"), allow_batch=True)
            assert len({move.name for move in found}) == len(found)
            assert len({tuple(format_patch(move.patch)) for move in found}) == len(found)
            for move in found:
                assert apply_patch(recipe, move.patch) != recipe
                assert Patch.parse(format_patch(move.patch)) == move.patch
                num_moves += 1
    assert num_moves > 300 * num_places


def test_every_move_can_be_a_rung_of_a_ladder() -> None:
    checked = 0
    for place in PLACES:
        for move in list_candidates(DIGITS, place, verdict_of("input-bound", "data.workers=3"), allow_batch=True):
            rung = Rung(name=move.name, explains=move.explains, set=dict(move.patch.assignments), expects=move.expects)
            checked += rung.patch == move.patch
    assert checked > 20


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
def test_what_cures_the_bottleneck_comes_before_all_others(bottleneck: str) -> None:
    place = Hardware("cuda", 4, 8)
    cures = [
        bottleneck in move.cures for move in list_candidates(DIGITS, place, verdict_of(bottleneck), allow_batch=True)
    ]
    assert any(cures)
    assert cures == sorted(cures, reverse=True)


def test_what_the_verdict_advises_comes_first_and_is_not_proposed_twice() -> None:
    advised = names(DIGITS, GPU, verdict_of("input-bound", "data.workers=9"))
    assert advised[0] == "workers-9"
    known = names(DIGITS, GPU, verdict_of("input-bound", "data.workers=8"))
    assert known[0] == "workers-8"
    assert sorted(known) == sorted(names(DIGITS, GPU, verdict_of("input-bound")))


@pytest.mark.parametrize("to_try", ["train.eval_every=4ep", "checkpoint.every=4ep", "measure.warmup_steps=0"])
def test_advice_about_what_is_no_step_is_no_move(to_try: str) -> None:
    verdict = verdict_of("evaluation-bound", to_try)
    assert names(DIGITS, CPU, verdict) == names(DIGITS, CPU, verdict_of("evaluation-bound"))


def test_advice_in_a_sentence_is_no_move() -> None:
    to_try = advise_faster_data(8.0, 10.0, RunSettings(workers=1, cores=2, has_files=True))
    assert to_try.startswith("packing the images")
    assert names(DIGITS, CPU, verdict_of("input-bound", to_try)) == names(DIGITS, CPU, verdict_of("input-bound"))
    assert names(DIGITS, CPU, verdict_of("input-bound", "it isn't")) == names(DIGITS, CPU, verdict_of("input-bound"))


@pytest.mark.parametrize(("loader", "auto"), [("auto", 0), ("processes", 3), ("threads", 3)])
def test_as_many_workers_as_there_are_is_no_move(loader: str, auto: int) -> None:
    recipe = apply_patch(DIGITS, Patch((("data.loader", loader),)))
    workers = {name for name in names(recipe, CPU, verdict_of("input-bound")) if name.startswith("workers-")}
    assert workers and f"workers-{auto}" not in workers


def test_a_move_needs_the_machine_that_it_is_for() -> None:
    on_cpu, on_gpu = names(DIGITS, CPU, verdict_of("compute-bound")), names(DIGITS, GPU, verdict_of("compute-bound"))
    assert {"precision-bf16", "threads-2"} <= set(on_cpu)
    assert {"precision-amp", "compile-reduce-overhead", "augment-on-device"} <= set(on_gpu)
    assert not {*on_cpu} & {"precision-amp", "compile-reduce-overhead", "augment-on-device", "compression-bf16"}
    assert not {*on_gpu} & {"precision-bf16", "threads-2", "compression-bf16"}
    assert "compression-bf16" in names(DIGITS, Hardware("cuda", 2, 8), verdict_of("communication-bound"))


def test_another_batch_is_proposed_only_where_it_is_allowed() -> None:
    assert not [name for name in names(DIGITS, GPU, verdict_of("compute-bound")) if name.startswith("batch-")]
    assert "batch-256" in names(DIGITS, GPU, verdict_of("compute-bound"), allow_batch=True)


@pytest.mark.parametrize(("words", "lr"), [([], 0.2), (["optim.name=adamw"], 1e-3 * 2**0.5)])
def test_the_learning_rate_follows_a_larger_batch(words: list[str], lr: float) -> None:
    from paceline.recipe.plan import lr_factor

    recipe = load("digits", Patch.parse(words)).recipe
    move = build_batch_candidate(recipe, 256)
    larger = apply_patch(recipe, move.patch)
    assert move.parity == "free"
    assert larger.data.batch_size == 256
    peak_lr = larger.optim.lr * lr_factor(larger.optim, larger.data.global_batch_size)
    assert peak_lr == pytest.approx(lr if words else recipe.optim.lr * 2, rel=1e-6)


def test_a_rule_that_the_recipe_has_for_its_learning_rate_stands() -> None:
    said = Patch.parse(["optim.lr_scaling=sqrt", "optim.base_batch_size=64"])
    assert format_patch(build_batch_candidate(load("digits", said).recipe, 256).patch) == ["data.batch_size=256"]


def test_the_next_move_cures_the_bottleneck_and_was_not_tried() -> None:
    moves = list_candidates(DIGITS, CPU, verdict_of("compute-bound"))
    first = find_next_candidate(moves, "compute-bound", ())
    assert first is not None and first.name == "precision-bf16"
    second = find_next_candidate(moves, "compute-bound", ("precision-bf16",))
    assert second is not None and second.name == "compile-default"
    cures = [move.name for move in moves if "compute-bound" in move.cures]
    assert find_next_candidate(moves, "compute-bound", cures) is None
    assert find_next_candidate(moves, "evaluation-bound", ()) is None


def test_a_ceiling_is_read_from_the_verdict() -> None:
    assert parse_ceiling(verdict_of("input-bound", ceiling="at most 1.04x without waiting, all else unchanged")) == 1.04
    assert parse_ceiling(verdict_of("compute-bound")) is None


def test_a_value_that_the_recipe_has_is_no_move() -> None:
    assert build_named_candidate(DIGITS, "train.precision", "fp32") is None
    move = build_named_candidate(DIGITS, "train.precision", "bf16")
    assert move is not None and move.name == "train.precision=bf16"


def test_a_value_below_a_section_that_is_off_is_a_move() -> None:
    assert DIGITS.train.ema == "off"
    move = build_named_candidate(DIGITS, "train.ema.decay", 0.9)
    assert move is not None and format_patch(move.patch) == ["train.ema.decay=0.9"]

"""`paceline quote` prints a table, or JSON alone, and refuses what cannot be."""

import json
from pathlib import Path

import pytest

from paceline.cli.args import split_recipe_args
from paceline.cli.options import QuoteOptions
from paceline.cli.quote import quote
from paceline.core.errors import DataError, RecipeError
from paceline.core.quote_result import QuoteResult
from paceline.lab.quote.memory import MemoryCounter
from paceline.recipe.load import load

ARGS = ["synthetic", "model.name=speednet95", "train.epochs=2", "data.batch_size=auto", "train.precision=amp"]
ON_RANKS = [*ARGS, "data.rank_batch_size=64"]


def options(**changes) -> QuoteOptions:
    return QuoteOptions(**{"args": ON_RANKS, "images": 50_000, "classes": 10, "image_size": 32, **changes})


@pytest.fixture
def without_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the largest micro-batch out, which takes seconds of tests that are about something else."""
    monkeypatch.setattr(MemoryCounter, "find_largest_micro_batch", lambda *_: 64)


def read_quotes(capsys: pytest.CaptureFixture[str], **changes) -> list[dict]:
    assert quote(options(as_json=True, **changes)) == 0
    return json.loads(capsys.readouterr().out)["quotes"]


@pytest.mark.usefixtures("without_search")
def test_each_gpu_is_quoted_for_each_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    quotes = read_quotes(capsys, gpu="t4,h100", ranks="1,8")

    assert [(each["gpu"], each["ranks"], each["rank_batch"]) for each in quotes] == [
        ("t4", 1, 64), ("t4", 8, 64), ("h100", 1, 64), ("h100", 8, 64)
    ]  # fmt: skip
    for each in quotes:
        speed = each["images_per_s"]
        assert speed["low"] < speed["value"] < speed["high"]
        assert each["fits"]
    slow, slow_8, fast, fast_8 = (each["images_per_s"]["value"] for each in quotes)
    assert slow < fast and 1 < slow_8 / slow < 8 and 1 < fast_8 / fast < 8


@pytest.mark.usefixtures("without_search")
def test_the_table_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert quote(options(gpu="a100", ranks="1")) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "a100" in out and "images/s" in out
    assert "start-up and stragglers are left out" in out


def test_a_batch_that_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    large = [*ARGS, "model.width=1", "data.rank_batch_size=16384"]
    small_memory, large_memory = read_quotes(capsys, args=large, gpu="t4,h200", ranks="1")
    assert not small_memory["fits"] and large_memory["fits"]
    assert small_memory["largest_micro_batch"] < 16384 <= large_memory["largest_micro_batch"]
    assert small_memory["memory_bytes"] == sum(small_memory["memory_parts"].values()) == large_memory["memory_bytes"]


@pytest.mark.usefixtures("without_search")
@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"gpu": "h1000"}, "--gpu: 'h1000'"),
        ({"ranks": "0"}, "--ranks: '0'"),
        ({"args": [*ON_RANKS, "train.precision=fp64"]}, "train.precision: fp64"),
        ({"args": [*ON_RANKS, "train.precision=bf16"], "gpu": "v100"}, "train.precision: bf16"),
        ({"network": "nothing"}, "--network: 'nothing'"),
        ({"ranks": "8,64"}, "--ranks: 64 ranks need several nodes of 8"),
        ({"images": None}, "--classes: 10 has no effect without --images"),
        (
            {"args": ["imagenet-resnet50-16ep"], "images": None, "classes": None, "image_size": None},
            "or state --images",
        ),
        ({"gpu": "missing.yaml"}, "--gpu: missing.yaml: is not a file"),
        ({"prices": Path("missing.yaml")}, "--prices: missing.yaml: is not a file"),
        ({"args": [*ON_RANKS, "train.accumulate=auto"]}, "train.accumulate: auto"),
        ({"budget": 200.0}, "--budget: 200 needs prices"),
        ({"by": "5ep"}, "--by: '5ep' is not a wall-clock time"),
        ({"by": "soon"}, "--by: 'soon' is not a duration"),
        ({"mtbf": "0h"}, "--mtbf: '0h'"),
        ({"restart": "5min"}, "--restart: 5min has no effect"),
        ({"loader_rate": 0.0}, "--loader-rate: 0 is out of range"),
        ({"out": Path("page.pdf")}, "--out: page.pdf"),
    ],
)
def test_what_cannot_be_quoted_is_refused(changes: dict, place: str) -> None:
    with pytest.raises((RecipeError, DataError), match=place):
        quote(options(**changes))


@pytest.mark.usefixtures("without_search")
def test_a_network_between_nodes_keeps_the_gpus_own_link_within_them(capsys: pytest.CaptureFixture[str]) -> None:
    def speed(gpu: str, network: str | None, ranks: str = "8") -> float:
        (found,) = read_quotes(capsys, gpu=gpu, ranks=ranks, network=network)
        return found["images_per_s"]["value"]

    assert speed("4090", "ndr") == speed("4090", None) < speed("4090", "nvlink4")
    assert speed("A100", "10gbe", "16") < speed("a100", "ndr", "16")


@pytest.mark.usefixtures("without_search")
def test_notes_say_what_is_not_considered(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*ON_RANKS, "train.precision=tf32", "parallel.compression=bf16", "train.compile=true", "optim.name=muon"]
    assert quote(options(args=args, gpu="a100", ranks="1,2")) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "train.compile, parallel.compression" in out
    assert "memory is that without parallel.compression" in out
    assert "tf32 by few figures" in out
    assert "optim.name: muon" in out
    assert "train.distill" not in out


@pytest.mark.usefixtures("without_search")
def test_blocks_that_run_again_and_a_weight_average_take_time_and_a_graph_saves_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def speed(*args: str) -> float:
        words = [*ON_RANKS, "model.name=resnet18_cifar", *args]  # speednet95 has no blocks to checkpoint
        (found,) = read_quotes(capsys, args=words, gpu="a100", ranks="1")
        return found["images_per_s"]["value"]

    plain = speed("data.rank_batch_size=512")
    assert speed("data.rank_batch_size=512", "model.checkpoint_activations=true") < 0.85 * plain
    assert speed("data.rank_batch_size=512", "train.ema=on") < plain
    assert speed("data.rank_batch_size=8", "train.capture=on") > 1.5 * speed("data.rank_batch_size=8")


@pytest.mark.usefixtures("without_search")
def test_intervals_are_wider_in_a_format_that_was_not_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    def width(precision: str) -> float:
        args = [*ON_RANKS, f"train.precision={precision}", "data.rank_batch_size=1024"]
        (found,) = read_quotes(capsys, args=args, gpu="3090", ranks="1")
        return found["images_per_s"]["high"] / found["images_per_s"]["low"]

    assert width("tf32") > width("amp")


def test_a_price_that_is_missing_is_named(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("date: '2026-11-01'\nper_gpu_hour: {t4: 0.5}\n")
    with pytest.raises(RecipeError, match="per_gpu_hour has no h100"):
        quote(options(gpu="t4,h100", prices=prices))


@pytest.mark.usefixtures("without_search")
def test_plans_have_a_row_per_price_and_name_the_cheapest_in_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prices, page = tmp_path / "prices.yaml", tmp_path / "page.html"
    prices.write_text(
        "date: '2026-11-01'\nper_gpu_hour: {t4: 0.5, h100: 3}\n"
        "spot: {h100: {per_gpu_hour: 1, hours_between_interruptions: 10}}\n"
    )
    more = {"prices": prices, "by": "10h", "budget": 50.0, "mtbf": "500h", "loader_rate": 1000.0, "out": page}

    assert quote(options(as_json=True, gpu="t4,h100", ranks="1", **more)) == 0

    result = QuoteResult.model_validate_json(capsys.readouterr().out)
    assert [(each.gpu, each.pricing) for each in result.plans] == [
        ("t4", "on demand"), ("h100", "on demand"), ("h100", "spot")
    ]  # fmt: skip
    for each in result.plans:
        assert each.images_per_s.value <= 1000.0 and each.ends_in_time and each.is_within_budget
        assert each.hours.value == pytest.approx(sum(each.parts.values())) and each.parts["failures"] > 0
    on_demand, spot = result.plans[1:]
    assert on_demand.waits_for_data and on_demand.device == "NVIDIA H100 80GB HBM3"
    assert spot.parts["failures"] > on_demand.parts["failures"]
    assert result.chosen is not None and "cheapest" in result.answer
    assert result.recipe_hash == load(*split_recipe_args(ON_RANKS)).recipe.hash
    assert result.answer in page.read_text()


@pytest.mark.usefixtures("without_search")
def test_notes_name_what_may_end_the_run_earlier(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*ON_RANKS, "train.max_time=2s", "train.patience=2", "train.stop.top1=0.9"]
    assert quote(options(args=args, as_json=True, gpu="t4", ranks="1")) == 0
    result = QuoteResult.model_validate_json(capsys.readouterr().out)
    (plan,), notes = result.plans, " ".join(result.notes)
    assert 3600 * plan.hours.value == pytest.approx(2) and plan.is_cut_short
    assert "train.max_time: 2s" in notes and "1 x t4" in notes and "train.stop and train.patience" in notes


@pytest.mark.usefixtures("without_search")
def test_steps_take_the_time_of_their_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert quote(options(as_json=True, gpu="t4", ranks="8")) == 0
    (plan,) = QuoteResult.model_validate_json(capsys.readouterr().out).plans
    images = 2 * (50_000 // (64 * 8)) * 64 * 8
    assert plan.parts["steps"] * 3600 * plan.images_per_s.value == pytest.approx(images)

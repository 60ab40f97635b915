"""`paceline quote` prints a table, or JSON alone, and refuses what cannot be."""

import json
from pathlib import Path

import pytest

from paceline.cli.options import QuoteOptions
from paceline.cli.quote import quote
from paceline.core.errors import DataError, RecipeError

ARGS = ["synthetic", "model.name=speednet95", "train.epochs=2", "data.batch_size=auto", "train.precision=amp"]
ON_RANKS = [*ARGS, "data.rank_batch_size=64"]


def options(**changes) -> QuoteOptions:
    return QuoteOptions(**{"args": ON_RANKS, "images": 50_000, "classes": 10, "image_size": 32, **changes})


def read_quotes(capsys: pytest.CaptureFixture[str], **changes) -> list[dict]:
    assert quote(options(as_json=True, **changes)) == 0
    return json.loads(capsys.readouterr().out)["quotes"]


def test_each_gpu_is_quoted_for_each_number_of_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("date: '2026-11-01'\nper_gpu_hour: {t4: 0.5, h100: 3}\n")

    quotes = read_quotes(capsys, gpu="t4,h100", ranks="1,8", prices=prices)

    assert [(each["gpu"], each["ranks"], each["rank_batch"]) for each in quotes] == [
        ("t4", 1, 64), ("t4", 8, 64), ("h100", 1, 64), ("h100", 8, 64)
    ]  # fmt: skip
    for each in quotes:
        speed, hours = each["images_per_s"], each["hours"]
        assert speed["low"] < speed["value"] < speed["high"]
        assert hours["low"] < hours["value"] < hours["high"]
        steps = 2 * (50_000 // (64 * each["ranks"]))
        assert hours["value"] * 3600 * speed["value"] == pytest.approx(steps * 64 * each["ranks"])
        assert each["cost"]["value"] == pytest.approx(
            hours["value"] * each["ranks"] * {"t4": 0.5, "h100": 3}[each["gpu"]]
        )
        assert each["fits"]
    slow, slow_8, fast, fast_8 = (each["images_per_s"]["value"] for each in quotes)
    assert slow < fast and 1 < slow_8 / slow < 8 and 1 < fast_8 / fast < 8


def test_the_table_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert quote(options(gpu="a100", ranks="1")) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "a100" in out and "images/s" in out
    assert "no evaluation" in out


def test_a_batch_that_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    large = [*ARGS, "model.width=1", "data.rank_batch_size=16384"]
    (small_memory,) = read_quotes(capsys, args=large, gpu="t4", ranks="1")
    (large_memory,) = read_quotes(capsys, args=large, gpu="h200", ranks="1")
    assert not small_memory["fits"] and large_memory["fits"]
    assert small_memory["largest_micro_batch"] < 16384 <= large_memory["largest_micro_batch"]
    assert small_memory["memory_bytes"] == sum(small_memory["memory_parts"].values()) == large_memory["memory_bytes"]


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
    ],
)
def test_what_cannot_be_quoted_is_refused(changes: dict, place: str) -> None:
    with pytest.raises((RecipeError, DataError), match=place):
        quote(options(**changes))


def test_a_network_between_nodes_keeps_the_gpus_own_link_within_them(capsys: pytest.CaptureFixture[str]) -> None:
    def speed(gpu: str, network: str | None, ranks: str = "8") -> float:
        (found,) = read_quotes(capsys, gpu=gpu, ranks=ranks, network=network)
        return found["images_per_s"]["value"]

    assert speed("4090", "ndr") == speed("4090", None) < speed("4090", "nvlink4")
    assert speed("A100", "10gbe", "16") < speed("a100", "ndr", "16")


def test_notes_say_what_is_not_considered(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*ON_RANKS, "model.name=resnet18_cifar", "train.precision=tf32"]
    args += ["parallel.compression=bf16", "model.checkpoint_activations=true"]
    assert quote(options(args=args, gpu="a100", ranks="1,2")) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "model.checkpoint_activations, parallel.compression" in out
    assert "may not hold in tf32" in out
    assert "memory is that without parallel.compression" in out
    assert "train.ema" not in out


def test_intervals_are_wider_in_a_format_that_was_not_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    def width(precision: str) -> float:
        args = [*ON_RANKS, f"train.precision={precision}"]
        (found,) = read_quotes(capsys, args=args, gpu="3090", ranks="1")
        return found["images_per_s"]["high"] / found["images_per_s"]["low"]

    assert width("tf32") > width("amp")


def test_a_price_that_is_missing_is_named(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("date: '2026-11-01'\nper_gpu_hour: {t4: 0.5}\n")
    with pytest.raises(RecipeError, match="per_gpu_hour has no h100"):
        quote(options(gpu="t4,h100", prices=prices))

"""The few lines at the end of a run and of an evaluation: what they name, and how they fit a terminal."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.tables import print_outcome
from paceline.core.results import ClassCount, EnergyResult, EvalResult, Finding, GoodputResult, RunResult
from paceline.core.run_dir import RunDir
from paceline.report import render_terminal
from paceline.report.document import BarSegment, Brief, BriefRow
from paceline.report.overview import page_heading
from paceline.report.read_run import RunData
from paceline.report.render_terminal import print_brief
from paceline.report.run_brief import run_brief
from paceline.report.run_page import build_run_summary

COUNTS = (ClassCount("cat", 10, 7), ClassCount("dog", 20, 19), ClassCount("eel", 30, 30))
STAGE = {"host_s": 1.0, "device_s": 1.0, "share": 0.0}
ACCOUNT = {
    "wall_s": 20.0, "start_up_s": 6.6, "compile_s": 0.0, "warmup_s": 0.2, "stages_s": 12.0, "counted_steps": 40,
    "pauses": {"evaluate": 0.4}, "finish_s": 0.0, "residual_s": 0.8, "explained": 0.96,
}  # fmt: skip


def accuracy_of(top1: float, **more: float) -> EvalResult:
    return EvalResult(images=60, top1=top1, top5=1.0, loss=0.5, **more)


def result(**more: object) -> RunResult:
    stages = {"data_wait": (0.2, 0.01), "forward": (3.6, 0.3), "backward": (6.2, 0.52),
              "exposed_communication": (1.8, 0.15), "other": (0.2, 0.02)}  # fmt: skip
    values = {
        "status": "completed",
        "recipe_hash": "0123456789ab",
        "parameters": 701_178,
        "world_size": 2,
        "epochs": 16,
        "steps": 176,
        "images_seen": 22_528,
        "eval": accuracy_of(0.9944),
        "best": accuracy_of(0.9972),
        "best_step": 132,
        "best_epoch": 12.0,
        "throughput": {"images_per_s": 1593.4, "spread": (1377.2, 1861.9), "n": 17, "excluded_s": 1.0},
        "time": {"wall_s": 21.7, "startup_s": 6.6, "train_s": 14.0, "eval_s": 0.4, "checkpoint_s": 0.0,
                 "to_target_s": None},
        "stages": {name: {"host_s": host_s, "device_s": host_s, "share": share}
                   for name, (host_s, share) in stages.items()},
        "account": ACCOUNT,
        "verdict": {"bottleneck": "compute-bound", "evidence": "Computing took 10 s.", "try": ""},
        "lr": "0.1 at 128",
        "weights_sha256": "ab" * 32,
        "provenance": {},
    }  # fmt: skip
    return RunResult.model_validate({**values, **more})


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function from a result to the lines that a terminal of a width shows; 0 is a file."""
    run = RunData(
        tmp_path / "digits-1",
        recipe="model: {name: resnet18_cifar}\n",
        plan={"recipe_name": "digits", "total_steps": 180},
        classes=COUNTS,
    )

    def lines(
        outcome: RunResult, width: int = 100, encoding: str = "utf-8", prints: Callable[[Brief], None] = print_brief
    ) -> list[str]:
        data = replace(run, result=outcome)
        return draw(monkeypatch, run_brief(data, build_run_summary(data)), width, encoding, prints)

    return lines


def draw(
    monkeypatch: pytest.MonkeyPatch,
    brief: Brief,
    width: int,
    encoding: str = "utf-8",
    prints: Callable[[Brief], None] = print_brief,
) -> list[str]:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)  # strict: what it cannot encode is an error
    console = Console(
        file=out, width=width or None, force_terminal=width > 0, color_system=None, highlight=False, markup=False
    )
    monkeypatch.setattr(render_terminal, "_build_console", lambda: console)
    prints(brief)
    out.flush()
    return raw.getvalue().decode(encoding).splitlines()


def row(lines: list[str], label: str) -> str:
    return next(line for line in lines if line.startswith(f"  {label} ")).removeprefix(f"  {label}").strip()


def test_a_run_is_at_most_fourteen_lines_of_a_hundred_columns(shown, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "digits-1")
    (run.checkpoints / "step-00000132").mkdir(parents=True)
    run.report.write_text("page")
    found = tuple(
        Finding(name=f"f{number}", severity="error", evidence="word " * 60, advice="Fix it.") for number in range(4)
    )
    tried = {"bottleneck": "input-bound", "evidence": "It waits.", "try": "data.workers=6", "ceiling": "at most 1.6x"}
    lines = shown(result(health=found, verdict=tried, bad_images=2))
    assert len(lines) <= 14
    assert all(len(line) <= 100 or "paceline " in line or str(tmp_path) in line for line in lines)
    assert any("2 more findings" in line and "2 images left out" in line for line in lines)


def test_the_lines_name_what_was_trained_and_what_came_out(shown, tmp_path: Path) -> None:
    lines = shown(result(), width=0)
    assert lines[0] == "✓ trained digits · resnet18_cifar (0.70 M) · 16 epochs on 2 ranks in 21.7 s"
    assert lines[1].strip() == str(tmp_path / "digits-1")
    assert row(lines, "accuracy") == '99.44 %   best 99.72 % (epoch 12)   weakest class "cat" 70.00 % of 10'
    assert row(lines, "throughput") == "1,593 images/s   (1,377 to 1,862)"
    assert row(lines, "bottleneck") == (
        "compute-bound   computing 82 % of step time   waiting for data 1 %   communication 15 %"
    )


def test_energy_and_cost_are_one_short_item_if_they_are_known(shown) -> None:
    missing = {"cpu": "no RAPL"}
    used = EnergyResult(gpu_kwh=0.25, cpu_kwh=None, images_per_kwh=1e6, source="NVML", missing=missing)
    assert row(shown(result(energy=used), width=0), "energy") == "250 Wh"
    assert row(shown(result(energy=used, cost=1.5), width=0), "spent") == "250 Wh   cost 1.50"
    none = EnergyResult(gpu_kwh=None, cpu_kwh=None, images_per_kwh=None, source="", missing=missing)
    assert not any(line.strip().startswith(("energy", "spent")) for line in shown(result(energy=none), width=0))


def test_the_parts_of_the_wall_clock_add_up_to_its_bar(shown) -> None:
    bar, *parts = row(shown(result(), width=0), "time").split("   ")
    assert [part[2:] for part in parts] == [
        "start-up 33 %", "forward 18 %", "backward 31 %", "communication 9 %", "other 9 %",
    ]  # fmt: skip
    assert len(bar) == 24 and [bar.count(part[0]) for part in parts] == [8, 4, 8, 2, 2]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_without_the_characters_gets_ascii(shown, encoding: str) -> None:
    lines = shown(result(), encoding=encoding)
    assert lines[0].startswith("ok: trained digits - resnet18_cifar")
    assert all(line.isascii() for line in lines) and "# start-up 33 %" in row(lines, "time")


def test_the_c_locale_gets_ascii(shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_ALL", raising=False)
    for locale, is_ascii in (("C", True), ("POSIX", True), ("C.UTF-8", False), ("", False)):
        monkeypatch.setenv("LANG", locale)
        lines = shown(result(), prints=print_outcome)
        assert all(line.isascii() for line in lines) == is_ascii and len(lines) > 5


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_lines_are_broken_between_facts_and_commands_are_whole(shown, width: int, tmp_path: Path) -> None:
    lines = shown(result(), width)
    assert all(len(line) <= width or str(tmp_path) in line for line in lines)
    assert "computing 82 % of step time" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize(
    ("ended", "mark", "said"),
    [
        ({"status": "preempted", "steps": 85, "provenance": {"stopped_by": "SIGTERM"}}, "!",
         "digits: stopped (SIGTERM) at step 85 of 180"),
        ({"status": "failed"}, "✗", "digits: failed: "),
    ],
)  # fmt: skip
def test_a_run_that_did_not_end_well_says_how_to_resume(shown, ended, mark: str, said: str, tmp_path: Path) -> None:
    lines = shown(result(**ended), width=0)
    assert lines[0].startswith(f"{mark} {said}")
    assert row(lines, "next") == f"paceline train {tmp_path / 'digits-1'} --resume   resume"


def test_plugins_are_named_in_the_command_that_resumes(shown) -> None:
    lines = shown(result(status="preempted", provenance={"own_parts": {"model": "m:M"}}), width=0)
    assert "--resume --trust-code" in row(lines, "next")


def test_goodput_is_shown_of_restarted_runs_only(shown) -> None:
    names = [name for name in GoodputResult.model_fields if name.endswith("_s")]
    values = {**dict.fromkeys(names, 0.0), "wall_s": 750.0, "down_s": 61.0, "share": 0.919}
    one, three = ({**values, "starts": starts} for starts in (1, 3))
    assert not any(line.startswith("  goodput") for line in shown(result(goodput=one)))
    text = row(shown(result(goodput=three), width=0), "goodput")
    assert text == "91.9 % of 12 min 30 s over 3 starts   down 1 min 01 s"


def test_a_run_without_measurements_says_so(shown) -> None:
    nothing = {"images_per_s": 0.0, "spread": (0.0, 0.0), "n": 0, "excluded_s": 0.0}
    lines = shown(result(eval=None, best=None, throughput=nothing, account=None, stages={}, verdict={}), width=0)
    assert row(lines, "accuracy").startswith("not evaluated") and "train.eval_every=off" in row(lines, "accuracy")
    assert row(lines, "throughput").startswith("not measured")
    assert "steps 65 %" in row(lines, "time") and not any("bottleneck" in line for line in lines)


def test_time_lost_to_other_processes_replaces_the_shares_of_a_step(shown) -> None:
    cpu = {"rank": 0, "cores": 2, "ranks": 2, "threads": 1, "wall_s": 12.0, "run_s": 10.0, "waited_s": 3.0,
           "lost_s": 2.0, "share": 0.13, "own_share": 0.1, "throttled_share": 0.0, "others_cores": 0.3,
           "pressure": 0.5, "switches": 5}  # fmt: skip
    verdict = {"bottleneck": "cpu-starved", "evidence": "Others.", "try": ""}
    text = row(shown(result(cpu=cpu, verdict=verdict), width=0), "bottleneck")
    assert text == "cpu-starved   other processes held the cores 13 % of the time"


def test_what_does_not_print_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    brief = Brief(["a\x1b[31m"], "good", [BriefRow("time", [["b\x07 1 %"]], [BarSegment("b", 1.0, "1 %", "")])])
    text = "\n".join(draw(monkeypatch, brief, 80))
    assert "\x1b" not in text and "\x07" not in text and re.search(r"\\x1b\[31m", text)


def test_a_run_whose_time_was_up_is_continued_from_its_checkpoint_only(shown, tmp_path: Path) -> None:
    evaluations = {
        "monitor": "loss",
        "best": accuracy_of(0.9),
        "eval": accuracy_of(0.9).model_copy(update={"loss": 0.3}),
    }
    outcome = result(status="time_reached", is_monitor_minimized=True, **evaluations)
    checkpoints = RunDir(tmp_path / "digits-1").checkpoints
    (checkpoints / "step-00000132").mkdir(parents=True)
    text = "\n".join(shown(outcome, width=0))
    assert "loss 0.3000" in text and "best" not in text and "--resume" not in text
    (checkpoints / "step-00000176").mkdir()
    assert "--resume train.max_time=off" in "\n".join(shown(outcome, width=0))


def test_the_heading_of_the_page_has_the_accuracy_of_its_tile(tmp_path: Path) -> None:
    """The evaluation with the best loss has not the best accuracy."""
    outcome = result(monitor="loss", best=accuracy_of(0.9), eval=accuracy_of(0.95))
    run = RunData(tmp_path / "digits-1", plan={"recipe_name": "digits"}, classes=COUNTS, result=outcome)
    assert page_heading(run) == "digits: 95.00 % in 21.7 s"

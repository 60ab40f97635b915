"""What a person is shown at the end, and what a program is."""

import json
from pathlib import Path

import pytest

from paceline.cli.evaluate import show_evaluation
from paceline.cli.train import show_result
from paceline.core.results import (
    CheckpointResult,
    ClassCount,
    ClassTable,
    EvalReport,
    EvalResult,
    GoodputResult,
    RunResult,
    ThroughputResult,
    TimeResult,
)
from paceline.core.run_dir import RunDir

COUNTS = (ClassCount("cat", 10, 7), ClassCount("dog", 20, 19), ClassCount("eel", 30, 30), ClassCount("fox", 4, 2))
CHECKPOINT = Path("runs/digits-1/checkpoints/step-00000012")


def judged(top1: float, **more: float) -> EvalResult:
    return EvalResult(images=64, top1=top1, top5=1.0, loss=0.5, **more)


def result(**more: object) -> RunResult:
    values = {
        "status": "completed",
        "recipe_hash": "0123456789ab",
        "world_size": 2,
        "epochs": 1.5,
        "steps": 33,
        "images_seen": 2112,
        "eval": judged(0.90625),
        "best": judged(0.90625),
        "throughput": ThroughputResult(images_per_s=0.0, spread=(0.0, 0.0), n=0, excluded_s=0.0),
        "time": TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0.5, checkpoint_s=0.25, to_target_s=None),
        "stages": {},
        "verdict": {"bottleneck": "compute", "evidence": "forward 25 %", "try": ""},
        "lr": "0.1 (batch 128, no scaling), no warm-up",
        "weights_sha256": "ab" * 32,
        "provenance": {},
    }
    return RunResult.model_validate({**values, **more})


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function from a result to the rows a person sees, by name."""
    monkeypatch.setenv("COLUMNS", "200")

    def rows(shown: RunResult, counts: tuple[ClassCount, ...] = ()) -> dict[str, str]:
        if counts:
            RunDir(tmp_path).write_classes(ClassTable(counts))
        show_result(shown, RunDir(tmp_path), as_json=False, verbose=True)
        return read(capsys.readouterr().out)

    return rows


def read(text: str) -> dict[str, str]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert cells and all(len(row) == 2 for row in cells)
    return dict(cells)


def test_the_finding_about_speed_is_labelled_bottleneck(printed) -> None:
    rows = printed(result())
    assert rows["bottleneck"] == "compute. forward 25 %" and "verdict" not in rows


def test_a_plain_run_prints_no_optional_rows(printed) -> None:
    rows = printed(result())
    assert rows["top-1"] == "90.62 % (top-5 100.00 %, loss 0.5000, 64 images)"
    assert not {"averaged weights", "on training images", "worst classes", "skipped"} & set(rows)


def test_a_best_evaluation_before_the_last_has_a_row_with_how_its_weights_are_had(printed, tmp_path: Path) -> None:
    shown = result(best=judged(0.9375), best_step=1200, best_epoch=12.5)
    assert printed(shown)["best top-1"] == "93.75 % (at step 1,200, epoch 12.5, not kept)"
    (RunDir(tmp_path).checkpoints / "step-00001200").mkdir(parents=True)
    assert printed(shown)["best top-1"] == "93.75 % (at step 1,200, epoch 12.5, --checkpoint best)"


def test_the_best_evaluation_has_a_row_only_if_better_than_the_last(printed) -> None:
    assert "best top-1" not in printed(result(best_step=12, best_epoch=0.5))
    assert printed(result(best=judged(0.9375)))["best top-1"] == "93.75 %"  # of an unknown step


def test_the_best_of_averaged_weights_is_set_against_averaged_weights(printed) -> None:
    shown = {"best": judged(0.9375), "best_step": 12, "best_epoch": 0.5}
    assert list(printed(result(**shown, ema=judged(0.921875))))[:3] == [
        "top-1",
        "averaged weights",
        "best top-1",
    ]
    assert "best top-1" not in printed(result(**shown, ema=judged(0.9375)))


def test_averaged_weights_stand_below_the_raw_ones(printed) -> None:
    rows = printed(result(ema=judged(0.921875, ece=0.0123)))
    assert list(rows)[:2] == ["top-1", "averaged weights"]
    assert rows["averaged weights"] == "92.19 % (top-5 100.00 %, loss 0.5000, ECE 0.0123, 64 images)"


def test_the_class_mean_is_shown_if_it_differs(printed) -> None:
    assert "balanced accuracy" not in printed(result(eval=judged(0.5, mean_class_accuracy=0.500001)))["top-1"]
    assert "balanced accuracy 25.00 %" in printed(result(eval=judged(0.5, mean_class_accuracy=0.25)))["top-1"]


@pytest.mark.parametrize(("train", "gap"), [(0.96875, "+6.25"), (0.875, "-3.12")])
def test_the_gap_to_training_images_is_in_points(printed, train: float, gap: str) -> None:
    rows = printed(result(train_eval=judged(train), gap=train - 0.90625))
    assert rows["on training images"] == f"{100 * train:.2f} % (a gap of {gap} points, 64 images)"


def test_skipped_steps_are_shown_if_any(printed) -> None:
    assert printed(result(skipped_steps=2))["skipped"] == "2 steps, whose gradient was NaN, infinite or overflowed"


def test_the_three_worst_classes_are_named(printed) -> None:
    assert printed(result(), COUNTS)["worst classes"] == "fox: 50.00 % of 4, cat: 70.00 % of 10, dog: 95.00 % of 20"


@pytest.mark.parametrize("counts", [COUNTS[:2], (ClassCount("a", 4, 4),) * 3])
def test_two_classes_or_perfect_ones_are_not_worth_a_row(printed, counts: tuple[ClassCount, ...]) -> None:
    assert "worst classes" not in printed(result(), counts)


def test_a_result_as_json_is_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = result(ema=judged(0.5), skipped_steps=3)
    show_result(shown, RunDir(tmp_path), as_json=True)
    assert RunResult.model_validate_json(capsys.readouterr().out) == shown


def goodput(**more: float) -> GoodputResult:
    names = [name for name in GoodputResult.model_fields if name.endswith("_s")]
    values = {**dict.fromkeys(names, 0.0), "wall_s": 750.0, "useful_s": 728.25, "share": 0.971, "starts": 1}
    return GoodputResult.model_validate({**values, **more})


def test_a_result_of_before_goodput_was_measured_has_no_row_of_it(printed) -> None:
    assert not {"goodput", "checkpoints", "bad images", "to go on"} & set(printed(result()))


def test_goodput_names_the_losses_that_matter(printed) -> None:
    two = printed(result(goodput=goodput(starts=2, startup_s=4.125, data_wait_s=2.0, eval_s=1.0, rework_s=0.1)))
    lost = "start-up 4.12 s, data wait 2.00 s"  # a second is 0.13 %
    assert two["goodput"] == f"97.1 % of 12 min 30 s over 2 starts; {lost}"
    three = printed(result(goodput=goodput(startup_s=12.0, rework_s=90.0, down_s=61.0, other_s=3.0, starts=3)))
    lost = "start-up 12.0 s, repeated steps 1 min 30 s, down 1 min 01 s, other 3.00 s"
    assert three["goodput"] == f"97.1 % of 12 min 30 s over 3 starts; {lost}"
    assert "goodput" not in printed(result(goodput=goodput(share=1.0)))  # of one start, the wall clock says as much


def test_stages_and_residual_add_up_to_the_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """0.8 s of 40 steps, of which the stages have 0.76 s."""
    monkeypatch.setenv("COLUMNS", "200")
    seconds = {"data_wait": 0.16, "backward": 0.4, "exposed_communication": 0.2}
    stages = {name: {"host_s": each, "device_s": each, "share": each / 0.8} for name, each in seconds.items()}
    account = {"wall_s": 2.0, "start_up_s": 0.6, "compile_s": 0.0, "warmup_s": 0.2, "stages_s": 0.76,
               "counted_steps": 40, "pauses": {"epoch_boundary": 0.3}, "finish_s": 0.0, "residual_s": 0.14,
               "explained": 0.93}  # fmt: skip
    rates = ThroughputResult(images_per_s=100.0, spread=(90.0, 110.0), n=4, excluded_s=1.0)
    show_result(result(stages=stages, account=account, throughput=rates), RunDir(tmp_path), as_json=False, verbose=True)
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    first = lines.index("20 ms per step: the mean of 40 measured steps on rank 0")
    assert [line for line in lines[first:] if " % " in line] == [
        "backward 10 ms 50.0 % 400 ms",
        "exposed communication 5 ms 25.0 % 200 ms",
        "data wait 4 ms 20.0 % 160 ms",
        "not attributed 1.00 ms 5.0 % 40.0 ms",
    ]
    parts = (
        "start-up 600 ms, measurement warm-up 200 ms, steps 760 ms, starting the loader 300 ms, not attributed 140 ms"
    )
    assert f"wall clock 4.00 s ({parts})" in lines


SAVING = CheckpointResult(saved=12, failed=0, stall_s=0.03, write_s=0.5, bytes=307_000_000)


def test_checkpoints_have_times_and_failures(printed) -> None:
    line = "12 saved, 307 MB each: paused training for 30 ms, written in 500 ms (614 MB/s)"
    assert printed(result(checkpoints=SAVING))["checkpoints"] == line
    assert printed(result(checkpoints=SAVING.model_copy(update={"failed": 1})))["checkpoints"] == f"{line}; 1 failed"
    none = CheckpointResult(saved=0, failed=2, stall_s=0.0, write_s=0.0, bytes=0)
    assert printed(result(checkpoints=none))["checkpoints"] == "0 saved; 2 failed"
    assert "checkpoints" not in printed(result(checkpoints=none.model_copy(update={"failed": 0})))


def test_bad_images_are_counted_and_listed_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_result(result(bad_images=3), RunDir(tmp_path), as_json=False, verbose=True)
    assert "to look into: 3 images left out (bad_images.jsonl)" in capsys.readouterr().out


def test_the_title_names_the_signal_and_the_step(tmp_path: Path, capsys) -> None:
    rundir = RunDir(tmp_path)
    rundir.write_json("plan.json", {"total_steps": 180})
    stopped = result(status="preempted", steps=85, provenance={"stopped_by": "SIGTERM"})
    show_result(stopped, rundir, as_json=False, verbose=True)
    ended = "stopped (SIGTERM) at step 85 of 180"
    assert f"{tmp_path.name}: {ended}; resume with paceline train {tmp_path} --resume" in capsys.readouterr().out


REPORT = EvalReport(
    val=judged(0.5, ece=0.25, mean_class_accuracy=0.75),
    ema=judged(0.625),
    train=judged(0.75),
    classes=ClassTable(COUNTS),
)


def test_an_evaluation_as_json_has_the_raw_weights_at_the_top(capsys: pytest.CaptureFixture[str]) -> None:
    show_evaluation(REPORT, CHECKPOINT, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "images": 64, "top1": 0.5, "top5": 1.0, "loss": 0.5, "ece": 0.25, "mean_class_accuracy": 0.75,
        "ema": {"images": 64, "top1": 0.625, "top5": 1.0, "loss": 0.5},
        "train": {"images": 64, "top1": 0.75, "top5": 1.0, "loss": 0.5},
        "gap": 0.25,
    }  # fmt: skip


def test_an_evaluation_as_json_has_requested_classes(capsys: pytest.CaptureFixture[str]) -> None:
    show_evaluation(REPORT, CHECKPOINT, as_json=True, per_class=True)
    classes = json.loads(capsys.readouterr().out)["classes"]
    assert classes[0] == {"class": "cat", "images": 10, "correct": 7} and len(classes) == 4


def test_an_evaluation_of_raw_weights_alone_is_flat(capsys: pytest.CaptureFixture[str]) -> None:
    show_evaluation(EvalReport(val=judged(0.5)), CHECKPOINT, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"images": 64, "top1": 0.5, "top5": 1.0, "loss": 0.5}


def test_an_evaluation_names_its_checkpoint_and_lists_requested_classes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show_evaluation(REPORT, CHECKPOINT, as_json=False)
    brief = capsys.readouterr().out
    assert "digits-1, step-00000012" in brief and "averaged weights" in brief and '"fox" 50.00 % of 4' in brief
    assert "eel" not in brief
    empty = REPORT.model_copy(update={"classes": ClassTable((*COUNTS, ClassCount("gnu", 0, 0)))})
    show_evaluation(empty, CHECKPOINT, as_json=False, per_class=True)
    full = capsys.readouterr().out
    assert "eel" in full and "100.00 %" in full and "no images" in full

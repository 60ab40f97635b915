"""`core.run_dir`: paths of a run, refused folders, and reading back its files."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.results import ClassCount, ClassTable
from paceline.core.run_dir import RunDir, append_line, read_lines, write_atomic
from paceline.training.logging.base import drop_records_after

NOW = datetime(2026, 11, 21, 10, 15, 9)


def refusal(kind, function, **options) -> str:
    with pytest.raises(kind) as caught:
        function(**options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_an_atomic_write_leaves_the_text_and_nothing_else(tmp_path):
    write_atomic(tmp_path / "a.json", "é\n")
    write_atomic(tmp_path / "a.json", "newer\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"newer\n"


def test_a_write_that_fails_leaves_the_old_text(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.json"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_result_that_cannot_be_written_is_an_error_of_one_line(tmp_path, result):
    run, gone = RunDir(tmp_path), RunDir(tmp_path / "gone")
    (tmp_path / "result.json").mkdir()
    for write in (lambda run: run.write_result(result), lambda run: run.write_json("result.json", {})):
        assert refusal(PacelineError, lambda write=write: write(run)) == (
            f"{run.path}/result.json: cannot be written: Is a directory (fix that, and add --resume)"
        )
        assert refusal(PacelineError, lambda write=write: write(gone)) == (
            f"{gone.path}: was removed while the run was training: nothing of it is left to resume (start it again)"
        )


def test_a_default_name_is_the_recipe_and_the_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunDir.claim("digits", NOW).path == Path("runs/digits-20261121-101509")
    assert Path("runs/digits-20261121-101509").is_dir()


def test_a_default_name_that_is_taken_gets_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        rundir = RunDir.claim("digits", NOW)
        names.append(rundir.path.name)
    assert names == ["digits-20261121-101509", "digits-20261121-101509-2", "digits-20261121-101509-3"]


def test_a_claimed_folder_is_released_only_while_it_is_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused, begun = RunDir.claim("digits", NOW), RunDir.claim("digits", NOW)
    begun.create()
    for rundir in (refused, begun):
        rundir.release()
    assert not refused.path.exists() and begun.checkpoints.is_dir()


def test_every_file_of_a_run_has_its_designed_name(tmp_path):
    run = RunDir(tmp_path)
    paths = [run.recipe, run.checkpoints, run.steps, run.evals, run.metrics, run.tensorboard, run.samples(3)]
    assert [str(path.relative_to(tmp_path)) for path in [*paths, run.classes, run.confusion]] == [
        "recipe.yaml", "checkpoints", "steps.jsonl", "evals.jsonl", "metrics.csv", "tensorboard", "steps.rank3.jsonl",
        "classes.csv", "confusion.csv",
    ]  # fmt: skip


def test_optional_files_of_a_run_have_their_names_too(tmp_path):
    run = RunDir(tmp_path)
    paths = [run.attempts, run.warnings, run.bad_images, run.stacks(3)]
    names = ["attempts.jsonl", "warnings.jsonl", "bad_images.jsonl", "stacks.rank3.txt"]
    assert [str(path.relative_to(tmp_path)) for path in paths] == names


def test_the_newest_run_of_a_recipe_is_found_by_its_time_and_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunDir.newest_of("digits") is None
    stamps = ["20261121-101509", "20261121-101509-2", "20261121-101509-10", "20261120-235959"]
    for name in [*(f"digits-{stamp}" for stamp in stamps), "digits-big-20270101-000000", "digits-20270101"]:
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "recipe.yaml").touch()
    Path("runs/digits-20280101-000000").mkdir()  # claimed, and nothing written yet
    assert RunDir.newest_of("digits") == RunDir(Path("runs/digits-20261121-101509-10"))
    assert RunDir.newest_of("digits-big") == RunDir(Path("runs/digits-big-20270101-000000"))


def test_create_makes_the_folder_and_those_above_it_and_may_be_repeated(tmp_path):
    run = RunDir(tmp_path / "a" / "b")
    run.create()
    run.create()
    assert run.checkpoints.is_dir()


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path):
    run = RunDir(tmp_path)
    run.recipe.write_text("train: {epochs: 1}\n")
    assert refusal(RecipeError, run.refuse_another_run, resume=False) == (
        f"--run-dir: {tmp_path} already holds a run (add --resume, or name another)"
    )
    run.refuse_another_run(resume=True)


def test_a_folder_with_other_files_is_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunDir(tmp_path).create()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_below_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    run = RunDir(tmp_path / "file" / "run")
    assert refusal(RecipeError, run.create) == (f"--run-dir: {run.path} cannot be made: Not a directory (name another)")


def test_a_folder_in_an_unwritable_one_is_refused_in_one_line(tmp_path, monkeypatch):
    """The superuser may write anywhere, so the system's answer is put in its mouth."""

    def denied(path, mode=0o777, parents=False, exist_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", denied)
    run = RunDir(tmp_path / "run")
    assert refusal(RecipeError, run.create) == (
        f"--run-dir: {run.path} cannot be made: Permission denied (name another)"
    )


def test_a_name_too_long_for_the_system_is_refused_in_one_line(tmp_path):
    run = RunDir(tmp_path / ("x" * 300))
    assert refusal(RecipeError, run.refuse_another_run, resume=False) == (
        f"--run-dir: {run.path} cannot be read: File name too long (name another)"
    )


def test_json_is_written_indented_and_atomically(tmp_path):
    RunDir(tmp_path).write_json("plan.json", {"steps": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads((tmp_path / "plan.json").read_text()) == {"steps": 3}


def test_a_result_reads_back_equal(tmp_path, result):
    run = RunDir(tmp_path)
    run.write_result(result)
    assert run.read_result() == result


def test_classes_read_back_and_the_last_evaluation_wins(tmp_path):
    run = RunDir(tmp_path)
    for correct in (1, 2):
        run.write_classes(ClassTable((ClassCount("a\r\nb", 3, correct),), ((correct,),)))
    assert run.read_classes() == (ClassCount("a\r\nb", 3, 2),)
    assert run.confusion.read_bytes() == b"true\\predicted,'a\\r\\nb\r\n'a\\r\\nb,2\r\n"


def test_a_bad_image_is_listed_once_over_all_processes(tmp_path):
    run = RunDir(tmp_path)
    for reason in ("cut off", "met by another rank"):
        for index, path in enumerate(("b.jpg", "a.jpg")):
            run.add_bad_image({"split": "train", "index": index, "path": path, "reason": reason})
    run.bad_images.write_text(run.bad_images.read_text() + '{"spl')  # a kill
    run.add_bad_image({"split": "val", "index": 0, "path": "c.jpg", "reason": "empty"})
    rows = list(read_lines(run.bad_images))
    assert [row["path"] for row in rows] == ["b.jpg", "a.jpg", "c.jpg"]
    assert [row["reason"] for row in rows] == ["cut off", "cut off", "empty"]


def test_a_table_without_a_confusion_matrix_writes_none(tmp_path):
    RunDir(tmp_path).write_classes(ClassTable((ClassCount("a", 3, 1),)))
    assert [path.name for path in tmp_path.iterdir()] == ["classes.csv"]


def test_a_run_that_evaluated_nothing_has_no_classes(tmp_path):
    assert RunDir(tmp_path).read_classes() == ()


@pytest.mark.parametrize("garbage", [b"a,b\n1,2\n", b"\xff\xfe"])
def test_classes_that_cannot_be_understood_are_refused_in_one_line(tmp_path, garbage):
    run = RunDir(tmp_path)
    run.classes.write_bytes(garbage)
    message = refusal(PacelineError, run.read_classes)
    assert message.startswith(f"{run.classes}: cannot be read: ") and message.endswith(" (remove it)")


def test_the_error_for_a_missing_result_has_the_way_to_continue(tmp_path):
    assert refusal(PacelineError, RunDir(tmp_path).read_result) == (
        f"{tmp_path}/result.json: the run has not finished (continue it with --resume)"
    )


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"steps": 3}', b"\xff\xfe", b"null", b'{"a":\n\n"b"}'])
def test_a_result_that_cannot_be_understood_is_refused_in_one_line(tmp_path, garbage):
    (tmp_path / "result.json").write_bytes(garbage)
    message = refusal(PacelineError, RunDir(tmp_path).read_result)
    assert message.startswith(f"{tmp_path}/result.json: is not a result: ")
    assert message.endswith(" (run it again)")


def test_a_result_that_cannot_be_opened_is_refused_in_one_line(tmp_path):
    (tmp_path / "result.json").mkdir()
    assert refusal(PacelineError, RunDir(tmp_path).read_result) == (
        f"{tmp_path}/result.json: cannot be read: Is a directory (name another run)"
    )


def test_records_are_read_without_a_last_line_that_was_cut_off(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2}]


def test_a_file_that_is_not_there_has_no_records(tmp_path):
    assert list(read_lines(tmp_path / "steps.jsonl")) == []


@pytest.mark.parametrize("line", [b"{", b"[1]", b"null", b"\xff\xfe", b""])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    message = refusal(PacelineError, lambda: list(read_lines(path)))
    assert message == f"{path}: line 2 is not a record (remove the line)"


@pytest.mark.parametrize("line", ["{}", '{"step": "2"}', '{"step": null}'])
def test_a_record_of_a_step_has_one(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    for read in (lambda: list(read_lines(path, of_steps=True)), lambda: drop_records_after(path, 2)):
        assert refusal(PacelineError, read) == f"{path}: line 2 is not a record (remove the line)"


def test_a_file_without_line_ends_takes_little_memory(tmp_path):
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        file.truncate(600 << 20)  # which takes no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 2}\n')
    code = f"""
import resource
from pathlib import Path
from paceline.core.run_dir import RunDir, append_line, read_lines
path = Path({str(path)!r})
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (450 << 20),) * 2)
skipped = []
assert list(read_lines(path, skipped.append)) == [{{"step": 2}}] and skipped == [1]
path.write_bytes(b"")
with path.open("r+b") as file:
    file.truncate(600 << 20)
append_line(path, {{"step": 3}})
assert path.read_text() == '{{"step": 3}}\\n'
result = path.with_name("result.json")
with result.open("wb") as file:
    file.truncate(600 << 20)
try:
    RunDir(path.parent).read_result()
except Exception as error:
    assert "is longer than 64 MiB" in str(error), error
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_partial_last_line_is_removed_before_appending(tmp_path: Path) -> None:
    path = tmp_path / "looks.jsonl"
    append_line(path, {"look": 1})
    path.write_bytes(path.read_bytes() + b'{"look": 2, "cp')
    append_line(path, {"look": 3})
    assert list(read_lines(path)) == [{"look": 1}, {"look": 3}]


def test_a_file_of_one_partial_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "looks.jsonl"
    path.write_bytes(b'{"look"')
    append_line(path, {"look": 1})
    assert list(read_lines(path)) == [{"look": 1}]


def test_runs_are_distinguished_from_other_folders(tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(RecipeError, match=r"is not a run directory \(it has no plan.json; see runs/\)$"):
        RunDir.existing(tmp_path)  # a folder of images may hold a recipe.yaml
    (tmp_path / "plan.json").write_text("")
    assert RunDir.existing(tmp_path).path == tmp_path
    for path in (tmp_path / "no", Path("~nobody-here/run"), tmp_path / "recipe.yaml"):
        with pytest.raises(RecipeError, match=r"is not a run directory \(it has no recipe.yaml; see runs/\)$"):
            RunDir.existing(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"total_steps": 1e999}', "[]", ""], ids=range(4))
def test_a_plan_that_is_damaged_has_no_values(tmp_path, text: str) -> None:
    (tmp_path / "plan.json").write_text('{"total_steps": 8}')
    assert RunDir(tmp_path).read_plan() == {"total_steps": 8}
    (tmp_path / "plan.json").write_text(text)
    assert RunDir(tmp_path).read_plan() == {}

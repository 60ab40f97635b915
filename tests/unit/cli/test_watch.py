"""`paceline watch`: the folder, the output and the exit code; the script writes its records itself."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from paceline.cli.compare import compare
from paceline.cli.options import CompareOptions, WatchOptions
from paceline.cli.watch import watch
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.run_dir import RunDir
from paceline.core.watch_result import read_watch_result
from paceline.report.write import render_report

SCRIPT = """
import json, os, sys
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
with open(f"{os.environ['PACELINE_WATCH_DIR']}/node-{os.getpid()}.jsonl", "w") as file:
    def write(kind, **fields):
        print(json.dumps({"kind": kind, **fields}), file=file)
    write("process", format=1, pid=os.getpid(), host="node", rank=rank, world_size=world_size, torch="2.6.0",
          python="3.12", unix_s=1e9, clock_s=0.0, started_s=0.0, framework="", threads=1)
    write("pause", name="start_up", start_s=0.0, end_s=1.0)
    for n in range(30):
        stages = {"data_wait": 0.6, "forward": 0.1, "backward": 0.2, "optimizer": 0.1}
        write("step", n=n, start_s=1.0 + n, end_s=2.0 + n, stages=stages, samples=8, memory=None)
    write("end", end_s=31.0, steps=30)
print("loss 0.5", *sys.argv[1:])
sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return [sys.executable, "train.py"]


def test_a_script_is_watched_and_reported(script, tmp_path, capfd):
    assert watch(WatchOptions(command=[*script, "--lr", "0.1"], trace=True)) == 0
    out, err = capfd.readouterr()
    assert out == "loss 0.5 --lr 0.1\n"  # as without paceline
    assert "input-bound" in err
    assert "--num_workers" not in err
    assert "num_workers=N" in err
    assert "data wait" in err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("watch-train-")
    assert {each.name for each in folder.iterdir()} == {"watch", "result.json", "report.html", "trace.json.gz"}
    assert f"report: runs/{folder.name}/report.html" in err
    result = read_watch_result(folder)
    assert (result.steps, result.step_s, result.world_size) == (30, pytest.approx(1.0), 1)
    assert result.command == (*script, "--lr", "0.1")
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(each["name"].startswith("step ") for each in events) == 30
    step = next(each for each in events if each["name"] == "step 2")
    assert (step["ts"], step["dur"]) == (3e6, 1e6)
    stages = [each["name"] for each in events if each["ph"] == "X" and each["tid"] == 1 and 3e6 <= each["ts"] < 4e6]
    assert stages == ["data wait", "forward", "backward", "optimizer"]


def test_the_exit_code_is_the_script_s_and_the_result_is_written(script, tmp_path, capfd):
    assert watch(WatchOptions(command=[*script, "--fail"], run_dir=tmp_path / "watched")) == 3
    assert read_watch_result(tmp_path / "watched").exit_code == 3
    assert "exit code 3" in capfd.readouterr().err


def test_json_is_all_of_standard_output(script, tmp_path, capfd):
    assert watch(WatchOptions(command=script, as_json=True, warmup=5)) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert (result["measured_steps"], result["warmup_steps"]) == (25, 5)
    assert result["verdict"]["bottleneck"] == "input-bound"
    assert "loss 0.5" in err


def test_an_observer_that_stopped_says_why(script, tmp_path, capfd):
    (tmp_path / "train.py").write_text(
        'import os\nwith open(os.environ["PACELINE_WATCH_DIR"] + "/node-1.jsonl", "w") as file:\n'
        '    file.write(\'{"kind": "note", "text": "the observer stopped"}\\n\')\n'
    )
    assert watch(WatchOptions(command=script, run_dir=tmp_path / "watched")) == 0
    assert "the observer stopped" in capfd.readouterr().err
    assert read_watch_result(tmp_path / "watched").notes == ("the observer stopped",)


def test_an_error_of_the_summary_keeps_the_exit_code(script, capfd, monkeypatch):
    monkeypatch.setattr("paceline.watch.summary.summarize", lambda *_: 1 / 0)
    assert watch(WatchOptions(command=[*script, "--fail"])) == 3
    assert "was not summed up: ZeroDivisionError" in capfd.readouterr().err


def test_a_command_without_steps_says_so(script, tmp_path, capfd):
    assert watch(WatchOptions(command=["sh", "-c", "exit 4"])) == 4
    assert "No process took an optimizer step" in capfd.readouterr().err


def test_a_used_folder_and_what_is_no_program_are_refused(script, tmp_path):
    with pytest.raises(RecipeError, match=r"--run-dir.*train.*not empty|is not empty \(name a new folder\)"):
        watch(WatchOptions(command=script, run_dir=tmp_path))
    with pytest.raises(PacelineError, match="not a program"):
        watch(WatchOptions(command=["no-such-program"]))
    assert not (tmp_path / "runs").exists()


def test_each_rank_of_a_launcher_watches_its_own_script(script, tmp_path, monkeypatch, capfd):
    """As under `srun paceline watch`: the ranks share a folder, and rank 0 sums them up."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RecipeError, match="--run-dir"):
        watch(WatchOptions(command=script))
    options = WatchOptions(command=script, run_dir=tmp_path / "watched")
    assert watch(options) == 0
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert watch(options) == 0
    assert "2 ranks" in capfd.readouterr().err
    assert read_watch_result(tmp_path / "watched").world_size == 2


def test_a_report_is_written_again(script, tmp_path):
    watch(WatchOptions(command=script, run_dir=tmp_path / "watched"))
    page = render_report(RunDir(tmp_path / "watched"), "html")
    assert page == (tmp_path / "watched" / "report.html").read_text()
    assert "input-bound" in render_report(RunDir(tmp_path / "watched"), "md")
    assert json.loads(render_report(RunDir(tmp_path / "watched"), "json"))["steps"] == 30
    (tmp_path / "watched" / "result.json").unlink()
    with pytest.raises(PacelineError, match=r"has no result\.json"):
        render_report(RunDir(tmp_path / "watched"), "html")


@pytest.mark.parametrize("words", [[], ["--"]])
def test_options_of_the_command_are_its_own(script, tmp_path, words):
    """With or without `--` before it."""
    args = [
        sys.executable,
        "-m",
        "paceline",
        "watch",
        "--warmup",
        "3",
        "--run-dir",
        "w",
        *words,
        *script,
        "--json",
        "-h",
    ]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60, env=os.environ, check=True)
    assert done.stdout == "loss 0.5 --json -h\n"
    assert read_watch_result(tmp_path / "w").warmup_steps == 3


def test_two_watched_scripts_are_compared(script, tmp_path, capsys):
    watch(WatchOptions(command=script, run_dir=tmp_path / "before"))
    faster = SCRIPT.replace('"data_wait": 0.6', '"data_wait": 0.05').replace("2.0 + n", "1.5 + n")
    (tmp_path / "train.py").write_text(faster)
    watch(WatchOptions(command=script, run_dir=tmp_path / "after"))
    capsys.readouterr()
    folders = [tmp_path / "before", tmp_path / "after"]
    assert compare(CompareOptions(runs=folders, out=tmp_path / "both.html")) == 0
    lines = {words[1]: words for line in capsys.readouterr().out.splitlines() if len(words := line.split("│")) > 4}
    rows = {name.strip(): [cell.strip() for cell in cells[2:5]] for name, cells in lines.items()}
    assert rows["step"] == ["1,000 ms", "500 ms", "0.50x"]
    assert rows["data wait"] == ["600 ms", "50.0 ms", "0.08x"]
    assert rows["samples/s"] == ["8", "16", "2.00x"]
    assert "compute-bound" in (tmp_path / "both.html").read_text()
    with pytest.raises(RecipeError, match="--target"):
        compare(CompareOptions(runs=folders, target=0.9))

"""The first line of a command, and the notes on what a long start waits for."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from paceline.cli import start_line
from paceline.cli.start_line import IMPORTING, WaitNotes, announce
from paceline.core.world import World


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_person_gets_the_first_line_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with announce("evaluating runs/a\x1b on 1 rank"):
        assert terminal.getvalue().startswith("paceline ")
    assert terminal.getvalue().endswith(": evaluating runs/a\\x1b on 1 rank\n")


def test_a_file_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with announce("evaluating"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("world", "is_printed"),
    [
        (World(), True),
        (World(rank=0, world_size=2, launcher="torchrun"), True),
        (World(rank=1, world_size=2, launcher="torchrun"), False),
        (World(rank=0, world_size=2, launcher="local"), False),  # the process that started it has printed the line
    ],
)
def test_one_process_announces(monkeypatch: pytest.MonkeyPatch, world: World, *, is_printed: bool) -> None:
    monkeypatch.setattr(start_line, "world_from_environ", lambda environ: world)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    announce("evaluating")
    assert ("evaluating" in terminal.getvalue()) == is_printed


def test_only_what_lasts_is_noted_and_once() -> None:
    out, doing = io.StringIO(), ["reading the dataset"]
    with WaitNotes(out, silence_s=0.05) as notes:
        wait_for(lambda: f"{IMPORTING} ...\n" in out.getvalue())
        notes.follow(lambda: doing[0])
        wait_for(lambda: "reading the dataset ...\n" in out.getvalue())
        doing[0] = ""
        time.sleep(0.15)
    assert out.getvalue() == f"{IMPORTING} ...\nreading the dataset ...\n"


def test_a_start_that_is_quick_prints_nothing() -> None:
    out = io.StringIO()
    with WaitNotes(out, silence_s=0.2) as notes:
        notes.close()
        time.sleep(0.3)
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("words", "printed"),
    [(("train", "digits", "--ranks", "2"), "starting 2 ranks on "), (("train",), "starting 1 rank on ")],
)
def test_the_first_line_of_a_run_comes_before_torch_and_numpy(tmp_path, words, printed: str) -> None:
    """Both are hidden, so that the run fails at their import, after the line."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy'): sys.modules[name] = None\n"
        "from paceline.cli import ranks, train, main\n"
        "train.start_ranks = lambda *args, **more: 0\n"
        f"sys.argv = ['paceline', *{words!r}]\n"
        "main()\n"
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert printed in ended.stdout.splitlines()[0], ended.stderr

"""What tests of every kind share: real data where a machine has it, and the program as users start it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT_S = 240

# What is started in the background of a script ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict:
        """The JSON on stdout, of a run that succeeded."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    def says(self, *words: str) -> None:
        """Assert that all it says is one error line, which has `words`, and that it exits with 2."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        for word in words:
            assert word in lines[0], (word, lines[0])


@dataclass(frozen=True)
class Program:
    """The program under test, started in `folder`, with a time limit."""

    folder: Path

    def start(self, *words: str, program: tuple[str, ...] = (), **environ: str) -> "subprocess.Popen[str]":
        """Start it; `program` replaces `python -m paceline`."""
        command = [sys.executable, "-m", *(program or ("paceline",)), *words]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD"))}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**clean, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, program: tuple[str, ...] = (), **environ: str) -> Ended:
        """Run it to its end."""
        process = self.start(*words, program=program, **environ)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Ended(process.returncode, out, err)


@pytest.fixture
def paceline(tmp_path: Path) -> Program:
    """Return the program; it runs in the test's own folder."""
    return Program(tmp_path)


@pytest.fixture
def lines_of() -> Callable[[Path], list[dict]]:
    """Return a function that reads the records of a JSON-lines file."""
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def real_data():
    """Return a function from a data set's name to its folder below `PACELINE_TEST_DATA`; it skips without it."""

    def folder_of(name):
        top = os.environ.get("PACELINE_TEST_DATA")
        if not top:
            pytest.skip("PACELINE_TEST_DATA names no folder of real data sets")
        folder = Path(top, name)
        if not folder.is_dir():
            pytest.skip(f"PACELINE_TEST_DATA has no {name}/")
        return folder

    return folder_of

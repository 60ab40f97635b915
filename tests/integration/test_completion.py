"""Shell completion in real shells on a terminal."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WAIT_S = 30
CLEAR = "\x15"  # Ctrl-U
MOVES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])|\x07|.\x08|\r(?!\n)")
"""Escape sequences by which a shell moves the cursor, and characters that it writes again."""
STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(paceline --show-completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -D; eval "$(paceline --show-completion zsh)"'),
    "fish": (["fish", "--no-config", "--private"], "paceline --show-completion fish | source"),
}


class Terminal:
    """A shell on a terminal, in a folder with a run and images."""

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._shell = subprocess.Popen(
            ["setsid", "--ctty", *command], cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)

    def type(self, keys: str, until: str) -> None:
        """Type `keys`, then wait until `until` is shown."""
        os.write(self._ours, keys.encode())
        shown, deadline_s = "", time.monotonic() + WAIT_S
        while until not in MOVES.sub("", shown):
            assert time.monotonic() < deadline_s, f"{keys!r} was typed, {until!r} is not in {shown!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                shown += os.read(self._ours, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        """End the shell."""
        self._shell.kill()
        self._shell.wait(timeout=WAIT_S)
        os.close(self._ours)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run and images, and one with runs whose names have shell syntax."""
    folder = tmp_path_factory.mktemp("typed")
    for name in ("runs/digits-1", "others/runs/x's $(touch executed)", "others/runs/two\nlines"):
        (folder / name).mkdir(parents=True)
        (folder / name / "plan.json").touch()
        (folder / name / "recipe.yaml").touch()
    (folder / "photographs").mkdir()
    program = folder / "bin" / "paceline"
    program.parent.mkdir()
    report_args = '[ "$1" = report ] && [ -d "$2" ] && exec echo "$# args, a folder"'
    program.write_text(f'#!/bin/sh\n{report_args}\nexec "{sys.executable}" -m paceline "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="module", params=STARTS)
def terminal(request: pytest.FixtureRequest, folder: Path) -> Iterator[Terminal]:
    """Return a shell in `folder`, with completion, in which each test starts with what the last one has typed."""
    command, load = STARTS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(folder)}
    terminal = Terminal(command, folder, {**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    try:
        terminal.type(f"{load}; echo read''y\n", "ready\r")
        yield terminal
    finally:
        terminal.close()


def test_arguments_are_completed(terminal: Terminal) -> None:
    """A completed field ends in `=` without a blank, so that its value can follow; a path after it is completed too."""
    terminal.type(f"{CLEAR}cd ~; echo the''re\n", "there\r")
    terminal.type("paceline rep\t", "report ")
    terminal.type("ru\t", "runs/digits-1")
    terminal.type(f"{CLEAR}paceline train optim.mom\t0.5", "optim.momentum=0.5")
    terminal.type(f"{CLEAR}paceline train data.source.root=pho\tcat", "data.source.root=photographs/cat")


def test_a_run_name_with_shell_syntax_is_quoted(terminal: Terminal, folder: Path) -> None:
    """Unquoted, the shell would execute `$(...)` when the line is entered."""
    terminal.type(f"{CLEAR}cd ~/others; echo the''re\n", "there\r")
    terminal.type("paceline report runs/x\t", "executed")
    terminal.type("\n", "2 args, a folder")
    assert list(folder.rglob("executed")) == []

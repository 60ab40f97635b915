"""The tutorial, followed literally with the installed wheel, an empty directory and a shell.

The environment has a release's wheel and not the checkout; dependencies come from the Python that runs the tests.
Blocks that need a network are skipped, and blocks that would take too long are executed by `test_commands.py`. The
wheel's own scripts execute some blocks; programs of the others are forked by `typing_shell.py`.
"""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from .commands import ROOT, Block, Mark, read_blocks
from .compare_output import missing_line
from .typing_shell import TypingShell, open_shell, own_cores

TUTORIAL = ROOT / "docs" / "tutorial"
PAGES = ("1-first-run.md", "2-your-photographs.md", "3-use-it.md", "4-eight-gpus.md", "5-sixteen-nodes.md")
BY_SCRIPTS = re.compile(r"^(paceline train train\.epochs=4|paceline predict|kill|python classify\.py) ", re.MULTILINE)
"""Blocks whose programs are the wheel's own scripts, and import torch themselves: the first ones that train and that
predict, one that sends a signal, and one that needs no torch. The programs of other blocks are forked."""
LIMIT_S = 300


@pytest.fixture(scope="module")
def reader(installed, tmp_path_factory) -> Mapping[str, str]:
    """Return the variables of a reader who has activated the environment."""
    passed_on = ("LANG", "LC_ALL", "TERM", "TMPDIR")
    path = os.pathsep.join([str(installed.scripts), os.defpath])
    # On shared cores, threads that spin while they wait turn a second of training into a minute.
    own = {"PATH": path, "HOME": str(tmp_path_factory.mktemp("home")), "COLUMNS": "100", "OMP_WAIT_POLICY": "passive"}
    return {**{name: os.environ[name] for name in passed_on if name in os.environ}, **own}


@pytest.fixture(scope="module")
def shell(installed_in) -> Iterator[TypingShell]:
    """Return a shell that types commands as that reader does, with forked programs of the wheel."""
    with tempfile.TemporaryDirectory(prefix="docs") as name:
        folder = Path(name)  # a short path
        with open_shell(installed_in(folder).python, folder) as shell:
            yield shell


def run_in_shell(
    text: str, folder: Path, environ: Mapping[str, str], limit_s: float = LIMIT_S
) -> "subprocess.CompletedProcess[str]":
    """Run `text` in a real shell; return its exit code and the output on its terminal."""
    command = ["bash", "-e", "-c", text]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    own = {"cwd": folder, "env": {**environ}, "start_new_session": True}
    own["preexec_fn"] = partial(os.sched_setaffinity, 0, own_cores())
    with subprocess.Popen(command, text=True, **own, **streams) as shell:
        try:
            output, _ = shell.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)  # and its background processes
            output, _ = shell.communicate(timeout=LIMIT_S)
            pytest.fail(f"does not end in {limit_s} s:\n{text}\noutput:\n{output}")
    return subprocess.CompletedProcess(command, shell.returncode, output)


def steps(page: Path) -> Iterator[tuple[Block, str]]:
    """Yield each executed block or file, and the output that the page shows for it."""
    blocks = read_blocks(page)
    for block, after in pairwise([*blocks, Block(page, 0, "", "", Mark())]):
        if block.language == "sh" or block.mark.kind == "file":
            yield block, after.text if after.language == "text" and not after.mark.kind else ""


def test_every_page_of_the_tutorial_is_followed() -> None:
    assert {page.name for page in TUTORIAL.glob("*.md")} - {"README.md", "index.md"} == {*PAGES}


def test_a_block_that_does_not_end_is_killed_and_its_output_reported(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="output:\nwaiting"):
        run_in_shell("sleep 600 & echo waiting; wait", tmp_path, {"PATH": os.defpath}, limit_s=1)


@pytest.mark.timeout(900)  # this builds the wheel
def test_the_tutorial_uses_the_wheel(installed, reader: Mapping[str, str], shell: TypingShell, tmp_path: Path) -> None:
    for types in (run_in_shell, shell.types):
        completed = types("python -c 'import paceline; print(paceline.__file__)'", tmp_path, reader)
        assert completed.returncode == 0, completed.stdout
        assert Path(completed.stdout.strip()).is_relative_to(installed.scripts.parent)


@pytest.mark.timeout(900)
def test_the_tutorial_works_as_written(reader: Mapping[str, str], shell: TypingShell, tmp_path: Path) -> None:
    """All commands for a CPU run in one folder, from the first page to the last, with the outputs of the pages."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'paceline[export]'), which the third page needs")
    typed = by_scripts = 0
    for page in PAGES:
        for block, shown in steps(TUTORIAL / page):
            if block.mark.kind == "file":
                (tmp_path / block.mark.argument).write_text(block.text)
                continue
            assert block.mark.kind in ("", "needs", "with", "fails"), f"{block.place}: is typed in another way"
            if block.mark.kind in ("needs", "with"):
                continue
            typed += 1
            is_by_scripts = BY_SCRIPTS.search(block.text) is not None
            by_scripts += is_by_scripts
            types = run_in_shell if is_by_scripts else shell.types
            completed = types(block.text, tmp_path, reader)
            assert completed.returncode == int(block.mark.argument or 0), f"{block.place}\n{completed.stdout}"
            missing = missing_line(shown, completed.stdout)
            assert missing is None, f"{block.place}: shows {missing!r}, which was not printed:\n{completed.stdout}"
    assert typed > 15 and by_scripts == 4
    assert not (tmp_path / "src").exists()

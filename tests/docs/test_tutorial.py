"""The tutorial, followed word for word by somebody who has the wheel, an empty directory and a shell.

The wheel is that of a release, in an environment in which the checkout is not found; what it depends on comes from the
Python that runs the tests. Where it needs a network, a page is not followed, and what would take too long as it
stands is typed by `test_commands.py`. Pages that start many programs have them started at once, by `typing_hand.py`.
"""

import os
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
from .typing_hand import Hand, hand_of, own_cores

TUTORIAL = ROOT / "docs" / "tutorial"
PAGES = ("1-first-run.md", "2-your-photographs.md", "3-use-it.md", "4-eight-gpus.md", "5-sixteen-nodes.md")
AT_ONCE = ("2-your-photographs.md", "4-eight-gpus.md", "5-sixteen-nodes.md")
"""Pages whose programs need not import torch each time. What the wheel has installed is typed on the others."""
LIMIT_S = 300


@pytest.fixture(scope="module")
def reader(installed, tmp_path_factory) -> Mapping[str, str]:
    """Return the variables of a reader who has activated the environment."""
    kept = ("LANG", "LC_ALL", "TERM", "TMPDIR")
    path = os.pathsep.join([str(installed.scripts), os.defpath])
    # On cores that others use too, threads that spin while they wait make a second of training a minute.
    own = {"PATH": path, "HOME": str(tmp_path_factory.mktemp("home")), "COLUMNS": "100", "OMP_WAIT_POLICY": "passive"}
    return {**{name: os.environ[name] for name in kept if name in os.environ}, **own}


@pytest.fixture(scope="module")
def hand(installed_in) -> Iterator[Hand]:
    """Return what types commands as that reader does, and has the wheel's programs start at once."""
    with tempfile.TemporaryDirectory(prefix="docs") as name:
        folder = Path(name)  # a short one
        with hand_of(installed_in(folder).python, folder) as hand:
            yield hand


def type_in(
    text: str, folder: Path, environ: Mapping[str, str], limit_s: float = LIMIT_S
) -> "subprocess.CompletedProcess[str]":
    """Return how a real shell that is told `text` ends, and what was to be seen on its terminal."""
    command = ["bash", "-e", "-c", text]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    own = {"cwd": folder, "env": {**environ}, "start_new_session": True}
    own["preexec_fn"] = partial(os.sched_setaffinity, 0, own_cores())
    with subprocess.Popen(command, text=True, **own, **streams) as shell:
        try:
            output, _ = shell.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)  # what runs in its background too
            output, _ = shell.communicate(timeout=LIMIT_S)
            pytest.fail(f"has no end in {limit_s} s:\n{text}\nsaid:\n{output}")
    return subprocess.CompletedProcess(command, shell.returncode, output)


def steps(page: Path) -> Iterator[tuple[Block, str]]:
    """Yield each block that is typed, or that is a file, and what the page shows of the output."""
    blocks = read_blocks(page)
    for block, after in pairwise([*blocks, Block(page, 0, "", "", Mark())]):
        if block.language == "sh" or block.mark.kind == "file":
            yield block, after.text if after.language == "text" and not after.mark.kind else ""


def test_the_pages_are_those_of_the_tutorial() -> None:
    assert {page.name for page in TUTORIAL.glob("*.md")} - {"README.md", "index.md"} == {*PAGES}


def test_what_has_no_end_is_ended_with_all_it_has_started_and_what_it_said_is_told(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="said:\nwaiting"):
        type_in("sleep 600 & echo waiting; wait", tmp_path, {"PATH": os.defpath}, limit_s=1)


@pytest.mark.timeout(900)  # here the wheel is built
def test_the_wheel_is_what_is_tried(installed, reader: Mapping[str, str], hand: Hand, tmp_path: Path) -> None:
    for types in (type_in, hand.types):
        completed = types("python -c 'import paceline; print(paceline.__file__)'", tmp_path, reader)
        assert completed.returncode == 0, completed.stdout
        assert Path(completed.stdout.strip()).is_relative_to(installed.scripts.parent)


@pytest.mark.timeout(900)
def test_the_tutorial_word_for_word(reader: Mapping[str, str], hand: Hand, tmp_path: Path) -> None:
    """From the first page to the last step of a CPU, in one folder, with the pages' output as the expected one."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'paceline[export]'), which the third page needs")
    typed = 0
    for page in PAGES:
        for block, shown in steps(TUTORIAL / page):
            if block.mark.kind == "file":
                (tmp_path / block.mark.argument).write_text(block.text)
                continue
            assert block.mark.kind in ("", "needs", "with", "fails"), f"{block.place}: is typed in another way"
            if block.mark.kind in ("needs", "with"):
                continue
            typed += 1
            types = hand.types if page in AT_ONCE else type_in
            completed = types(block.text, tmp_path, reader)
            assert completed.returncode == int(block.mark.argument or 0), f"{block.place}\n{completed.stdout}"
            missing = missing_line(shown, completed.stdout)
            assert missing is None, f"{block.place}: shows {missing!r}, which was not said:\n{completed.stdout}"
    assert typed > 15
    assert not (tmp_path / "src").exists()

"""Every command in the tables of `docs/coming-from` and in `rows.csv` runs on a CPU, with small settings.

`test_commands.py` runs the blocks of these pages. The commands here are inline, or in a row.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .commands import ROOT, Command, read_commands
from .conftest import LEFT
from .small import needs, shrink

FOLDER = ROOT / "docs" / "coming-from"
IN_A_LINE = re.compile(r"`((?:srun )?paceline [a-z][^`]*)`")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
OUT = re.compile(r"--out (\S+)")
A_RUN = re.compile(r"(?<![\w/])runs/[\w.-]+")
DOCUMENTS = ("nersc-sc20", "ddp-course", "dataparallel-post", "jsc", "acceleration-study")
PAGES = (*DOCUMENTS, "the-five-documents", "README", "timm", "torchvision", "lightning")


@cache
def commands(name: str) -> tuple[Command, ...]:
    """Return the commands of a page and of its rows, each once, except those with unmet requirements."""
    text = FENCED.sub("", (FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    with (FOLDER / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = [row["command"] for row in csv.DictReader(file) if row["document"] == name]
    lines = [*IN_A_LINE.findall(text), *rows]
    found = (command for line in lines for command in read_commands(line))
    return tuple(dict.fromkeys(command for command in found if command.paceline))


def small_lines(name: str) -> Iterator[str]:
    """Yield each small command of a page once."""
    yield from dict.fromkeys(shrink(command) for command in commands(name) if not needs(command))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PAGES)
def test_every_inline_command_runs_with_small_settings(name: str, shell, folder: Path, environ, filled) -> None:
    runs = [folder / run for run in LEFT["<run>"]]
    for line in small_lines(name):
        missing = [run for run in A_RUN.findall(line) if "--run-dir" not in line and not (folder / run).exists()]
        for run, other in zip(missing, runs, strict=False):
            (folder / run).symlink_to(other)
        for out in OUT.findall(line):  # written by an earlier command of the page
            shell.types(f"rm -rf {out} {out}.md", folder, environ)
        completed = shell.types(filled(line), folder, environ)
        for run in missing:
            (folder / run).unlink()
        assert completed.returncode == 0, f"{line}\n{completed.stdout}"
        assert ": failed: " not in completed.stdout, f"{line}\n{completed.stdout}"


def test_few_commands_need_a_gpu_or_a_cluster() -> None:
    census = Counter(needs(command) for name in PAGES for command in commands(name))
    assert census.keys() <= {"", "gpu", "cluster", "docker", "more words"}
    assert census["gpu"] <= 6
    assert census["cluster"] <= 8
    assert census[""] >= 200

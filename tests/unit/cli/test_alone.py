"""Verbs that are one process's work: rank 0 of several does it and says so; the others do nothing, and succeed."""

import os
from pathlib import Path

import pytest
import typer

from paceline.cli.alone import alone
from paceline.cli.verbs import app

ALONE = {
    "predict": ("run", "image.png"),
    "export": ("run", "--out", "net.onnx"),
    "recipes": (),
    "data inspect": ("photos",),
    "data pack": ("photos", "photos.pack"),
    "data unpack": ("photos.pack", "photos"),
    "data verify": ("photos",),
    "data bench": ("photos",),
    "submit": ("digits",),
    "compare": ("run", "other"),
    "report": ("run",),
}
"""Words that each verb understands, none of whose files are there."""
BY_RANKS = {"train", "eval", "doctor", "profile"}
REFUSES_RANKS = {"ladder", "tune", "scale"}
ONCE_A_NODE = {"data stage"}
USE_RANKS = "(train, eval, profile and doctor use ranks)"


@pytest.fixture
def rank(monkeypatch):
    """Return a function that makes this process a rank of so many, as `srun` does."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)

    def become(number: int, num_ranks: int) -> None:
        monkeypatch.setenv("SLURM_PROCID", str(number))
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(num_ranks))
        monkeypatch.setenv("SLURM_LOCALID", str(number))

    return become


def verbs(command, name=""):
    """Yield the whole names of all verbs."""
    for word, each in command.commands.items():
        yield from verbs(each, f"{word} ") if hasattr(each, "commands") else [f"{name}{word}"]


def test_of_every_verb_it_is_known_whether_ranks_are_of_use_to_it() -> None:
    known = [*ALONE, *BY_RANKS, *REFUSES_RANKS, *ONCE_A_NODE]
    assert sorted(known) == sorted(verbs(typer.main.get_command(app)))
    assert all(verb in USE_RANKS for verb in BY_RANKS)


@pytest.mark.parametrize("verb", [*ALONE, "scale --predict run", "scale --predict --points table.csv"])
def test_another_rank_than_0_looks_at_nothing_and_says_nothing(rank, capsys, tmp_path: Path, monkeypatch, verb) -> None:
    monkeypatch.chdir(tmp_path)
    rank(1, 2)
    assert app([*verb.split(), *ALONE.get(verb, ())], standalone_mode=False) == 0
    assert capsys.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


def test_rank_0_says_that_the_others_have_nothing_to_do_and_does_it(rank, capsys) -> None:
    rank(0, 4)
    assert app(["recipes", "digits"], standalone_mode=False) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# recipe ")
    said = "recipes is the work of one process: rank 0 does it, which leaves nothing to do for 3 other ranks"
    assert err == f"note: {said} {USE_RANKS}\n"


def test_what_it_comes_to_is_that_of_rank_0(rank) -> None:
    rank(0, 2)
    assert alone("verb")(lambda *, code: code)(code=3) == 3


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "7", "WORLD_SIZE": "2"}])
def test_a_process_that_is_alone_or_is_told_nonsense_does_it_silently(rank, capsys, monkeypatch, environ) -> None:
    """What contradicts itself is refused by verbs that it matters to."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert alone("verb")(lambda: 3)() == 3
    assert capsys.readouterr() == ("", "")

"""An unknown option that is a field of a recipe: the error suggests the override."""

import sys

import pytest

from paceline.cli import _run, without_local_rank
from paceline.core.errors import WorldError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train digits --epochs 3", "error: --epochs: is not an option (write train.epochs=3)\n"),
        ("train digits --batch-size=64", "error: --batch-size: is not an option (write data.batch_size=64)\n"),
        ("train --optim.lr", "error: --optim.lr: is not an option (write optim.lr=...)\n"),
        ("tune digits --lr --json", "error: --lr: is not an option (write optim.lr=...)\n"),
        ("train digits --rezume", "error: No such option: --rezume"),
        ("report RUN --epochs 3", "error: No such option: --epochs (see --help)\n"),
    ],
)
def test_an_option_that_is_a_field_suggests_the_override(words, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", *words.split()])
    assert _run() == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("option", ["--local-rank", "--local_rank"])
def test_the_local_rank_that_torchs_old_launcher_writes_is_that_of_the_environment(option: str) -> None:
    argv = ["paceline", f"{option}=1", "train", "digits"]
    assert without_local_rank(argv, {"LOCAL_RANK": "1"}) == ["paceline", "train", "digits"]
    with pytest.raises(WorldError, match=f"^{option}: 1, but LOCAL_RANK is 0 .leave it out, and start ranks with torc"):
        without_local_rank(argv, {"LOCAL_RANK": "0"})
    with pytest.raises(WorldError, match="LOCAL_RANK is not set"):
        without_local_rank(argv, {})
    for others in (["paceline"], ["paceline", "train", "--local-rank=1"]):
        assert without_local_rank(others, {}) == others

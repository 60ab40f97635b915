"""Verbs whose work ranks do not share: each of several does it, as it may have work of its own, and rank 0 says so."""

import os

import pytest

from paceline.cli.commands import predict
from paceline.cli.options import not_distributed

NAMES = ("SLURM_", "RANK", "WORLD_SIZE", "TORCHELASTIC_", "PACELINE_LAUNCHER")
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a"}
NOTE = (
    "note: verb is not distributed: each of 4 ranks does all of the work "
    "(start one process, or give each its own input)\n"
)


@pytest.fixture
def said(capsys, monkeypatch):
    """Return what a verb that comes to 3 says on stderr in an environment."""

    def of(**environ: str) -> str:
        for name in [name for name in os.environ if name.startswith(NAMES)]:
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert not_distributed("verb")(lambda *, code: code)(code=3) == 3
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return of


def test_rank_0_says_that_each_does_all_of_it(said) -> None:
    assert said(**SRUN, SLURM_PROCID="0") == NOTE
    assert said(**TORCHRUN, RANK="0", LOCAL_RANK="0") == NOTE


def test_the_others_do_it_too_and_say_nothing(said) -> None:
    assert said(**SRUN, SLURM_PROCID="2") == ""
    assert said(**TORCHRUN, RANK="1", LOCAL_RANK="1") == ""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "4"},
        {"RANK": "7", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
    ],
    ids=["nothing", "one", "left over in a shell", "nonsense", "a shell in an allocation"],
)
def test_where_no_launcher_has_started_several_nothing_is_said(said, environ) -> None:
    assert said(**environ) == ""


def test_predict_is_such_a_verb() -> None:
    assert hasattr(predict, "__wrapped__")

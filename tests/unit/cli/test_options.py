"""Verbs that are not distributed: every rank does all work, and rank 0 prints a note."""

import os

import pytest

from paceline.cli.app import app, note_duplicate_work
from paceline.core.errors import RecipeError

NAMES = ("SLURM_", "RANK", "WORLD_SIZE", "TORCHELASTIC_", "PACELINE_LAUNCHER")
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a"}
NOTE = (
    "note: verb is not distributed: each of 4 ranks does all of the work "
    "(start one process, or give each its own input)\n"
)


@pytest.fixture
def printed(capsys, monkeypatch):
    """Return what the verb prints."""

    def of(**environ: str) -> str:
        for name in [name for name in os.environ if name.startswith(NAMES)]:
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        note_duplicate_work("verb")
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return of


def test_rank_0_notes_that_every_rank_does_all_work(printed) -> None:
    assert printed(**SRUN, SLURM_PROCID="0") == NOTE
    assert printed(**TORCHRUN, RANK="0", LOCAL_RANK="0") == NOTE


def test_other_ranks_print_no_note(printed) -> None:
    assert printed(**SRUN, SLURM_PROCID="2") == ""
    assert printed(**TORCHRUN, RANK="1", LOCAL_RANK="1") == ""


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
def test_without_several_ranks_there_is_no_note(printed, environ) -> None:
    assert printed(**environ) == ""


def test_predict_is_such_a_verb(monkeypatch, capsys) -> None:
    for name, value in {**SRUN, "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="no image was named"):
        app(["predict", "run"], standalone_mode=False)
    assert capsys.readouterr().err == NOTE.replace("verb", "predict")

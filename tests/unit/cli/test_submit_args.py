"""What was asked of `paceline submit` is taken apart, and what a job or its verb does not have is refused."""

import pytest
import typer

from paceline.cli.submit_args import parse_submit_args
from paceline.core.errors import RecipeError

USAGE_ERROR = typer.BadParameter.__mro__[1]


def test_words_of_the_site_are_told_from_those_of_the_recipe():
    asked = parse_submit_args(
        ["eval", "run", "slurm.time=1h", "optim.lr=1", "kubernetes.image=a\nb", "--checkpoint", "best"]
    )
    assert (asked.verb, asked.args, asked.options) == ("eval", ("run", "optim.lr=1"), ("--checkpoint", "best"))
    assert asked.site == ("slurm.time=1h", "kubernetes.image=a\nb")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--run-dir", "x"], "--run-dir: is not an option of train in a job"),
        (["digits", "--ranks=2"], "--ranks: is not an option of train in a job (write --ranks-per-node"),
        (["ladder", "cpu", "--task", "1"], "--task: is not an option of ladder in a job (add --array"),
        (["digits", "--max-restarts", "2"], "--max-restarts: is not an option of train in a job"),
        (["digits", "--port=1"], "--port: is not an option of train in a job"),
        (["digits", "--json", "optim.lr=1"], "'optim.lr=1': is among the options of train (write it before"),
        (["eval", "run", "--classes", "data.workers=0"], "'data.workers=0': is among the options of eval"),
        (["tune", "digits", "slurm.stage=/dev/shm"], "slurm.stage: has no effect on tune (write data.stage="),
        (["tune", "digits", "slurm.srun=[--exact]"], "slurm.srun: has no effect on tune (leave it out"),
    ],
)
def test_what_a_job_has_from_elsewhere_or_has_no_use_for_is_refused(words: list[str], message: str):
    with pytest.raises(RecipeError) as refused:
        parse_submit_args(words)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "words", [["digits", "--epochs", "3"], ["eval", "run", "--checkpont=best"], ["scale", "--nods", "2"]]
)
def test_an_option_that_the_verb_does_not_have_is_refused(words: list[str]):
    with pytest.raises(USAGE_ERROR, match="No such option"):
        parse_submit_args(words)

"""Arguments of `paceline submit` are parsed, and those without effect in a job refused."""

import pytest
import typer

from paceline.cli.submit_jobs import parse_submit_args
from paceline.core.errors import RecipeError

USAGE_ERROR = typer.BadParameter.__mro__[1]


def test_site_fields_are_separated_from_recipe_overrides():
    request = parse_submit_args(
        ["eval", "run", "slurm.time=1h", "optim.lr=1", "kubernetes.image=a\nb", "--checkpoint", "best"]
    )
    assert (request.verb, request.args, request.options) == ("eval", ("run", "optim.lr=1"), ("--checkpoint", "best"))
    assert request.site == ("slurm.time=1h", "kubernetes.image=a\nb")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--run-dir", "x"], "--run-dir: is not an option of train in a job"),
        (["digits", "--ranks=2"], "--ranks: is not an option of train in a job (write --ranks-per-node"),
        (["ladder", "cpu", "--task", "1"], "--task: is not an option of ladder in a job (add --array"),
        (["ladder", "auto", "--script", "auto"], "--script: is not an option of ladder in a job (leave it out, and"),
        (["digits", "--max-restarts", "2"], "--max-restarts: is not an option of train in a job"),
        (["digits", "--port=1"], "--port: is not an option of train in a job"),
        (["digits", "--json", "optim.lr=1"], "'optim.lr=1': is among the options of train (write it before"),
        (["eval", "run", "--classes", "data.workers=0"], "'data.workers=0': is among the options of eval"),
        (["tune", "digits", "slurm.stage=/dev/shm"], "slurm.stage: has no effect on tune (write data.stage="),
        (["tune", "digits", "slurm.srun=[--exact]"], "slurm.srun: has no effect on tune (leave it out"),
    ],
)
def test_options_that_a_job_sets_itself_or_ignores_are_refused(words: list[str], message: str):
    with pytest.raises(RecipeError) as refused:
        parse_submit_args(words)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "words", [["digits", "--epochs", "3"], ["eval", "run", "--checkpont=best"], ["scale", "--nods", "2"]]
)
def test_an_option_that_the_verb_does_not_have_is_refused(words: list[str]):
    with pytest.raises(USAGE_ERROR, match="No such option"):
        parse_submit_args(words)

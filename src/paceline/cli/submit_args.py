"""Parse and check the arguments of `paceline submit`: the verb, its arguments and options, and the size of the job."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import typer
from typer.main import get_command

from paceline.cli import commands, scale_options
from paceline.core.errors import RecipeError, WorldError
from paceline.core.units import count
from paceline.recipe.consent import OWN_CODE

VERBS: Final = ("train", "eval", "ladder", "scale", "tune", "profile")
RANK_VERBS: Final = ("train", "eval")
"""Verbs whose ranks the scheduler starts; the others start their own processes."""
_ONE_NODE_VERBS: Final = ("ladder", "tune", "profile")
_SITE_FIELD: Final = re.compile(r"(slurm|kubernetes)\.[a-z_.]+=.*", re.DOTALL)
_REFUSED_OPTIONS: Final = {
    "--run-dir": "write it before `--`",
    "--dry-run": "write it before `--`",
    "--resume": "leave it out: a job resumes the run in its run directory",
    "--task": "add --array before `--`",
}
_REFUSED_RANK_OPTIONS: Final = {
    "--ranks": "write --ranks-per-node before `--`",
    "--max-restarts": "leave it out: the scheduler restarts a job",
    "--port": "leave it out: ranks rendezvous on the scheduler's nodes",
}
_VERB_SITE_FIELDS: Final = (
    ("slurm.stage", ("train",), "write data.stage=FOLDER"),
    ("slurm.srun", RANK_VERBS, "leave it out: it is started without srun"),
)
"""Site fields that only some verbs use."""


@dataclass(frozen=True)
class SubmitRequest:
    """Verb with its `args` (recipe and overrides), `options` and `site` fields.

    With `own_code` the job may import code that a file names.
    """

    verb: str
    args: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    site: tuple[str, ...] = ()
    own_code: bool = False

    def has_option(self, name: str) -> bool:
        """Return whether option `name`, such as --ranks, was given."""
        return any(word.partition("=")[0] == name for word in self.options)


@dataclass(frozen=True)
class JobShape:
    """Nodes of a job, and ranks and GPUs per node."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node


def parse_submit_args(args: Sequence[str], *, own_code: bool = False) -> SubmitRequest:
    """Parse a verb (default: train), its arguments up to the first that begins with `-`, and its options.

    Raise `RecipeError` for an option that `paceline submit` sets itself, and typer's usage error for an unknown one.
    """
    verb, rest = (args[0], args[1:]) if args and args[0] in VERBS else ("train", args)
    first = next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))
    site = tuple(word for word in rest[:first] if _SITE_FIELD.fullmatch(word))
    request = SubmitRequest(
        verb, tuple(word for word in rest[:first] if word not in site), tuple(rest[first:]), site, own_code
    )
    ours = {**_REFUSED_OPTIONS, **_REFUSED_RANK_OPTIONS} if verb in RANK_VERBS else _REFUSED_OPTIONS
    for option, fix in ours.items():
        if request.has_option(option):
            raise RecipeError(f"{option}: is not an option of {verb} in a job ({fix})")
    check_options(verb, request.args, request.options)
    if request.has_option(OWN_CODE):  # consent on either side of `--` counts
        options = tuple(word for word in request.options if word != OWN_CODE)
        request = replace(request, options=options, own_code=True)
    _refuse_site_without_effect(request)
    return request


def _refuse_site_without_effect(request: SubmitRequest) -> None:
    for field, verbs, fix in _VERB_SITE_FIELDS:
        if request.verb not in verbs and any(word.partition("=")[0] == field for word in request.site):
            raise RecipeError(f"{field}: has no effect on {request.verb} ({fix})")


def build_shape(verb: str, nodes: int, ranks_per_node: int | None, gpus_per_node: int) -> JobShape:
    """Return the shape of a job; by default, one rank per GPU.

    Raise `WorldError` for several nodes if the verb uses one.
    """
    if nodes > 1 and verb in _ONE_NODE_VERBS:
        raise WorldError(f"--nodes: {nodes}, but {verb} measures on one node (write --nodes 1; scale takes several)")
    return JobShape(nodes, ranks_per_node or max(1, gpus_per_node), gpus_per_node)


def refuse_few_gpus(shape: JobShape, device: str) -> None:
    """Raise `WorldError` for more ranks than GPUs per node."""
    if device != "cpu" and 0 < shape.gpus_per_node < shape.ranks_per_node:
        gpus = count(shape.gpus_per_node, "GPU")
        raise WorldError(
            f"--ranks-per-node: {shape.ranks_per_node} on {gpus} per node (write {shape.gpus_per_node}, or set "
            "parallel.device=cpu)"
        )


def read_options(verb: str, args: Sequence[str]) -> dict[str, Any]:
    """Return the arguments and options of a verb, by parameter name. Raise typer's usage error."""
    program = typer.Typer(add_completion=False)
    program.command(verb)(_verb_function(verb))
    return get_command(program).make_context(verb, list(args)).params


def check_options(verb: str, args: Sequence[str], options: Sequence[str]) -> None:
    """Raise `RecipeError` for an argument among the options, and typer's usage error for unknown options."""
    if verb == "eval" and not args:
        return  # a missing run has a message of its own
    given = read_options(verb, [*args, *options])
    given_args = [given["run"], *(given["overrides"] or [])] if verb == "eval" else given["args"] or []
    if len(given_args) > len(args):
        word = str(given_args[len(args)])
        raise RecipeError(f"{word!r}: is among the options of {verb} (write it before `--`)")


def _verb_function(verb: str) -> Callable[..., int]:
    functions: dict[str, Callable[..., int]] = {
        "train": commands.train,
        "eval": commands.evaluate,
        "ladder": commands.ladder,
        "scale": scale_options.scale,
        "tune": commands.tune,
        "profile": commands.profile,
    }
    return functions[verb]

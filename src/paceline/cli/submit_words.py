"""Read what `paceline submit` was asked for: which verb, its words and options, and what is said of the site."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from paceline.cli.submit_options import check_options
from paceline.core.errors import RecipeError, WorldError
from paceline.core.units import count
from paceline.recipe.consent import OWN_CODE

VERBS: Final = ("train", "eval", "ladder", "scale", "tune", "profile")
RANKS: Final = ("train", "eval")
"""Verbs whose ranks the scheduler starts; the others start what they need."""
_ONE_NODE: Final = ("ladder", "tune", "profile")
_OF_A_SITE: Final = re.compile(r"(slurm|kubernetes)\.[a-z_.]+=.*", re.DOTALL)
_OURS: Final = {
    "--run-dir": "write it before `--`",
    "--dry-run": "write it before `--`",
    "--resume": "leave it out: a job goes on with what its run directory holds",
    "--task": "add --array before `--`",
}
_OF_RANKS: Final = {
    "--ranks": "write --ranks-per-node before `--`",
    "--max-restarts": "leave it out: the scheduler starts a job again",
    "--port": "leave it out: ranks meet where the scheduler has put them",
}
_OF_SOME: Final = (
    ("slurm.stage", ("train",), "write data.stage=FOLDER"),
    ("slurm.srun", RANKS, "leave it out: it is started without srun"),
)
"""Fields of a site that not all verbs use."""


@dataclass(frozen=True)
class Asked:
    """A verb with its `words`, such as a recipe and overrides, its `options`, and the words about the `site`.

    With `own_code` the job may import code that a file names.
    """

    verb: str
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    site: tuple[str, ...] = ()
    own_code: bool = False

    def has_option(self, name: str) -> bool:
        """Whether the verb was given option `name`, such as --ranks."""
        return any(word.partition("=")[0] == name for word in self.options)


@dataclass(frozen=True)
class Shape:
    """How many nodes a job has, and what each of them is asked for."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int

    @property
    def num_ranks(self) -> int:
        """The ranks of all nodes."""
        return self.nodes * self.ranks_per_node


def read_words(words: Sequence[str], *, own_code: bool = False) -> Asked:
    """Return what is asked: a verb (none: train), its words up to the first that begins with -, and its options.

    Raise `RecipeError` for an option that a job has from here, and a usage error of typer's for one that the verb does
    not have.
    """
    verb, rest = (words[0], words[1:]) if words and words[0] in VERBS else ("train", words)
    first = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    site = tuple(word for word in rest[:first] if _OF_A_SITE.fullmatch(word))
    asked = Asked(verb, tuple(word for word in rest[:first] if word not in site), tuple(rest[first:]), site, own_code)
    ours = {**_OURS, **_OF_RANKS} if verb in RANKS else _OURS
    for option, fix in ours.items():
        if asked.has_option(option):
            raise RecipeError(f"{option}: is not said of {verb} in a job ({fix})")
    check_options(verb, asked.words, asked.options)
    if asked.has_option(OWN_CODE):  # written on either side of `--`, it is the same consent
        options = tuple(word for word in asked.options if word != OWN_CODE)
        asked = replace(asked, options=options, own_code=True)
    _refuse_site_without_effect(asked)
    return asked


def _refuse_site_without_effect(asked: Asked) -> None:
    """Raise `RecipeError` for what is said of the site in so many words, and does nothing for the verb."""
    for field, verbs, fix in _OF_SOME:
        if asked.verb not in verbs and any(word.partition("=")[0] == field for word in asked.site):
            raise RecipeError(f"{field}: has no effect on {asked.verb} ({fix})")


def read_shape(verb: str, nodes: int, ranks_per_node: int | None, gpus_per_node: int) -> Shape:
    """Return what a job is asked for; a rank has a GPU unless told otherwise.

    Raise `WorldError` for what a verb does not start on.
    """
    if nodes > 1 and verb in _ONE_NODE:
        raise WorldError(f"--nodes: {nodes}, but {verb} measures on one node (write --nodes 1; scale takes several)")
    return Shape(nodes, ranks_per_node or max(1, gpus_per_node), gpus_per_node)


def refuse_few_gpus(shape: Shape, device: str) -> None:
    """Raise `WorldError` where a node is to have GPUs, but fewer than ranks that are to compute on them."""
    if device != "cpu" and 0 < shape.gpus_per_node < shape.ranks_per_node:
        gpus = count(shape.gpus_per_node, "GPU")
        raise WorldError(
            f"--ranks-per-node: {shape.ranks_per_node} on {gpus} of a node (write {shape.gpus_per_node}, or set "
            "parallel.device=cpu)"
        )

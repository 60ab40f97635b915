"""Options that several verbs share, and the decorator of verbs that do not distribute their work over ranks."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec

import typer

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.data.files import printable
from paceline.parallel.environ import ends_with_parent, world_from_environ

VerbParams = ParamSpec("VerbParams")
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 3900
"""Bytes. Linux allows 4,095, of which the files of a run need some."""
RecipeArgs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|KEY=VALUE",
        help="A preset, a recipe file or a run directory (default: digits), then overrides such as optim.lr=0.4.",
        show_default=False,
    ),
]
RanksOption = Annotated[
    str, typer.Option(metavar="N|auto", help="Processes on this machine; auto: one per GPU, or one.")
]
OversubscribeOption = Annotated[
    bool,
    typer.Option("--oversubscribe", help="Allow more ranks than 16, or 4 per CPU core if that is more."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else.")]
OwnCodeOption = Annotated[
    bool,
    typer.Option("--own-code", help="Import code that a recipe file or run directory names; it can do anything."),
]
PortOption = Annotated[
    int, typer.Option(min=0, max=65535, help="Rendezvous port of the local ranks; 0 selects a free one.")
]
TaskOption = Annotated[
    int | None,
    typer.Option("--task", min=1, metavar="K", help="Run only the K-th task, without a conclusion; needs --run-dir."),
]


def not_distributed(verb: str) -> Callable[[Callable[VerbParams, int]], Callable[VerbParams, int]]:
    """Return a decorator that prints a note if torchrun or Slurm started several ranks of `verb`."""

    def decorate(function: Callable[VerbParams, int]) -> Callable[VerbParams, int]:
        @wraps(function)
        def work(*args: VerbParams.args, **kwargs: VerbParams.kwargs) -> int:
            world = _launched_world()
            # Only a note: in a script that srun starts, each rank may have work of its own.
            if world.is_main and world.world_size > 1:
                print(_duplicate_work_note(verb, world), file=sys.stderr)
            return function(*args, **kwargs)

        return work

    return decorate


def _duplicate_work_note(verb: str, world: World) -> str:
    return (
        f"note: {verb} is not distributed: each of {world.world_size} ranks does all of the work "
        f"(start one process, or give each its own input)"
    )


def _launched_world() -> World:
    try:
        world = world_from_environ(os.environ)
    except WorldError:  # variables left over in a shell, which matter only to verbs that use them
        return World.single()
    return world if ends_with_parent(os.environ, world) else World.single()


def folder_option(help: str) -> Any:
    """Return a typer option for a folder to write."""
    return typer.Option(parser=_parse_folder, metavar="PATH", help=help)


def _parse_folder(text: str) -> Path:
    names = [name.encode(errors="surrogateescape") for name in text.split("/")]
    if not text:  # an unset shell variable, which would mean the current folder
        raise typer.BadParameter("is empty (name a folder, or leave the option out)")
    if not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text):
        raise typer.BadParameter(f"{printable(text)} is not UTF-8 (name another folder)")
    if max(map(len, names)) > _MAX_NAME_BYTES or sum(map(len, names)) + len(names) > _MAX_PATH_BYTES:
        shown = f"{printable(text[:40])}..., {len(text):,} characters,"
        raise typer.BadParameter(
            f"{shown} is too long (at most {_MAX_NAME_BYTES} bytes per name, {_MAX_PATH_BYTES:,} in all)"
        )
    return Path(text)

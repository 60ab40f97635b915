"""Arguments and options that several verbs have."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from paceline.data.sources.places import printable

_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 3900
"""Bytes: Linux takes 4,095, and the files of a run need some of them."""


def new_folder(help: str) -> Any:
    """Return the option of a folder to write, which `help` says what for."""
    return typer.Option(parser=_new_folder, metavar="PATH", help=help)


def _new_folder(text: str) -> Path:
    """Return `text`, the value of an option, as the path of a folder to write. Raise `typer.BadParameter`.

    An empty one is what a script makes of a variable that is not set; it would mean the current folder.
    """
    names = [name.encode(errors="surrogateescape") for name in text.split("/")]
    if not text:
        raise typer.BadParameter("is empty (name a folder, or leave the option out)")
    if not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text):
        raise typer.BadParameter(f"{printable(text)} is not UTF-8 (name another folder)")
    if max(map(len, names)) > _LONGEST_NAME or sum(map(len, names)) + len(names) > _LONGEST_PATH:
        shown = f"{printable(text[:40])}..., {len(text):,} characters,"
        raise typer.BadParameter(
            f"{shown} is too long (at most {_LONGEST_NAME} bytes a name, {_LONGEST_PATH:,} the path)"
        )
    return Path(text)


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|KEY=VALUE",
        help="A preset, a recipe file or a run directory (none: digits), then overrides such as optim.lr=0.4.",
        show_default=False,
    ),
]
Ranks = Annotated[str, typer.Option(metavar="N|auto", help="Processes on this machine; auto: one a GPU, or one.")]
Oversubscribe = Annotated[
    bool,
    typer.Option("--oversubscribe", help="Start more ranks than 16, or 4 for each CPU core where that is more."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else there.")]
OwnCode = Annotated[
    bool,
    typer.Option("--own-code", help="Import code that a recipe file or a run directory names: it can do anything."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port the local ranks meet at; 0 takes a free one.")]
TaskNumber = Annotated[
    int | None,
    typer.Option("--task", min=1, metavar="K", help="Run the K-th part alone, and judge nothing; needs --run-dir."),
]

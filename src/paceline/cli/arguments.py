"""Arguments and options that several verbs have."""

from typing import Annotated

import typer

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|KEY=VALUE",
        help="A preset, a recipe file or a run directory (none: digits), then overrides such as optim.lr=0.4.",
        show_default=False,
    ),
]
Ranks = Annotated[str, typer.Option(metavar="N|auto", help="Processes on this machine; auto: one a GPU, or one.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else there.")]
OwnCode = Annotated[
    bool, typer.Option("--own-code", help="Run code that the run names as its network or data: it can do anything.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port the local ranks meet at; 0 takes a free one.")]
TaskNumber = Annotated[
    int | None,
    typer.Option("--task", min=1, metavar="K", help="Run the K-th part alone, and judge nothing; needs --run-dir."),
]

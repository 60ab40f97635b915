"""The verbs of one run. Each verb's work is in its own file, imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import Json, Port, Ranks, Words


def train(
    words: Words = None,
    ranks: Ranks = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is written (runs/RECIPE-TIME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print recipe, plan and devices, and stop.")] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start ranks that went away again, up to N times, and resume.")
    ] = 0,
    port: Port = 0,
    as_json: Json = False,
) -> int:
    """Train a classifier, evaluate it, and leave a run directory."""
    from paceline.cli.train import train as work

    return work(
        words or [],
        ranks,
        run_dir,
        resume=resume,
        dry_run=dry_run,
        max_restarts=max_restarts,
        port=port,
        as_json=as_json,
    )


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False)] = None,
    ranks: Ranks = "auto",
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Which weights.")] = "last",
    classes: Annotated[bool, typer.Option("--classes", help="Show the accuracy of every class.")] = False,
    port: Port = 0,
    as_json: Json = False,
) -> int:
    """Evaluate a run's weights: every image of the validation split, once."""
    from paceline.cli.evaluate import evaluate as work

    return work(run, overrides or [], ranks, checkpoint, port=port, as_json=as_json, per_class=classes)

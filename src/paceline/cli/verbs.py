"""The verbs and their options. Each verb's work is in its own file, imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import lab_verbs
from paceline.cli.arguments import Json, Port, Ranks, Words
from paceline.cli.data_verbs import data
from paceline.cli.scale_verb import scale

app = typer.Typer(
    name="paceline",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train image classifiers in synchronous data parallel, from one CPU core to a cluster.",
)


@app.callback(invoke_without_command=True)
def paceline(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train image classifiers in synchronous data parallel, from one CPU core to a cluster."""
    if version:
        print(__version__)
        raise typer.Exit


@app.command(epilog="Example: `paceline train digits optim.lr=0.05 train.epochs=5 --ranks 2`")
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


@app.command("eval", epilog="Example: `paceline eval runs/digits-20261121-101500 data.eval_batch_size=512`")
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


@app.command(epilog="Example: `paceline recipes course/wideresnet-fashion model.width=0.25 --origin`")
def recipes(
    words: Annotated[list[str] | None, typer.Argument(metavar="NAME|KEY=VALUE", show_default=False)] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value was set.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a recipe, for editors.")] = False,
    as_json: Json = False,
) -> int:
    """List the shipped recipes, or show one with everything it resolves to."""
    from paceline.cli.recipes import recipes as work

    return work(words or [], origin=origin, schema=schema, as_json=as_json)


app.add_typer(data, name="data")


@app.command(epilog="Example: `paceline doctor runs/digits-20261121-101500 --mtbf 8h`")
def doctor(
    words: Words = None,
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Mean time between failures, such as 8h: says how often to save."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Look at this machine, and at how often a run should save on it."""
    from paceline.cli.doctor import doctor as work

    return work(words or [], mtbf, as_json=as_json)


app.command(epilog="Example: `paceline profile folder data.source.root=~/photos --trace`")(lab_verbs.profile)
app.command(epilog="Example: `paceline ladder cpu data.source.root=~/cifar10`")(lab_verbs.ladder)
app.command(epilog="Example: `paceline scale cifar10-resnet18 --ranks 1,2,4 --mode strong`")(scale)
app.command(epilog="Example: `paceline tune folder data.source.root=~/photos`")(lab_verbs.tune)
app.command(epilog="Example: `paceline compare runs/b128-* runs/b2048-* --target 0.75 --out compare.html`")(
    lab_verbs.compare
)


@app.command(epilog="Example: `paceline report runs/digits-20261121-101500 --format md`")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    format: Annotated[str, typer.Option(metavar="html|md|json", help="What is written.")] = "html",
    out: Annotated[Path | None, typer.Option(help="Where to (RUN/report.html; md and json: stdout).")] = None,
    as_json: Json = False,
) -> int:
    """Write what a run did, and where its time went, as one file."""
    from paceline.cli.report import report as work

    return work(run, format, out, as_json=as_json)

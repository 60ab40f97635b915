"""Typer app of all verbs and their options. A verb's work is in its own module, imported when the verb is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import lab_verbs, run_verbs
from paceline.cli.arguments import JsonOption, OversubscribeOption, OwnCodeOption, PortOption, RecipeArgs, folder_option
from paceline.cli.data_verbs import data
from paceline.cli.scale_verb import scale

app = typer.Typer(
    name="paceline",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train image classifiers with synchronous data parallelism, from one CPU core to a cluster.",
)


@app.callback(invoke_without_command=True)
def paceline(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    show_completion: Annotated[
        str | None, typer.Option(metavar="bash|fish|zsh", help="Print the completion script of that shell.")
    ] = None,
) -> None:
    """Train image classifiers with synchronous data parallelism, from one CPU core to a cluster."""
    if version:
        from paceline import __version__

        print(__version__)
        raise typer.Exit
    if show_completion is not None:
        from paceline.cli.complete import completion_script

        print(completion_script(show_completion), end="")
        raise typer.Exit


app.command(epilog="Example: `paceline train digits optim.lr=0.05 train.epochs=5 --ranks 2`")(run_verbs.train)
app.command("eval", epilog="Example: `paceline eval runs/digits-20261121-101500 data.eval_batch_size=512`")(
    run_verbs.evaluate
)
app.command(epilog="Example: `paceline predict runs/digits-20261121-101500 ~/photos --format csv`")(run_verbs.predict)
app.command(epilog="Example: `paceline export runs/digits-20261121-101500 --format onnx --out digits.onnx`")(
    run_verbs.export
)


@app.command(epilog="Example: `paceline recipes course/wideresnet-fashion model.width=0.25 --origin`")
def recipes(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|KEY=VALUE", help="Recipe to show (default: list all), and overrides.", show_default=False
        ),
    ] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value was set.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a recipe, for editors.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List the shipped recipes, or show one with every field resolved."""
    from paceline.cli.recipes import recipes as work

    return work(args or [], origin=origin, schema=schema, as_json=as_json)


app.add_typer(data, name="data")


@app.command(
    epilog="Example: `paceline submit folder data.source.root=/shared/photos --nodes 2 --gpus-per-node 4 --wait`"
)
def submit(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VERB] RECIPE|KEY=VALUE [-- OPTIONS]",
            help="train (the default), eval, ladder, scale, tune or profile; its arguments; slurm.KEY=VALUE and "
            "kubernetes.KEY=VALUE for the site; after --, options of the verb.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="slurm|kubernetes", help="Scheduler (slurm, if sbatch is installed).")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs per node, with one rank each.")] = 0,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node (one per GPU, or one).")] = None,
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Settings of the cluster ($PACELINE_SITE, ~/.config/paceline/site.yaml)."
        ),
    ] = None,
    run_dir: Annotated[Path | None, folder_option("Run directory, on a file system that all nodes share.")] = None,
    own_code: OwnCodeOption = False,
    array: Annotated[
        bool, typer.Option("--array", help="Run the tasks of a ladder or of scale as a job array.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job, and exit with its code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and queue nothing.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Write a job for Slurm or Kubernetes, and queue it."""
    from paceline.cli.submit import submit as work

    return work(
        args or [],
        engine=engine,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus_per_node,
        site=site,
        run_dir=run_dir,
        own_code=own_code,
        array=array,
        wait=wait,
        dry_run=dry_run,
        as_json=as_json,
    )


@app.command(epilog="Example: `srun --nodes 2 --ntasks-per-node 4 paceline doctor`")
def doctor(
    args: RecipeArgs = None,
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Mean time between failures, such as 8h, to advise how often to save."),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Start this many ranks here, and check their communication.")
    ] = None,
    run_dir: Annotated[Path | None, folder_option("Folder that runs would be written to (runs/).")] = None,
    own_code: OwnCodeOption = False,
    oversubscribe: OversubscribeOption = False,
    port: PortOption = 0,
    as_json: JsonOption = False,
) -> int:
    """Check this machine, or every rank of a job, for problems that would break or slow a run."""
    from paceline.cli.doctor import doctor as work

    return work(
        args or [],
        mtbf,
        ranks=ranks,
        run_dir=run_dir,
        oversubscribe=oversubscribe,
        port=port,
        own_code=own_code,
        as_json=as_json,
    )


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
    format: Annotated[str, typer.Option(metavar="html|md|json", help="Output format.")] = "html",
    out: Annotated[Path | None, typer.Option(help="Output file (RUN/report.html; for md and json, stdout).")] = None,
    as_json: JsonOption = False,
) -> int:
    """Write the report of a run, with its results and where the time went, to one file."""
    from paceline.cli.report import report as work

    return work(run, format, out, as_json=as_json)

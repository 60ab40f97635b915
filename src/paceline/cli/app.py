"""Typer app: all verbs and their options. Each verb's work is in its own module, imported when the verb is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import commands
from paceline.cli.options import (
    JsonOption,
    OversubscribeOption,
    OwnCodeOption,
    PortOption,
    RecipeArgs,
    folder_option,
    not_distributed,
)
from paceline.cli.scale_options import scale

data = typer.Typer(no_args_is_help=True, help="Pack, inspect, verify and benchmark data before training.")

SourceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SRC|KEY=VALUE",
        help="A folder of images, a .csv list, a .pack or its URL, or a recipe's name, file or run (default: digits).",
        show_default=False,
    ),
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of its recipe.", show_default=False)
]
WorkersOption = Annotated[str, typer.Option(metavar="N|auto", help="Workers; auto: one per core.")]


@data.command(epilog="Example: `paceline data inspect ~/photos`")
@not_distributed("data inspect")
def inspect(
    src: SourceArgument = None,
    overrides: OverridesArgument = None,
    inspect_all: Annotated[bool, typer.Option("--all", help="Inspect every image, not 2,000 per split.")] = False,
    validation_only: Annotated[
        bool, typer.Option("--held-out", help="List the validation images, one per line.")
    ] = False,
    own_code: OwnCodeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Summarize a data set: classes, sizes, formats, bytes."""
    if validation_only:
        from paceline.cli.data_inspect import list_validation

        return list_validation(src, overrides or [], inspect_all=inspect_all, own_code=own_code, as_json=as_json)
    from paceline.cli.data_inspect import inspect_data as work

    return work(src, overrides or [], inspect_all=inspect_all, own_code=own_code, as_json=as_json)


@data.command(epilog="Example: `paceline data pack ~/photos photos.pack`")
@not_distributed("data pack")
def pack(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder of images, a .csv list, a .pack, or a recipe's name, file or run.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, or folder for shards or an LMDB.")],
    overrides: OverridesArgument = None,
    form: Annotated[str, typer.Option("--format", metavar="pack|lmdb", help="Output format.")] = "pack",
    resize: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="PX", help="Scale down images with longer short sides, and re-encode them as JPEG."
        ),
    ] = None,
    quality: Annotated[
        int | None, typer.Option(min=1, max=100, help="Quality of those JPEGs (90).", show_default=False)
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Write a folder of files of at most this size, such as 1GB.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing pack.")] = False,
    workers: WorkersOption = "auto",
    own_code: OwnCodeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write a data set as a pack, which loads several times as fast. Pixels change only with --resize."""
    from paceline.cli.data_pack import PackRequest
    from paceline.cli.data_pack import pack_data as work

    request = PackRequest(form, resize, quality, shard_size, overwrite)
    return work(src, out, overrides or [], request, workers, own_code=own_code, as_json=as_json)


@data.command(epilog="Example: `paceline data unpack photos.pack ~/photos-again`")
@not_distributed("data unpack")
def unpack(
    pack: Annotated[str, typer.Argument(metavar="PACK", help="A pack, or a folder of its shards.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    workers: WorkersOption = "auto",
    as_json: JsonOption = False,
) -> int:
    """Write the images of a pack as files in class folders."""
    from paceline.cli.data_pack import unpack_data as work

    return work(pack, out, workers, as_json=as_json)


@data.command(epilog="Example: `paceline data stage ~/photos /dev/shm`")
def stage(
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="SRC WHERE [KEY=VALUE]", help="A data set, and a folder in memory or on a local disk."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the copies in WHERE, the only argument.")] = False,
    own_code: OwnCodeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Copy a data set into memory or to a local disk, for the runs on this machine."""
    from paceline.cli.data_pack import stage_data as work

    return work(args or [], remove=remove, own_code=own_code, as_json=as_json)


@data.command(epilog="Example: `paceline data verify photos.pack --against ~/photos`")
@not_distributed("data verify")
def verify(
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="SRC|KEY=VALUE", help="SRC as for inspect, then overrides.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Source of the pack: check that both hold the same images."),
    ] = None,
    workers: WorkersOption = "auto",
    own_code: OwnCodeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Read and decode every image; list images that cannot be decoded, and duplicates."""
    from paceline.cli.data_verify import verify_data as work

    return work(args or [], workers, against=against, own_code=own_code, as_json=as_json)


@data.command(epilog="Example: `paceline data bench ~/photos --seconds 5`")
@not_distributed("data bench")
def bench(
    src: SourceArgument = None,
    overrides: OverridesArgument = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds per measurement.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often to measure each, alternating.")] = 3,
    images: Annotated[int, typer.Option(min=1, help="Maximum number of images, evenly spread.")] = 4096,
    workers: WorkersOption = "auto",
    packs: Annotated[
        bool, typer.Option("--pack/--no-pack", help="Also measure a temporary pack of the images.")
    ] = True,
    cold: Annotated[
        bool, typer.Option("--cold/--no-cold", help="Also measure reads from disk, without the page cache.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Folder to write bench.json to.")] = None,
    own_code: OwnCodeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Measure every loader on your own data, and the limits of this machine."""
    from paceline.cli.data_bench import BenchRequest
    from paceline.cli.data_bench import bench_data as work

    request = BenchRequest(seconds, rounds, images, packs=packs, cold=cold)
    return work(src, overrides or [], request, workers, out, own_code=own_code, as_json=as_json)


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


app.command(epilog="Example: `paceline train digits optim.lr=0.05 train.epochs=5 --ranks 2`")(commands.train)
app.command("eval", epilog="Example: `paceline eval runs/digits-20261121-101500 data.eval_batch_size=512`")(
    commands.evaluate
)
app.command(epilog="Example: `paceline predict runs/digits-20261121-101500 ~/photos --format csv`")(commands.predict)
app.command(epilog="Example: `paceline export runs/digits-20261121-101500 --format onnx --out digits.onnx`")(
    commands.export
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


app.command(epilog="Example: `paceline profile folder data.source.root=~/photos --trace`")(commands.profile)
app.command(epilog="Example: `paceline ladder cpu data.source.root=~/cifar10`")(commands.ladder)
app.command(epilog="Example: `paceline scale cifar10-resnet18 --ranks 1,2,4 --mode strong`")(scale)
app.command(epilog="Example: `paceline tune folder data.source.root=~/photos`")(commands.tune)
app.command(epilog="Example: `paceline compare runs/b128-* runs/b2048-* --target 0.75 --out compare.html`")(
    commands.compare
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

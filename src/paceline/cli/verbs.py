"""The verbs and their options. Each verb's work is in its own file, imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline import __version__

app = typer.Typer(
    name="paceline",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train image classifiers in synchronous data parallel, from one CPU core to a cluster.",
)

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
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port the local ranks meet at; 0 takes a free one.")]


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


data = typer.Typer(no_args_is_help=True, help="Pack data, look at it, prove it and measure it before a run does.")
app.add_typer(data, name="data")

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SRC|KEY=VALUE",
        help="A folder of images, a .csv list, a .pack or its URL, or a recipe's name, file or run (none: digits).",
        show_default=False,
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False)]
Workers = Annotated[str, typer.Option(metavar="N|auto", help="Workers; auto: one a core.")]


@data.command(epilog="Example: `paceline data inspect ~/photos`")
def inspect(
    src: Source = None,
    overrides: Overrides = None,
    look_at_all: Annotated[bool, typer.Option("--all", help="Look into every image, not 2,000 of a split.")] = False,
    as_json: Json = False,
) -> int:
    """Say what a data set is like: classes, sizes, formats, bytes."""
    from paceline.cli.data_inspect import inspect_data as work

    return work(src, overrides or [], look_at_all=look_at_all, as_json=as_json)


@data.command(epilog="Example: `paceline data pack ~/photos photos.pack`")
def pack(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder of images, a .csv list, a .pack, or a recipe's name, file or run.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, or the folder of shards or an LMDB.")],
    overrides: Overrides = None,
    form: Annotated[str, typer.Option("--format", metavar="pack|lmdb", help="What is written.")] = "pack",
    resize: Annotated[
        int | None, typer.Option(min=1, metavar="PX", help="Scale short sides above it down, and save as JPEG anew.")
    ] = None,
    quality: Annotated[
        int | None, typer.Option(min=1, max=100, help="Of those JPEGs (90).", show_default=False)
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Write a folder of files of at most that, such as 1GB.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pack that is there.")] = False,
    workers: Workers = "auto",
    as_json: Json = False,
) -> int:
    """Write a data set as a pack, which loads several times as fast; no pixel changes without --resize."""
    from paceline.cli.data_pack import Asked
    from paceline.cli.data_pack import pack_data as work

    asked = Asked(form, resize, quality, shard_size, overwrite)
    return work(src, out, overrides or [], asked, workers, as_json=as_json)


@data.command(epilog="Example: `paceline data unpack photos.pack ~/photos-again`")
def unpack(
    pack: Annotated[str, typer.Argument(metavar="PACK", help="A pack, or a folder of its shards.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    workers: Workers = "auto",
    as_json: Json = False,
) -> int:
    """Write the images of a pack as files in class folders."""
    from paceline.cli.data_unpack import unpack_data as work

    return work(pack, out, workers, as_json=as_json)


@data.command(epilog="Example: `paceline data stage ~/photos /dev/shm`")
def stage(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SRC WHERE [KEY=VALUE]", help="A data set, and a folder in memory or on a local disk."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the copies in WHERE, which stands alone.")] = False,
    as_json: Json = False,
) -> int:
    """Copy a data set into memory or to a local disk, for the runs on this machine."""
    from paceline.cli.data_stage import stage_data as work

    return work(words or [], remove=remove, as_json=as_json)


@data.command(epilog="Example: `paceline data verify photos.pack --against ~/photos`")
def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SRC|KEY=VALUE", help="As for inspect, then overrides.", show_default=False),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SRC", help="What a pack was made from: prove that it holds the same.")
    ] = None,
    workers: Workers = "auto",
    as_json: Json = False,
) -> int:
    """Read and decode every image of a data set, and list those that cannot be."""
    from paceline.cli.data_verify import verify as work

    return work(words or [], workers, against=against, as_json=as_json)


@data.command(epilog="Example: `paceline data bench ~/photos --seconds 5`")
def bench(
    src: Source = None,
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each is measured each time.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often, in turns.")] = 3,
    images: Annotated[int, typer.Option(min=1, help="At most so many images, evenly spread.")] = 4096,
    workers: Workers = "auto",
    packs: Annotated[bool, typer.Option("--pack/--no-pack", help="Measure a pack of the images, made for it.")] = True,
    cold: Annotated[bool, typer.Option("--cold/--no-cold", help="Measure from the disk too, not from memory.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder to write bench.json to.")] = None,
    as_json: Json = False,
) -> int:
    """Measure every loader on your own data, and what the machine could do at most."""
    from paceline.cli.data_bench import Asked
    from paceline.cli.data_bench import bench_data as work

    asked = Asked(seconds, rounds, images, packs=packs, cold=cold)
    return work(src, overrides or [], asked, workers, out, as_json=as_json)


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


@app.command(epilog="Example: `paceline profile folder data.source.root=~/photos --trace`")
def profile(
    words: Words = None,
    ranks: Ranks = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="Where it is written (runs/profile-RECIPE-TIME).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps after the warm-up that are measured.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="How often the run and each probe is measured, in turns.")] = 1,
    probes: Annotated[bool, typer.Option("--probes/--no-probes", help="Measure what free data and such give.")] = True,
    trace: Annotated[bool, typer.Option("--trace", help="Write a Chrome trace of all ranks.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark stages for Nsight Systems; prints its command.")] = False,
    as_json: Json = False,
) -> int:
    """Train for a few steps, and say where each second went and what would save it."""
    from paceline.cli.profile import profile as work

    return work(
        words or [],
        ranks,
        run_dir,
        steps=steps,
        repeats=repeats,
        probes=probes,
        trace=trace,
        nvtx=nvtx,
        as_json=as_json,
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

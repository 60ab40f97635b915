"""Verbs of `paceline data`. Each verb's work is in its own module, imported when the verb is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import JsonOption, OwnCodeOption
from paceline.cli.unshared import not_distributed

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
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="OverridesArgument of its recipe.", show_default=False)
]
WorkersOption = Annotated[str, typer.Option(metavar="N|auto", help="Workers; auto: one per core.")]


@data.command(epilog="Example: `paceline data inspect ~/photos`")
@not_distributed("data inspect")
def inspect(
    src: SourceArgument = None,
    overrides: OverridesArgument = None,
    inspect_all: Annotated[bool, typer.Option("--all", help="Inspect every image, not 2,000 per split.")] = False,
    held_out: Annotated[bool, typer.Option("--held-out", help="List the validation images, one per line.")] = False,
    own_code: OwnCodeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Summarize a data set: classes, sizes, formats, bytes."""
    if held_out:
        from paceline.cli.data_held_out import list_validation

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
    from paceline.cli.data_unpack import unpack_data as work

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
    from paceline.cli.data_stage import stage_data as work

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
        typer.Option(metavar="SRC", help="SourceArgument of the pack: check that both hold the same images."),
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

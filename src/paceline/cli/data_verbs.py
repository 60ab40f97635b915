"""The verbs of `paceline data`. Each verb's work is in its own file, imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import Json, OwnCode
from paceline.cli.unshared import unshared

data = typer.Typer(no_args_is_help=True, help="Pack data, look at it, prove it and measure it before a run does.")

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SRC|KEY=VALUE",
        help="A folder of images, a .csv list, a .pack or its URL, or a recipe's name, file or run (none: digits).",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of its recipe.", show_default=False)
]
Workers = Annotated[str, typer.Option(metavar="N|auto", help="Workers; auto: one a core.")]


@data.command(epilog="Example: `paceline data inspect ~/photos`")
@unshared("data inspect")
def inspect(
    src: Source = None,
    overrides: Overrides = None,
    look_at_all: Annotated[bool, typer.Option("--all", help="Look into every image, not 2,000 of a split.")] = False,
    held_out: Annotated[bool, typer.Option("--held-out", help="List the validation images, one a line.")] = False,
    own_code: OwnCode = False,
    as_json: Json = False,
) -> int:
    """Say what a data set is like: classes, sizes, formats, bytes."""
    if held_out:
        from paceline.cli.data_held_out import list_held_out

        return list_held_out(src, overrides or [], look_at_all=look_at_all, own_code=own_code, as_json=as_json)
    from paceline.cli.data_inspect import inspect_data as work

    return work(src, overrides or [], look_at_all=look_at_all, own_code=own_code, as_json=as_json)


@data.command(epilog="Example: `paceline data pack ~/photos photos.pack`")
@unshared("data pack")
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
    own_code: OwnCode = False,
    as_json: Json = False,
) -> int:
    """Write a data set as a pack, which loads several times as fast; no pixel changes without --resize."""
    from paceline.cli.data_pack import Asked
    from paceline.cli.data_pack import pack_data as work

    asked = Asked(form, resize, quality, shard_size, overwrite)
    return work(src, out, overrides or [], asked, workers, own_code=own_code, as_json=as_json)


@data.command(epilog="Example: `paceline data unpack photos.pack ~/photos-again`")
@unshared("data unpack")
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
    own_code: OwnCode = False,
    as_json: Json = False,
) -> int:
    """Copy a data set into memory or to a local disk, for the runs on this machine."""
    from paceline.cli.data_stage import stage_data as work

    return work(words or [], remove=remove, own_code=own_code, as_json=as_json)


@data.command(epilog="Example: `paceline data verify photos.pack --against ~/photos`")
@unshared("data verify")
def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SRC|KEY=VALUE", help="As for inspect, then overrides.", show_default=False),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SRC", help="What a pack was made from: prove that it holds the same.")
    ] = None,
    workers: Workers = "auto",
    own_code: OwnCode = False,
    as_json: Json = False,
) -> int:
    """Read and decode every image; list what cannot be decoded, and what is there more than once."""
    from paceline.cli.data_verify import verify as work

    return work(words or [], workers, against=against, own_code=own_code, as_json=as_json)


@data.command(epilog="Example: `paceline data bench ~/photos --seconds 5`")
@unshared("data bench")
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
    own_code: OwnCode = False,
    as_json: Json = False,
) -> int:
    """Measure every loader on your own data, and what the machine could do at most."""
    from paceline.cli.data_bench import Asked
    from paceline.cli.data_bench import bench_data as work

    asked = Asked(seconds, rounds, images, packs=packs, cold=cold)
    return work(src, overrides or [], asked, workers, out, own_code=own_code, as_json=as_json)

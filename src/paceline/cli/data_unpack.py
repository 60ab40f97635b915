"""`paceline data unpack`: write the images of a pack as files."""

import json
from dataclasses import asdict
from pathlib import Path

from paceline.cli.data_progress import build_data_progress
from paceline.cli.data_words import count_workers, read_source
from paceline.cli.show import print_rows
from paceline.core.errors import RecipeError
from paceline.core.units import seconds, size
from paceline.data.pack.unpack import unpack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.places import expand_path, printable


def unpack_data(src: str, out: Path, workers: str, *, as_json: bool) -> int:
    """Run `paceline data unpack`, and return the exit code."""
    num_workers = count_workers(workers)
    source = read_source(src, []).source
    if source.name != "pack":
        raise RecipeError(f"{src!r}: is not a pack (name a .pack file or a folder of shards)")
    packed = build_datasets(source, may_download=False, skip_bad=True)
    folder = expand_path(str(out)).absolute()
    with build_data_progress("images") as progress:
        made = unpack(packed, folder, progress, num_workers)
    if as_json:
        print(json.dumps({**asdict(made), "seconds": round(progress.elapsed_s, 3)}, indent=2))
        return 0
    rows = [
        ("images", f"{made.images:,}, in {printable(folder)}/train and /val"),
        ("bytes", size(made.bytes)),
        ("time", f"{seconds(progress.elapsed_s)} ({made.images / max(progress.elapsed_s, 1e-9):,.0f} images/s)"),
    ]
    print_rows(rows, printable(src))
    return 0

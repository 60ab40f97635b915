"""`paceline data inspect --held-out`: which images are held out for validation, one a line and nothing else."""

import json
import sys

from paceline.cli.data_words import Asked, read_source
from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import RecipeError
from paceline.core.rundir import RunDir, is_run
from paceline.data.identity import dataset_digest
from paceline.data.sources.build import build_datasets
from paceline.data.sources.encoded import EncodedSource
from paceline.data.sources.places import expanded, printable


def list_held_out(
    src: str | None, overrides: list[str], *, look_at_all: bool = False, own_code: bool = False, as_json: bool
) -> int:
    """Print the names of the validation images, files as they are called below their root; return the exit code.

    What a folder holds out follows from the files in it, so a run's are listed as long as these are the same. Raise
    `DataError` where they are not, and `RecipeError` for images without names; a run without a checkpoint, which
    holds what they were, is told of.
    """
    if look_at_all:
        raise RecipeError("--all: looks into images, and --held-out only lists them (leave it out)")
    asked = read_source(src, overrides, own_code=own_code)
    datasets = build_datasets(asked.source, may_download=False, skip_bad=True)
    if isinstance(datasets.val, ArraySource):
        raise RecipeError(f"--held-out: {asked.name} is pixels in memory, without names (name a folder or a list)")
    digest = dataset_digest(datasets)
    _refuse_changed(src, asked, digest)
    names = (_name(datasets.val, index) for index in range(len(datasets.val)))
    if as_json:
        print(json.dumps({"source": asked.source.model_dump(), "digest": digest, "held_out": list(names)}, indent=2))
        return 0
    for name in names:
        print(name)
    return 0


def _refuse_changed(src: str | None, asked: Asked, digest: str) -> None:
    """Raise `DataError` where a run is asked of that was trained on other images than are there."""
    if not (src and asked.is_recipe and is_run(expanded(src))):
        return
    run = RunDir(expanded(src))
    from paceline.train.checkpoint import Checkpoints, Keep
    from paceline.train.resume import check_dataset

    newest = Checkpoints(run.checkpoints, Keep(1)).newest()
    if newest is not None:
        check_dataset(newest, digest)
        return
    what = "holds no checkpoint, which alone says what it was trained on"
    print(f"note: {run.path}: {what}: not checked whether files were added, removed or changed since", file=sys.stderr)


def _name(source: Source, index: int) -> str:
    return printable(source.listed_as(index)) if isinstance(source, EncodedSource) else source.name_of(index)

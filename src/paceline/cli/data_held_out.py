"""`paceline data inspect --held-out`: list the validation images, one per line."""

import json
import sys

from paceline.cli.data_words import DataRequest, read_source
from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import RecipeError
from paceline.core.rundir import RunDir, is_run
from paceline.data.identity import digest_datasets
from paceline.data.sources.build import build_datasets
from paceline.data.sources.encoded import ImageFileSource
from paceline.data.sources.places import expand_path, printable


def list_validation(
    src: str | None, overrides: list[str], *, inspect_all: bool = False, own_code: bool = False, as_json: bool
) -> int:
    """Print the names of the validation images, relative to their root; return the exit code.

    The split of a folder follows from its files, so a run's images are listed only while its files are unchanged. Raise
    `DataError` if they changed, and `RecipeError` for images without names. A run without a checkpoint, which records
    the files, prints a note.
    """
    if inspect_all:
        raise RecipeError("--all: inspects images, but --held-out only lists them (leave it out)")
    request = read_source(src, overrides, own_code=own_code)
    datasets = build_datasets(request.source, may_download=False, skip_bad=True)
    if isinstance(datasets.val, ArraySource):
        raise RecipeError(f"--held-out: {request.name} is pixels in memory, without names (name a folder or a list)")
    digest = digest_datasets(datasets)
    _refuse_changed(src, request, digest)
    names = (_sample_name(datasets.val, index) for index in range(len(datasets.val)))
    if as_json:
        print(json.dumps({"source": request.source.model_dump(), "digest": digest, "held_out": list(names)}, indent=2))
        return 0
    for name in names:
        print(name)
    return 0


def _refuse_changed(src: str | None, request: DataRequest, digest: str) -> None:
    """Raise `DataError` if the run was trained on other images than exist now."""
    if not (src and request.is_recipe and is_run(expand_path(src))):
        return
    run = RunDir(expand_path(src))
    from paceline.train.checkpoint import CheckpointStorage, KeepPolicy
    from paceline.train.resume import check_dataset

    newest = CheckpointStorage(run.checkpoints, KeepPolicy(1)).newest()
    if newest is not None:
        check_dataset(newest, digest)
        return
    what = "holds no checkpoint to compare with"
    print(f"note: {run.path}: {what}: files may have been added, removed or changed since training", file=sys.stderr)


def _sample_name(source: Source, index: int) -> str:
    return printable(source.get_listed_path(index)) if isinstance(source, ImageFileSource) else source.name_of(index)

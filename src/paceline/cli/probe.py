"""`paceline probe`: ask the features of a frozen model about a dataset."""

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.cli.data_source import load_recipe_or_data
from paceline.cli.options import ProbeOptions
from paceline.cli.start_line import announce
from paceline.core.errors import DataError, RecipeError
from paceline.core.files import make_folder
from paceline.core.imports import fast_imports
from paceline.core.probe_result import ProbedImage, ProbeResult
from paceline.core.run_dir import RunDir, is_run, write_atomic
from paceline.core.units import count, size
from paceline.core.world import World
from paceline.data.files import expand_path, printable
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from paceline.core.dataset import Datasets, Source
    from paceline.inference.probe.backbone import Backbone
    from paceline.inference.probe.cache import FeatureCache
    from paceline.inference.probe.result import ProbedSplits
    from paceline.inference.reference import Reference

_PROBED: Final = ("model", "data.source")
"""Fields whose plugins a probe imports."""
_RUN_FIELDS: Final = (
    "data.source",
    "data.loader",
    "data.workers",
    "data.worker_timeout",
    "data.on_bad_image",
    "parallel.",
)
"""Beginnings of the fields that may differ from a run's: the others would change its features, or have no effect."""
_CACHE: Final = "~/.cache/paceline/features"
_VAL_SHARE: Final = 4
"""Of the images to probe, at most one in four is a validation image."""


def probe(options: ProbeOptions) -> int:
    """Run `paceline probe`, and return the exit code."""
    name, *overrides = options.args
    loaded = load_recipe_or_data(name, overrides)
    run = RunDir(expand_path(name)) if is_run(expand_path(name)) else None
    require_consent(loaded, trust_code=options.trust_code, paths=_PROBED)
    if run:
        _check_run_fields(loaded)
    else:
        if options.checkpoint != "last":
            raise RecipeError(f"--checkpoint: {options.checkpoint} has no effect without a run (leave it out)")
        loaded = with_weights_defaults(loaded)
    _refuse_content(options.run_dir)
    with announce(f"probing {printable(name)}"), fast_imports():
        from paceline.inference.probe.answers import answer, check_labels
        from paceline.inference.probe.backbone import compute_features
        from paceline.inference.probe.cache import FeatureCache
        from paceline.inference.probe.result import ProbedSplits, build_result, duplicates_csv, images_csv
        from paceline.parallel.device import set_threads

    set_threads(loaded.recipe.parallel, World.single())
    backbone, datasets = _load(loaded, run, options)
    cache = (
        FeatureCache(expand_path(str(options.cache or _CACHE)), round(options.cache_gb * 1e9))
        if options.cache_gb
        else None
    )
    started_s = time.perf_counter()
    num_val = min(len(datasets.val), options.images // _VAL_SHARE)
    num_train = min(len(datasets.train), options.images - num_val)
    train = compute_features(backbone, datasets.train, num_train, cache)
    check_labels(train.labels)
    val = compute_features(backbone, datasets.val, num_val, cache) if num_val else None
    computed_s = time.perf_counter()
    num_classes = datasets.train.info.num_classes
    answers = answer(train, val, num_classes, backbone.checkpoint, len(datasets.train))
    splits = ProbedSplits((datasets.train, datasets.val), (train, val) if val else (train,))
    reference, notes = _write_reference(loaded, run, backbone, answers.reference)
    result = build_result(
        answers,
        splits,
        source=printable(name),
        weights=backbone.weights,
        cache=printable(cache.folder) if cache else "",
        features_s=computed_s - started_s,
        answers_s=time.perf_counter() - computed_s,
        reference=reference,
        notes=(*_subset_notes(splits, options.images), *notes),
        command=("paceline", *sys.argv[1:]),
    )
    folder = _create_folder(loaded.name, options.run_dir)
    for file, text in (
        ("images.csv", images_csv(answers, splits)),
        ("duplicates.csv", duplicates_csv(answers, splits)),
    ):
        write_atomic(folder.path / file, text)
    write_atomic(folder.path / "probe.json", result.model_dump_json(indent=2) + "\n")
    _show(result, folder, datasets, cache, as_json=options.as_json)
    return 0


def _check_run_fields(loaded: LoadedRecipe) -> None:
    for path in filter(loaded.is_from_command_line, loaded.stack.origins):
        if not path.startswith(_RUN_FIELDS):
            raise RecipeError(
                f"{path}: has no effect on the features of a run (leave it out, or name a recipe with model.weights in "
                "place of the run)"
            )


def _refuse_content(run_dir: Path | None) -> None:
    """Raise `RecipeError` if the folder `run_dir` holds anything, before the work starts."""
    try:
        if run_dir is not None and any(expand_path(str(run_dir)).iterdir()):
            raise RecipeError(f"--run-dir: {run_dir} is not empty (name a new folder)")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RecipeError(f"--run-dir: {run_dir} cannot be used: {error.strerror} (name another)") from None


def _create_folder(name: str, run_dir: Path | None) -> RunDir:
    """Create and return the folder of the results. Raise `RecipeError` on failure."""
    if run_dir is None:
        return RunDir.claim(f"probe-{name}", datetime.now())
    folder = expand_path(str(run_dir))
    try:
        make_folder(folder, parents=True)
    except OSError as error:
        raise RecipeError(f"--run-dir: {folder} cannot be made: {error.strerror} (name another)") from None
    return RunDir(folder)


def _load(loaded: LoadedRecipe, run: RunDir | None, options: ProbeOptions) -> tuple["Backbone", "Datasets"]:
    """Return the model and the datasets as it takes them. Raise `DataError` for several labels per image."""
    from paceline.core.dataset import Datasets
    from paceline.data.sources.folds import build_run_datasets
    from paceline.data.sources.statistics import measure_statistics, needs_statistics, with_statistics
    from paceline.inference.probe.backbone import load_run_backbone, load_weights_backbone

    recipe, data = loaded.recipe, loaded.recipe.data
    skip_bad = data.on_bad_image == "skip"
    datasets = build_run_datasets(data, may_download=True, skip_bad=skip_bad)
    info = datasets.train.info
    if info.targets is not None:
        raise DataError(
            f"data.source: {info.name} has several or soft labels per image, and probe needs one class per image "
            "(name a dataset of single labels)"
        )
    if run is not None:
        backbone, *splits = load_run_backbone(
            run, recipe, datasets.train, datasets.val, options.checkpoint, trust_code=options.trust_code
        )
        return backbone, Datasets(*splits)
    if needs_statistics(info, data):
        datasets = with_statistics(datasets, measure_statistics(datasets.train, skip_bad=skip_bad))
    return load_weights_backbone(recipe, datasets.train.info), datasets


def _write_reference(
    loaded: LoadedRecipe, run: RunDir | None, backbone: "Backbone", reference: "Reference"
) -> tuple[str, list[str]]:
    """Write what `predict --reject` needs into `run`; return the path, "" without one, and notes."""
    if run is None:
        return "", []
    if any(path.startswith("data.source") for path in filter(loaded.is_from_command_line, loaded.stack.origins)):
        return "", [f"{printable(run.path)}: keeps its reference for predict --reject, as this is another dataset."]
    try:
        reference.write(run.reference)
    except OSError as error:  # such as another user's run
        return "", [f"{printable(run.reference)}: cannot be written: {error.strerror} (predict --reject needs it)"]
    return printable(run.reference), [
        "The model was trained on these images and labels: its features separate them better than new images, and may "
        "hide labels that are wrong. Probe with a model trained on other images to find those."
    ]


def _subset_notes(splits: "ProbedSplits", limit: int) -> list[str]:
    total, num = sum(map(len, splits.sources)), len(splits)
    if num == total:
        return []
    return [f"{num:,} of {count(total, 'image')} were probed, a fixed random subset (--images {limit}): duplicates of "
            "the others are not found."]  # fmt: skip


def _show(
    result: ProbeResult, folder: RunDir, datasets: "Datasets", cache: "FeatureCache | None", *, as_json: bool
) -> None:
    """Write the page, and print the result."""
    from paceline.report.probe_page import build_probe_page, pictured_images
    from paceline.report.render_terminal import print_page
    from paceline.report.write import render_page

    sources: dict[str, Source] = {each.info.split: each for each in (datasets.train, datasets.val)}
    thumbnails = {
        (image.split, image.index): _data_url(sources[image.split], image) for image in pictured_images(result)
    }
    page = build_probe_page(result, printable(folder.path.resolve().name), thumbnails)
    write_atomic(folder.report, render_page(folder.path, page))
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    print_page(page)
    print(f"report: {printable(folder.report)}")
    if cache is not None:
        used = sum(stat.st_size for stat in cache.list_files().values())
        print(f"features: {printable(cache.folder)} ({size(used)})")


def _data_url(source: "Source", image: ProbedImage) -> str:
    from paceline.training.eval_outputs import read_image
    from paceline.training.thumbnails import encode_thumbnail, to_data_url

    return to_data_url(*encode_thumbnail(read_image(source, image.index)))

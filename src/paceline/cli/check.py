"""`paceline check`: check data, labels, time, memory and disk space before a long run."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.cli.args import count_ranks, split_recipe_args
from paceline.cli.doctor import FAILED_CODE, DoctorSection, find_run, finding_rows
from paceline.cli.experiment import refuse_launcher
from paceline.cli.options import CheckOptions
from paceline.cli.progress_output import DataProgress
from paceline.cli.ranks import refuse_too_many
from paceline.cli.start_line import announce, describe_hardware
from paceline.cli.tables import print_rows
from paceline.core.errors import DataError, PacelineError
from paceline.core.host import usable_cores
from paceline.core.run_dir import RunDir
from paceline.core.units import count, seconds
from paceline.data.files import printable
from paceline.lab.doctor.check import DoctorFinding, failure_by, find_worst_state, ok
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data

if TYPE_CHECKING:
    from paceline.core.dataset import Datasets

_BATCH: Final = 256
"""Images whose class is predicted at once."""


def check(options: CheckOptions) -> int:
    """Run `paceline check`, and return the exit code: 1 if a finding is an error."""
    refuse_launcher("check")
    loaded = with_weights_defaults(load(*split_recipe_args(options.args)))
    require_consent(loaded, trust_code=options.trust_code)
    ranks = count_ranks(options.ranks, os.environ)
    refuse_too_many(ranks, loaded.recipe.parallel.device, oversubscribe=options.oversubscribe)
    recipe = resolve_batch(loaded.recipe, ranks)
    then = f"; it then trains for {options.seconds:g} s" if options.seconds else ""
    announce(f"checking {loaded.name} for {count(ranks, 'rank')}, {describe_hardware(recipe.parallel.device)}{then}")
    run = RunDir.existing(options.run) if options.run is not None else find_run(options.args)
    sections, findings = [], list[DoctorFinding]()
    for section, found in _check_all(recipe, ranks, run, options):
        sections.append(section)
        findings += found
        if not options.as_json:
            print_rows(section.rows, section.title)
    state = find_worst_state(findings)
    if options.as_json:
        values = {"state": state, "recipe": loaded.name, "recipe_hash": recipe.hash, "ranks": ranks}
        print(json.dumps({**values, **{section.key: section.values for section in sections}}, indent=2))
    else:
        print(_summarize(findings))
    return FAILED_CODE if state == "error" else 0


def _summarize(findings: Sequence[DoctorFinding]) -> str:
    numbers = {state: sum(each.state == state for each in findings) for state in ("error", "warning")}
    return ", ".join(count(number, state) for state, number in numbers.items() if number) or "all is well"


def _check_all(
    recipe: Recipe, ranks: int, run: RunDir | None, options: CheckOptions
) -> Iterator[tuple[DoctorSection, list[DoctorFinding]]]:
    from paceline.data.sources.folds import build_run_datasets

    try:
        datasets = build_run_datasets(recipe.data, may_download=False, skip_bad=True)
    except DataError as error:
        yield _section("data", "data", [DoctorFinding("data", *failure_by(error))], {})
        return
    yield _check_data(recipe.data, datasets, options)
    if run is not None:
        yield _check_labels(run, datasets, options)
    if options.seconds:
        yield _check_run(recipe, ranks, options)


def _section(
    key: str, title: str, findings: list[DoctorFinding], values: dict[str, Any]
) -> tuple[DoctorSection, list[DoctorFinding]]:
    plain = {"findings": [each.to_dict() for each in findings], **values}
    return DoctorSection(key, title, plain, finding_rows(findings)), findings


def _check_data(
    section: Data, datasets: "Datasets", options: CheckOptions
) -> tuple[DoctorSection, list[DoctorFinding]]:
    from paceline.lab.check.data import check_classes, check_images, copies_to_dict
    from paceline.lab.check.near_duplicates import find_near_duplicates

    with DataProgress("images") as progress:
        scan = find_near_duplicates(datasets, most=options.images, threads=usable_cores(), progress=progress)
    skips_bad = section.on_bad_image == "skip"
    findings = [*check_classes(datasets), *check_images(scan, datasets, skips_bad=skips_bad)]
    return _section("data", f"data: {section.source.name}", findings, {"copies": copies_to_dict(scan, datasets)})


def _check_labels(
    run: RunDir, datasets: "Datasets", options: CheckOptions
) -> tuple[DoctorSection, list[DoctorFinding]]:
    import numpy as np
    import torch

    from paceline.core.label_errors import find_label_errors
    from paceline.core.random import permutation
    from paceline.inference.classifier import load_classifier
    from paceline.lab.check.data import check_labels, labels_to_list
    from paceline.lab.check.near_duplicates import ImageRef

    try:
        classifier = load_classifier(run.path, trust_code=options.trust_code)
        if classifier.threshold is not None or datasets.val.info.targets is not None:
            outcome = ok("not checked: the images have several labels or soft ones")
            return _section("labels", "labels", [DoctorFinding("labels", *outcome)], {})
        if classifier.classes != datasets.val.info.class_names:
            raise DataError(f"--run: {run.path} was trained on other classes (name a run on this dataset)")
        source, num_images = datasets.val, len(datasets.val)
        indices = np.sort(permutation(0, 0, num_images)[: options.images]).tolist()
        images, rows = list[ImageRef](), list[Any]()
        with DataProgress("images") as progress, ThreadPoolExecutor(usable_cores()) as pool:
            for start in range(0, len(indices), _BATCH):
                answers = pool.map(partial(_read_image, classifier, source), indices[start : start + _BATCH])
                if read := [each for each in answers if each is not None]:
                    images += [image for _, image in read]
                    rows.append(classifier.probabilities(torch.stack([pixels for pixels, _ in read])).cpu().numpy())
                progress(min(start + _BATCH, len(indices)), len(indices))
    except PacelineError as error:
        return _section("labels", "labels", [DoctorFinding("labels", *failure_by(error))], {})
    probabilities = np.concatenate(rows) if rows else np.zeros((0, len(classifier.classes)))
    errors = find_label_errors(probabilities, np.array([image.label for image in images], dtype=np.int64))
    finding = check_labels(errors, images, printable(run.path), source)
    return _section("labels", "labels", [finding], {"likely_wrong": labels_to_list(errors, images, source)})


def _read_image(classifier: Any, source: Any, index: int) -> tuple[Any, Any] | None:
    """Return an image [C, H, W], preprocessed, with its name and label; None if it cannot be read."""
    from paceline.data.decode_array import encode_pixels
    from paceline.lab.check.near_duplicates import ImageRef

    try:
        content, label = source.read(index)
        data = content if isinstance(content, bytes) else encode_pixels(content)
        pixels = classifier.image(data, source.name_of(index))
    except DataError:
        return None
    return pixels, ImageRef("val", index, source.name_of(index), label)


def _check_run(recipe: Recipe, ranks: int, options: CheckOptions) -> tuple[DoctorSection, list[DoctorFinding]]:
    from paceline.lab.check.run import check_run, measure_run
    from paceline.lab.runner import interrupt_on_signals

    folder = options.run_dir.expanduser() if options.run_dir else Path("runs")
    with interrupt_on_signals():
        found = measure_run(recipe, ranks, folder, options.seconds, oversubscribe=options.oversubscribe)
    values: dict[str, Any] = {"disk_bytes": found.disk_bytes, "free_bytes": found.free_bytes}
    if found.result is not None:
        values |= {"startup_s": found.result.time.startup_s, "wall_s": found.result.time.wall_s}
    values["estimate"] = found.estimate.model_dump() if found.estimate else None
    title = f"run, measured for {seconds(found.result.time.wall_s)}" if found.result is not None else "run"
    return _section("run", title, [*check_run(found)], values)

"""`paceline data verify`: decode every image and list bad ones and duplicates, or compare a pack with its source."""

import json
from dataclasses import asdict
from typing import Any

from paceline.cli.data_source import DataRequest, count_workers, read_source
from paceline.cli.options import DataVerifyOptions
from paceline.cli.progress_output import DataProgress
from paceline.core.dataset import ArraySource, Datasets, Split
from paceline.core.errors import DataError
from paceline.core.units import count, per_second
from paceline.data.convert.verify_pack import PackComparison, compare_pack
from paceline.data.sources.build import build_datasets
from paceline.data.verify import BadSplitImage, DuplicatePair, VerifyProgress
from paceline.data.verify import verify_images as check
from paceline.recipe.schema.source import SourceSection


def verify_data(options: DataVerifyOptions) -> int:
    """Run `paceline data verify`, and return the exit code. Raise `DataError` for a bad image."""
    src, overrides = (options.args[0], options.args[1:]) if options.args else (None, [])
    num_workers = count_workers(options.workers)
    if options.against is not None:
        sections = read_source(src, []).source, read_source(options.against, overrides, trust_code=options.trust_code)
        return _compare_pack(*sections, num_workers, as_json=options.as_json)
    data = read_source(src, overrides, trust_code=options.trust_code).data
    datasets = build_datasets(data.source, may_download=False, skip_bad=True)
    if isinstance(datasets.train, ArraySource) and isinstance(datasets.val, ArraySource):
        _print_verified(
            datasets,
            VerifyProgress(_num_images(datasets)),
            "held in memory, nothing to decode",
            as_json=options.as_json,
        )
        return 0
    result = VerifyProgress(0)
    with DataProgress("images") as progress:
        for result in check(datasets, num_workers, data.worker_timeout):
            progress(result.images, _num_images(datasets), f"{len(result.bad):,} bad")
        images_per_s = result.images / progress.elapsed_s
    _print_verified(
        datasets,
        result,
        f"{per_second(images_per_s)} images/s, {count(num_workers, 'worker')}",
        as_json=options.as_json,
    )
    if result.bad:
        raise DataError(
            f"{result.bad[0].image.name}: {result.bad[0].image.reason} ({count(len(result.bad), 'bad image')} of "
            f"{result.images:,}; remove or replace them, or train with data.on_bad_image=skip)"
        )
    return 0


def _num_images(datasets: Datasets) -> int:
    return len(datasets.train) + len(datasets.val)


def _print_verified(datasets: Datasets, result: VerifyProgress, how: str, *, as_json: bool) -> None:
    copies = result.duplicates
    pairs = [_pair_values(pair, datasets) for pair in copies.examples] if copies else []
    if as_json:
        values = {"images": result.images, "bad": [_bad_file_values(file) for file in result.bad]}
        counts = {name: value for name, value in asdict(copies).items() if name != "examples"} if copies else {}
        print(json.dumps({**values, "copies": {**counts, "first": pairs} if copies else None}, indent=2))
        return
    for file in result.bad:
        print(f"{file.split:5}  {file.image.name}: {file.image.reason}")
    for pair in pairs:
        print(f"same   {_pair_text(pair)}")
    print(f"{count(result.images, 'image')}, {len(result.bad):,} bad ({how})")
    if copies and copies.images:
        verb = "has" if copies.images == 1 else "have"
        print(
            f"{count(copies.images, 'image')} {verb} duplicates, {copies.samples:,} samples in all: "
            f"{copies.across_splits:,} in both splits, {copies.in_two_classes:,} in two classes"
        )


def _pair_values(pair: DuplicatePair, datasets: Datasets) -> dict[str, Any]:
    num_train = len(datasets.train)
    samples: list[tuple[Split, str]] = [
        ("train", datasets.train.name_of(number))
        if number < num_train
        else ("val", datasets.val.name_of(number - num_train))
        for number in (pair.first, pair.second)
    ]
    return {
        "images": [{"split": split, "path": name} for split, name in samples],
        "in_both_splits": pair.in_both_splits,
        "in_two_classes": pair.in_two_classes,
    }


def _pair_text(pair: dict[str, Any]) -> str:
    named = " and ".join(f"{image['path']} ({image['split']})" for image in pair["images"])
    kinds = {"in both splits": pair["in_both_splits"], "in two classes": pair["in_two_classes"]}
    kind_text = ", ".join(kind for kind, is_so in kinds.items() if is_so)
    return f"{named}: {kind_text}" if kind_text else named


def _bad_file_values(file: BadSplitImage) -> dict[str, str | int]:
    return {"split": file.split, "index": file.image.index, "path": file.image.name, "reason": file.image.reason}


def _compare_pack(packed: SourceSection, source: DataRequest, workers: int, *, as_json: bool) -> int:
    skip_bad = source.data.on_bad_image == "skip"
    ours = build_datasets(packed, may_download=False, skip_bad=True)
    theirs = build_datasets(source.source, may_download=False, skip_bad=skip_bad)
    with DataProgress("images") as progress:
        result = compare_pack(theirs, ours, progress, workers)
    if as_json:
        faults = [asdict(fault) for fault in result.faults]
        print(json.dumps({**asdict(result), "faults": faults}, indent=2))
    else:
        _print_comparison(result)
    if result.faults:
        first = result.faults[0]
        raise DataError(f"{first.name}: {first.what} ({first.split}[{first.index}]; pack the source again)")
    return 0


def _print_comparison(result: PackComparison) -> None:
    for fault in result.faults:
        print(f"{fault.split:5}  {fault.name}: {fault.what}")
    if result.num_faults > len(result.faults):
        print(f"and {result.num_faults - len(result.faults):,} more")
    rest = result.images - result.exact - result.num_faults
    others = f", {rest:,} scaled down when packed (mean difference {result.mean_difference:.2f} of 255)" if rest else ""
    print(
        f"{count(result.images, 'image')}: labels, names and order compared; {result.exact:,} with exactly the "
        f"same pixels{others}, {result.num_faults:,} different (decoded by {' and '.join(result.decoders)})"
    )

"""`paceline export`: write a run's classifier as ONNX, torch.export, safetensors or a state dict."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from paceline.cli.evaluate import warn_missing_final, warn_uncalibrated
from paceline.cli.options import ExportOptions
from paceline.cli.start_line import announce
from paceline.cli.tables import print_rows
from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.imports import fast_imports
from paceline.core.results import printable_class_name
from paceline.core.run_dir import RunDir
from paceline.core.units import size
from paceline.data.files import expand_path
from paceline.recipe.load import load

if TYPE_CHECKING:
    from paceline.inference.export import ExportResult


def export(options: ExportOptions) -> int:
    """Run `paceline export`, and return the exit code."""
    RunDir.existing(options.run)
    with announce(f"exporting {options.run}"), fast_imports():
        from paceline.inference.export import ExportFormatName, build_export_format, check_out_path, export_classifier

    names, format = get_args(ExportFormatName), options.format
    if format not in names:
        raise RecipeError(f"--format: {format!r} is not known{suggest_similar(format, names)} (use {', '.join(names)})")
    if options.with_preprocessing and format in ("safetensors", "state_dict"):
        raise RecipeError(f"--preprocessing: has no effect on {format}, which holds only weights (leave it out)")
    run, out = RunDir.existing(options.run).path, expand_path(str(options.out))
    form = build_export_format(cast(ExportFormatName, format), load(str(run)).recipe.model)
    check_out_path(out, form.suffix)

    from paceline.inference.classifier import load_classifier, with_image_size

    classifier = load_classifier(run, options.checkpoint, device="cpu", trust_code=options.trust_code)
    if options.checkpoint == "last":
        warn_missing_final(RunDir(run), classifier.checkpoint)
    warn_uncalibrated(RunDir(run), classifier)
    if options.image_size is not None:
        classifier = with_image_size(classifier, options.image_size)
    exported = export_classifier(classifier, form, out, with_preprocessing=options.with_preprocessing)
    show_export(exported, classifier.checkpoint, format=format, as_json=options.as_json)
    return 0


def show_export(exported: "ExportResult", checkpoint: Path, *, format: str, as_json: bool) -> None:
    """Print the path, the format, and the comparison with PyTorch."""
    from paceline.inference.export import PARITY_TOLERANCE

    parity = exported.parity
    if as_json:
        values = {
            "format": format,
            "path": str(exported.path),
            "card": str(exported.card),
            "bytes": exported.num_bytes,
            "checkpoint": checkpoint.name,
            "parity": {
                **{name: value for name, value in asdict(parity).items() if value is not None},
                "tolerance": PARITY_TOLERANCE,
            },
            **dict(exported.facts),
        }
        print(json.dumps(values, indent=2))
        return
    agreed = f"top-5 on {parity.top5}" if parity.labels is None else f"labels on {parity.labels}"
    rows = [
        *exported.facts,
        (
            "parity",
            f"logits differ from PyTorch's by at most {parity.difference:.2g} of the largest logit (limit "
            f"{PARITY_TOLERANCE:g}) on {parity.num_images} {parity.of}; the same {agreed}",
        ),
        ("size", size(exported.num_bytes)),
    ]
    print_rows(rows, f"{checkpoint.parent.parent.name}, {checkpoint.name} as {format}")
    print(f"exported: {printable_class_name(str(exported.path))}")
    print(f"model card, with fields to fill in: {printable_class_name(str(exported.card))}")

"""`paceline export`: write a run's classifier to a file that other programs load."""

from pathlib import Path
from typing import cast, get_args

from paceline.cli.evaluate import warn_missing_final
from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.rundir import RunDir
from paceline.data.sources.places import expand_path
from paceline.recipe.load import load


def export(
    run: Path,
    *,
    format: str,
    out: Path,
    checkpoint: str,
    with_preprocessing: bool,
    image_size: int | None = None,
    own_code: bool = False,
    as_json: bool,
) -> int:
    """Run `paceline export`, and return the exit code.

    `format` is one of `ExportFormatName`, `out` the file or folder, `checkpoint` last, best or a step. `image_size` overrides
    the size of the run's evaluation, in pixels.
    """
    from paceline.cli.show_export import show_export
    from paceline.inference.export import ExportFormatName, build_export_format, check_out_path, export_classifier

    names = get_args(ExportFormatName)
    if format not in names:
        raise RecipeError(f"--format: {format!r} is not known{suggest_similar(format, names)} (use {', '.join(names)})")
    if with_preprocessing and format in ("safetensors", "state_dict"):
        raise RecipeError(f"--preprocessing: has no effect on {format}, which holds only weights (leave it out)")
    run, out = RunDir.existing(run).path, expand_path(str(out))
    form = build_export_format(cast(ExportFormatName, format), load(str(run)).recipe.model)
    check_out_path(out, form.suffix)

    from paceline.inference.classifier import load_classifier, with_image_size

    classifier = load_classifier(run, checkpoint, device="cpu", own_code=own_code)
    if checkpoint == "last":
        warn_missing_final(RunDir(run), classifier.checkpoint)
    classifier = classifier if image_size is None else with_image_size(classifier, image_size)
    exported = export_classifier(classifier, form, out, with_preprocessing=with_preprocessing)
    show_export(exported, classifier.checkpoint, format=format, as_json=as_json)
    return 0

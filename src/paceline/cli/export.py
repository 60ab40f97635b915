"""`paceline export`: write a run's classifier to a file that other programs load."""

from pathlib import Path
from typing import cast, get_args

from paceline.cli.evaluate import note_missing_end
from paceline.core.errors import RecipeError, near_miss
from paceline.core.rundir import RunDir
from paceline.data.sources.places import expanded
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

    `format` is one of `FormName`, `out` the file or folder, `checkpoint` last, best or a step. `image_size` overrides
    the size of the run's evaluation, in pixels.
    """
    from paceline.cli.show_export import show_export
    from paceline.inference.export import FormName, build_form, check_place, export_classifier

    names = get_args(FormName)
    if format not in names:
        raise RecipeError(f"--format: {format!r} is not known{near_miss(format, names)} (use {', '.join(names)})")
    if with_preprocessing and format in ("safetensors", "state_dict"):
        raise RecipeError(f"--preprocessing: has no effect on {format}, which holds only weights (leave it out)")
    run, out = RunDir.existing(run).path, expanded(str(out))
    form = build_form(cast(FormName, format), load(str(run)).recipe.model)
    check_place(out, form.suffix)

    from paceline.inference.classifier import at_size, load_classifier

    classifier = load_classifier(run, checkpoint, device="cpu", own_code=own_code)
    if checkpoint == "last":
        note_missing_end(RunDir(run), classifier.checkpoint)
    classifier = classifier if image_size is None else at_size(classifier, image_size)
    exported = export_classifier(classifier, form, out, with_preprocessing=with_preprocessing)
    show_export(exported, classifier.checkpoint, format=format, as_json=as_json)
    return 0

"""Export a classifier: write it, verify the written file, then publish it with a model card."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, assert_never

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import write_new
from paceline.inference.classifier import Classifier
from paceline.inference.export_model import (
    OUTPUT_NAME,
    ExportFormat,
    ExportModel,
    ExportParity,
    build_export_model,
    check_parity,
    load_parity_images,
    measure_parity,
)
from paceline.inference.formats import HubFormat, OnnxFormat, StateDictFormat, TorchExportFormat
from paceline.inference.model_card import CheckpointRecord, read_checkpoint_record, render_model_card
from paceline.recipe.schema.model import Model

ExportFormatName = Literal["onnx", "torch", "safetensors", "state_dict"]


@dataclass(frozen=True)
class ExportResult:
    """The exported file or folder, its model card, size in bytes, parity and facts about it."""

    path: Path
    card: Path
    num_bytes: int
    parity: ExportParity
    facts: tuple[tuple[str, str], ...]


def build_export_format(name: ExportFormatName, section: Model) -> ExportFormat:
    """Return the export format `name` for a model built from a recipe's `section`.

    Raise `RecipeError` if a library that it needs is not installed.
    """
    match name:
        case "onnx":
            return OnnxFormat()
        case "torch":
            return TorchExportFormat()
        case "safetensors":
            return HubFormat(section.name)
        case "state_dict":
            return StateDictFormat(section)
    assert_never(name)


def check_out_path(out: Path, suffix: str) -> None:
    """Raise `RecipeError` if `out` exists, or lacks the format's `suffix` (empty for a folder)."""
    if out.suffix != suffix and (suffix or out.suffix in (".safetensors", ".onnx", ".pt2", ".pth")):
        kind = f"a file ending in {suffix}" if suffix else "a folder"
        raise RecipeError(f"--out: {out} does not match --format (name {kind})")
    for path in {out, model_card_path(out, suffix)}:
        if os.path.lexists(path):
            raise _exists_error(path)


def model_card_path(out: Path, suffix: str) -> Path:
    """Return the path of the model card of `out`: in the folder, or beside the file."""
    return out.with_name(f"{out.name}.md") if suffix else out / "README.md"


def export_classifier(
    classifier: Classifier, form: ExportFormat, out: Path, *, with_preprocessing: bool
) -> ExportResult:
    """Write `classifier` to `out` in format `form` with its model card, and return the result.

    Raise `RecipeError` like `check_out_path`, also if `out` appears meanwhile, and `PacelineError` for a model that
    cannot be exported or whose export differs from PyTorch. Nothing is left behind then.
    """
    check_out_path(out, form.suffix)
    sample = load_parity_images(classifier)
    network = build_export_model(classifier, with_preprocessing=with_preprocessing)
    record = _note_other_image_size(classifier, read_checkpoint_record(classifier.run, classifier.checkpoint))
    # Users must never see an incomplete or unverified file, so write into a hidden folder first.
    with _temporary_folder(out) as unseen:
        written = unseen / out.name
        with _one_line_errors(f"--out: {out}", "cannot be written", "name another, make room, or use another --format"):
            form.write(network, classifier, written)
        with _one_line_errors(f"--format: {out.name}", "cannot be read back", "use another --format"):
            parity = measure_parity(classifier, network, form.open(written), sample)
        check_parity(parity, f"--format: {out.name}")
        text = render_model_card(
            classifier,
            record,
            name=out.stem if form.suffix else out.name,
            library=form.library,
            input_description=network.input_description,
            usage_code=form.usage(out.name),
        )
        card = model_card_path(written, form.suffix)
        with _one_line_errors(f"--out: {out}", "cannot be written", "name another, or make room"):
            write_new(card, text)
            num_bytes = sum(each.stat().st_size for each in (written.rglob("*") if written.is_dir() else (written,)))
            _publish({card: model_card_path(out, form.suffix), written: out} if form.suffix else {written: out})
    return ExportResult(
        out,
        model_card_path(out, form.suffix),
        num_bytes,
        parity,
        (*_describe_signature(network, classifier), *form.facts),
    )


def _note_other_image_size(classifier: Classifier, record: CheckpointRecord) -> CheckpointRecord:
    evaluation, before, now = record.evaluation, classifier.evaluated_image_size, classifier.preprocessing.image_size
    if evaluation is None or before is None:
        return record
    description = (
        f"{evaluation.description} at {before} x {before} pixels (not measured at the {now} x {now} of this file)"
    )
    return replace(record, evaluation=replace(evaluation, description=description))


def _describe_signature(network: ExportModel, classifier: Classifier) -> tuple[tuple[str, str], ...]:
    return (("images", network.input_description), (OUTPUT_NAME, f"float32 [batch, {len(classifier.classes)}]"))


def _exists_error(path: Path) -> RecipeError:
    return RecipeError(f"--out: {path} already exists (name another, or remove it)")


def _publish(paths: Mapping[Path, Path]) -> None:
    # All or none, overwriting nothing: claim each path by creating it first.
    claimed: list[Path] = []
    try:
        for written, path in paths.items():
            try:
                path.mkdir() if written.is_dir() else write_new(path, b"")
            except FileExistsError:
                raise _exists_error(path) from None
            claimed.append(path)
        for written, path in paths.items():
            written.replace(path)
    except BaseException:
        for path in claimed:
            _remove_claimed(path)
        raise


def _remove_claimed(path: Path) -> None:
    with suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()


@contextmanager
def _one_line_errors(what: str, happened: str, fix: str) -> Iterator[None]:
    # Libraries differ in how they report even a full disk.
    try:
        yield
    except PacelineError:
        raise
    except OSError as error:
        raise PacelineError(f"{what} {happened}: {error.strerror or error} ({fix})") from None
    except Exception as error:
        first = " ".join(str(error).split())[:150]
        raise PacelineError(f"{what} {happened}: {type(error).__name__}: {first} ({fix})") from error


@contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
    # Beside `out`, so that files can be renamed into place.
    with _one_line_errors(f"--out: {out}", "cannot be written", "name another"):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""Export a classifier: write it, verify the written file, then publish it with a model card."""

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

import torch
from torch import Tensor

from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.core.files import write_new
from paceline.data.loaders.build import LoaderOptions, build_eval_loader
from paceline.data.order import EvalShard
from paceline.data.sources.build import build_validation
from paceline.data.transfer import DeviceTransfer
from paceline.inference.classifier import Classifier
from paceline.inference.formats import (
    OUTPUT_NAME,
    ExportFormat,
    ExportModel,
    HubFormat,
    LogitsFunction,
    OnnxFormat,
    StateDictFormat,
    TorchExportFormat,
)
from paceline.inference.model_card import read_checkpoint_record, render_model_card
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.schema.model import Model

ExportFormatName = Literal["onnx", "torch", "safetensors", "state_dict"]
# Relative to the largest logit, or to 1 if that is smaller. Another summation order of float32 products changes 1e-6 to
# 1e-5 of it, a wrong layer 1e-2 and more.
PARITY_TOLERANCE = 1e-4
NUM_PARITY_IMAGES = 32
_SEED = 0


@dataclass(frozen=True)
class ParityImages:
    """At least one image to compare on, [n, c, h, w] as in a batch, and a description of the images."""

    images: Tensor
    description: str


@dataclass(frozen=True)
class ExportParity:
    """The largest difference of logits, relative to the largest logit or 1, and the images compared.

    `top5` is the number of images with the same five top classes in order (all classes if there are fewer), and
    `labels` that with the same classes above the threshold, None for one label per image.
    """

    difference: float
    num_images: int
    of: str
    top5: int
    labels: int | None = None

    @property
    def is_within_tolerance(self) -> bool:
        """Whether the difference is within tolerance; NaN is not."""
        return self.difference <= PARITY_TOLERANCE


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
    model = ExportModel(classifier, with_preprocessing=with_preprocessing, is_calibrated=form.has_graph)
    record = read_checkpoint_record(classifier.run, classifier.checkpoint)
    # Users must never see an incomplete or unverified file, so write into a hidden folder first.
    with _temporary_folder(out) as unseen:
        written = unseen / out.name
        with _one_line_errors(f"--out: {out}", "cannot be written", "name another, make room, or use another --format"):
            form.write(model, written)
        with _one_line_errors(f"--format: {out.name}", "cannot be read back", "use another --format"):
            parity = measure_parity(model, form.open(written), sample)
        check_parity(parity, f"--format: {out.name}")
        text = render_model_card(
            classifier,
            record,
            name=out.stem if form.suffix else out.name,
            library=form.library,
            input_description=model.input_description,
            usage_code=form.usage(out.name, classifier.threshold),
            is_calibrated=form.has_graph,
        )
        card = model_card_path(written, form.suffix)
        with _one_line_errors(f"--out: {out}", "cannot be written", "name another, or make room"):
            write_new(card, text)
            num_bytes = sum(each.stat().st_size for each in (written.rglob("*") if written.is_dir() else (written,)))
            _publish({card: model_card_path(out, form.suffix), written: out} if form.suffix else {written: out})
    signature = (("images", model.input_description), (OUTPUT_NAME, f"float32 [batch, {len(classifier.classes)}]"))
    return ExportResult(out, model_card_path(out, form.suffix), num_bytes, parity, (*signature, *form.facts))


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


def load_parity_images(classifier: Classifier) -> ParityImages:
    """Return up to `NUM_PARITY_IMAGES` images of the run's validation split, always the same ones.

    Use noise if there are none, and say why. Raise `RecipeError` for a plugin dataset that may not run.
    """
    require_consent(load(str(classifier.run)), trust_code=classifier.trust_code, paths=("data.source",))
    try:
        images = _load_validation_images(classifier)
    except (DataError, RecipeError) as error:
        preprocessing = classifier.preprocessing
        shape = (NUM_PARITY_IMAGES, preprocessing.channels, preprocessing.image_size, preprocessing.image_size)
        noise = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(_SEED))
        if preprocessing.pixel_format.is_wide:
            noise = noise / 255
        return ParityImages(noise, f"noise images, as there are no validation images: {' '.join(str(error).split())}")
    return ParityImages(images, "validation images")


def measure_parity(model: ExportModel, compute_logits: LogitsFunction, sample: ParityImages) -> ExportParity:
    """Compare `compute_logits`, which takes the input of `model`, with the classifier in float32.

    Raise `PacelineError` if the classifier's own logits are NaN or infinite.
    """
    num_images = len(sample.images)
    images = sample.images[torch.arange(max(NUM_PARITY_IMAGES, num_images)) % num_images]
    expected = _reference_logits(model.classifier, images) / model.temperature
    if not expected.isfinite().all():
        name = model.classifier.checkpoint.name
        raise PacelineError(f"--checkpoint: {name}: the model's logits are NaN or infinite (use another checkpoint)")
    # One image, then 31 or more, repeating images if need be, detects a fixed batch size.
    inputs = model.prepare_inputs(images)
    with torch.inference_mode():
        actual = torch.cat([compute_logits(inputs[:1]), compute_logits(inputs[1:])])
    scale = max(1.0, float(expected.abs().max()))
    first = min(5, expected.shape[1])
    agree = (expected.topk(first).indices == actual.topk(first).indices).all(dim=1)[:num_images]
    difference = float((expected - actual).abs().max()) / scale
    labels, threshold = None, model.classifier.threshold
    if threshold is not None:
        are_equal = (expected.sigmoid() > threshold) == (actual.sigmoid() > threshold)
        labels = int(are_equal.all(dim=1)[:num_images].sum())
    return ExportParity(difference, num_images, sample.description, int(agree.sum()), labels)


def check_parity(parity: ExportParity, what: str) -> None:
    """Raise `PacelineError` if the exported file `what` is not equivalent to the model."""
    if not parity.is_within_tolerance:
        raise PacelineError(
            f"{what}: its logits differ from PyTorch's by up to {parity.difference:.2g} of the largest on "
            f"{parity.num_images} {parity.of}, more than {PARITY_TOLERANCE:g} "
            "(use another --format; nothing was written)"
        )


def _reference_logits(classifier: Classifier, images: Tensor) -> Tensor:
    # The classifier's own code, which the exported model does not share.
    model = copy.deepcopy(classifier.model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)
    preprocessing = classifier.preprocessing
    transfer = DeviceTransfer(
        torch.device("cpu"),
        torch.float32,
        preprocessing.mean,
        preprocessing.std,
        torch.contiguous_format,
        pixels=preprocessing.pixels,
    )
    with torch.inference_mode():
        logits: Tensor = model(transfer.normalize(images))
    return logits


def _load_validation_images(classifier: Classifier) -> Tensor:
    data = classifier.recipe.data
    source = build_validation(data.source, skip_bad=True)
    number = min(NUM_PARITY_IMAGES, len(source))
    if not number:
        raise DataError("the validation split is empty")
    shard = EvalShard(number, number, split_size=len(source))
    options = LoaderOptions(workers=0, pin_memory=False)
    skipping = data.model_copy(update={"on_bad_image": "skip"})
    loader = build_eval_loader(skipping, source, shard, classifier.preprocessing.image_size, options)
    images = torch.cat([batch.images for batch in loader.batches(0, shard.num_batches)])
    if not len(images):
        raise DataError(f"none of {number} that were drawn can be read (paceline data verify lists all)")
    return images

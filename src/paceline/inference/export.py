"""Export a classifier: write it in a form, ask what was written, and only then let it be seen, with its model card."""

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
from paceline.inference.card import write_card
from paceline.inference.classifier import Classifier
from paceline.inference.form import OUTPUT, Form
from paceline.inference.hub import Hub
from paceline.inference.network import Network, build_network
from paceline.inference.onnx import Onnx
from paceline.inference.parity import Parity, check, compare, sample_images
from paceline.inference.program import Program
from paceline.inference.record import Record, read_record
from paceline.inference.state_dict import StateDict
from paceline.recipe.schema.model import Model

FormName = Literal["onnx", "torch", "safetensors", "state_dict"]


@dataclass(frozen=True)
class Exported:
    """What was written: the file or folder, its card, its bytes, how it answers, and what there is to tell of it."""

    path: Path
    card: Path
    num_bytes: int
    parity: Parity
    facts: tuple[tuple[str, str], ...]


def build_form(name: FormName, section: Model) -> Form:
    """Return the form called `name` of a network that a recipe's `section` describes.

    Raise `RecipeError` where what it takes is not installed.
    """
    match name:
        case "onnx":
            return Onnx()
        case "torch":
            return Program()
        case "safetensors":
            return Hub(section.name)
        case "state_dict":
            return StateDict(section)
    assert_never(name)


def check_place(out: Path, suffix: str) -> None:
    """Raise `RecipeError` for a file that is not called as its form is (`suffix`, empty for a folder), or is there."""
    if out.suffix != suffix and (suffix or out.suffix in (".safetensors", ".onnx", ".pt2", ".pth")):
        kind = f"a file ending in {suffix}" if suffix else "a folder"
        raise RecipeError(f"--out: {out} says something else than --format does (name {kind})")
    for place in {out, card_of(out, suffix)}:
        if os.path.lexists(place):
            raise _is_there(place)


def card_of(out: Path, suffix: str) -> Path:
    """Return where the model card of `out` is: in the folder, or beside the file."""
    return out.with_name(f"{out.name}.md") if suffix else out / "README.md"


def export_classifier(classifier: Classifier, form: Form, out: Path, *, with_preprocessing: bool) -> Exported:
    """Write `classifier` to `out` in `form`, and its card; return what was written.

    Raise `RecipeError` as `check_place` does, also where something appears at `out` meanwhile, and `PacelineError` for
    a network that cannot be exported or whose export answers otherwise than PyTorch: then nothing is left behind.
    """
    check_place(out, form.suffix)
    sample = sample_images(classifier)
    network = build_network(classifier, with_preprocessing=with_preprocessing)
    record = _of_this_size(classifier, read_record(classifier.run, classifier.checkpoint))
    with _unseen(out) as unseen:
        written = unseen / out.name
        with _told(f"--out: {out}", "cannot be written", "name another, make room, or use another --format"):
            form.write(network, classifier, written)
        with _told(f"--format: {out.name}", "cannot be read back", "use another --format"):
            parity = compare(classifier, network, form.open(written), sample)
        check(parity, f"--format: {out.name}")
        text = write_card(
            classifier,
            record,
            name=out.stem if form.suffix else out.name,
            library=form.library,
            takes=network.takes,
            usage=form.usage(out.name),
        )
        card = card_of(written, form.suffix)
        with _told(f"--out: {out}", "cannot be written", "name another, or make room"):
            write_new(card, text)
            num_bytes = sum(each.stat().st_size for each in (written.rglob("*") if written.is_dir() else (written,)))
            _show({card: card_of(out, form.suffix), written: out} if form.suffix else {written: out})
    return Exported(out, card_of(out, form.suffix), num_bytes, parity, (*_ends(network, classifier), *form.facts))


def _of_this_size(classifier: Classifier, record: Record) -> Record:
    """Return `record`, of which accuracy says that it was measured at another size, where it was."""
    judged, before, now = record.judged, classifier.judged_at, classifier.preprocessing.image_size
    if judged is None or before is None:
        return record
    of = (
        f"{judged.of} at {before} x {before} pixels, another size than the {now} x {now} of this file, at which it "
        "was not measured,"
    )
    return replace(record, judged=replace(judged, of=of))


def _ends(network: Network, classifier: Classifier) -> tuple[tuple[str, str], ...]:
    return (("images", network.takes), (OUTPUT, f"float32 [batch, {len(classifier.classes)}]"))


def _is_there(place: Path) -> RecipeError:
    return RecipeError(f"--out: {place} is there already (name another, or remove it)")


def _show(places: Mapping[Path, Path]) -> None:
    """Move what was written to its names, all or nothing, and over nothing: each is claimed by making it first."""
    claimed: list[Path] = []
    try:
        for written, place in places.items():
            try:
                place.mkdir() if written.is_dir() else write_new(place, b"")
            except FileExistsError:
                raise _is_there(place) from None
            claimed.append(place)
        for written, place in places.items():
            written.replace(place)
    except BaseException:
        for place in claimed:
            _remove(place)
        raise


def _remove(place: Path) -> None:
    with suppress(OSError):
        place.rmdir() if place.is_dir() else place.unlink()


@contextmanager
def _told(what: str, happened: str, fix: str) -> Iterator[None]:
    """Make one line of whatever a library raises, as it does in ways of its own for a full disk alone."""
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
def _unseen(out: Path) -> Iterator[Path]:
    """Make a folder beside `out`, from which a file can be renamed into place, and remove it in the end."""
    with _told(f"--out: {out}", "cannot be written", "name another"):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

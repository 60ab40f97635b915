"""`paceline predict --explain`: write a page of images, each beside what the model looks at."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from paceline.core.files import write_new
from paceline.core.units import count, share
from paceline.data.files import printable
from paceline.inference.classifier import Classifier
from paceline.inference.explain import ExplainedImage, PredictionExplainer
from paceline.inference.images import UnreadableImage
from paceline.inference.predict import InputImage, Prediction
from paceline.report.document import Gallery, PageSection, ReportPage, Thumbnail
from paceline.report.render import render_html
from paceline.report.text import clean_text
from paceline.training.eval_outputs import output_dir
from paceline.training.thumbnails import encode_thumbnail, to_data_url

MAX_EXPLAINED: Final = 100
"""Images that are explained: each takes passes of its own through the model, and 20 to 60 KB of the page."""
PAGE_NAME: Final = "index.html"
_MAX_SIDE: Final = 384
_MAX_DETAILS: Final = 4
_NOTE: Final = (
    "Each image as the model sees it, beside the parts that speak for the named class: the more yellow, the more. "
    "Each map is scaled to its own maximum."
)


@contextlib.contextmanager
def explain_predictions(
    classifier: Classifier, images: Iterable[InputImage | UnreadableImage], folder: Path, layer: str
) -> Iterator[tuple[Iterable[InputImage | UnreadableImage], Callable[[Prediction | UnreadableImage], None]]]:
    """Yield `images`, of which the first are kept, and a function that writes the maps of each result into `folder`.

    At the end, write the page. Raise `RecipeError` if the folder exists or cannot be created, and for an unsuitable
    `layer`.
    """
    from paceline import __version__

    explainer = PredictionExplainer(classifier, MAX_EXPLAINED, layer)
    pictures: list[Thumbnail] = []
    with output_dir(folder, "--explain") as outputs:

        def explain(result: Prediction | UnreadableImage) -> None:
            if explained := explainer.explain(result):
                pictures.append(_write_maps(outputs.path, len(pictures) + 1, explained))

        yield explainer.keep(images), explain
        gallery = Gallery("What the model looks at", pictures, _NOTE)
        page = ReportPage(
            title=clean_text(f"{classifier.run.name}, {classifier.checkpoint.name}"),
            subtitle=[count(len(pictures), "image")],
            status="explained",
            tone="good",
            sections=[PageSection("images", "Images", [gallery])],
            paceline=__version__,
            about="Explained predictions",
            source="the model's predictions",
        )
        write_new(outputs.path / PAGE_NAME, render_html(page))
    print(f"explained: {printable(folder / PAGE_NAME)}, {count(len(pictures), 'image')}", file=sys.stderr)


def _write_maps(folder: Path, number: int, explained: ExplainedImage) -> Thumbnail:
    """Write the maps of an image, and return it with them."""
    guesses = [f"{clean_text(each.name, 60)} {share(each.probability)}" for each in explained.prediction.guesses]
    overlays = []
    for position, (guess, drawn) in enumerate(explained.maps, start=1):
        data, suffix = encode_thumbnail(drawn, _MAX_SIDE)
        write_new(folder / f"{number:03}.{position}.{suffix}", data)
        overlays.append((to_data_url(data, suffix), f"what speaks for {clean_text(guess.name, 60)}"))
    return Thumbnail(
        to_data_url(*encode_thumbnail(explained.image, _MAX_SIDE)),
        guesses[0] if guesses else "no class above the threshold",
        guesses[1 : 1 + _MAX_DETAILS],
        clean_text(printable(explained.prediction.path), 300),
        overlays,
    )

"""The line that says which code is about to run because a file names it."""

import sys

from paceline.data.sources.places import printable
from paceline.recipe.code_of_files import code_of_files
from paceline.recipe.load import Loaded


def tell_code(loaded: Loaded, under: str = "") -> None:
    """Print a note on stderr for each file of `loaded` that names code; one rank does, before anything is imported."""
    for sentence in code_of_files(loaded, under):
        print(f"note: {printable(sentence)}", file=sys.stderr)

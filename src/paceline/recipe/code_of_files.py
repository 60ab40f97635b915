"""Which code a recipe's files name: what a user is told of, as a file may be somebody else's. Imports none of it."""

from paceline.recipe.load import Loaded
from paceline.recipe.own import own_parts


def code_of_files(loaded: Loaded, under: str = "") -> tuple[str, ...]:
    """Return a sentence for each file that names code of a user's own, and the code; in the order of the fields.

    Names that the command line or a script gives are the user's own word. With `under` only fields below it count.
    """
    named: dict[str, list[str]] = {}
    for part in own_parts(loaded.recipe):
        file = loaded.stack.file_of(f"{part.path}.name")
        if file and part.path.startswith(under):
            named.setdefault(file, []).append(part.name)
    return tuple(f"runs code that {file} names: {', '.join(names)}" for file, names in named.items())

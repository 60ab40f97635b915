"""Have Griffe, which reads source code for the page of the Python interface, see two things that Python does.

`paceline.train`, the function, is shown as `paceline.train()`, as the package of its name hides it from whoever only
reads; and the fields of our values are shown as what they are made of.
"""

from typing import Any

import griffe

VERB = "paceline.train"
VALUE = "Value"


class Reading(griffe.Extension):
    """Add what is not in the source as such."""

    def __init__(self) -> None:
        super().__init__()
        self._verb: griffe.Function | None = None

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Take the function, before the package of its name is read."""
        if func.path == VERB:
            self._verb = func

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Put it back, once all is read."""
        if self._verb is not None and pkg.path == VERB.partition(".")[0]:
            pkg.members["train()"] = self._verb

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give a value the constructor that pydantic makes: its fields, by name."""
        if VALUE not in map(str, cls.bases):
            return
        fields = [
            griffe.Parameter(
                name, annotation=each.annotation, kind=griffe.ParameterKind.keyword_only, default=each.value
            )
            for name, each in cls.attributes.items()
            if each.annotation is not None and "property" not in each.labels
        ]
        own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(own, *fields)))

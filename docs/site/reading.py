"""Show the classes of results on the pages of the Python API with the fields that pydantic reads from JSON."""

from typing import Any

import griffe

BASE = "ResultModel"


class Reading(griffe.Extension):
    """Add the constructor that Griffe, which reads the source without running it, does not see."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give a result the constructor that pydantic makes: its fields, by name."""
        if BASE not in map(str, cls.bases):
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

"""The recipe's schema: one pydantic model per section; the docstring of a field is its documentation."""

from paceline.recipe.schema.recipe import Recipe

__all__ = ["Recipe"]

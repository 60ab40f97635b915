"""The recipe's schema: one pydantic model per section; each field's docstring is its documentation."""

from paceline.recipe.schema.recipe import Recipe

__all__ = ["Recipe"]

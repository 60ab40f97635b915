"""The typed recipe: the only home of defaults."""

from paceline.recipe.schema.recipe import Recipe

__all__ = ["Recipe"]

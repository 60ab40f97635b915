"""What was asked: the typed recipe, how it is loaded and varied, and the plan derived from it."""

"""Checks of `paceline doctor`."""

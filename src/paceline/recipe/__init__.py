"""Recipes: every setting of a run, read from presets, YAML files and the command line."""

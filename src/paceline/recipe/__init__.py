"""Recipes: all settings of a run, read from presets, YAML files and the command line."""

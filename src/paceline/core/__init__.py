"""Torch-free words that every other package speaks."""

"""Data convert."""

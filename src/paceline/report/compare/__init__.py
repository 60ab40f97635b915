"""Comparison of runs, from their run directories alone."""

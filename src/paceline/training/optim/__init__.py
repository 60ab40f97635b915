"""Optimizers: parameter groups, torch's optimizers, and those that torch lacks."""

"""Predict the training time on more ranks, from measured runs. Torch-free."""

"""Batch-wise random augmentation. Each sample depends on its own random draws alone."""

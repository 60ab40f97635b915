"""Data pipeline: sources, decoding, exact sample order, augmentation, and batch loaders."""

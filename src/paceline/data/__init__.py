"""From files to batches: sources, decoding, exact order, augmentation, loading."""

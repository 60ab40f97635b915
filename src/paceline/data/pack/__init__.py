"""Read packs: a dataset in one memory-mapped file, or in a folder of shards."""

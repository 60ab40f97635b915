"""Read packs: a data set in one memory-mapped file, or in a folder of shards."""

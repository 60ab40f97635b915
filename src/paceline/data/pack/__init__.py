"""A data set in one file, or a folder of shards, that is mapped and never parsed: written, read, checked, undone."""

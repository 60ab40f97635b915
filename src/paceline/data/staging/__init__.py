"""Copy the files of a dataset into memory or to a local disk for the time of a run."""

"""Copy the files of a data set into memory or to a local disk for the time of a run."""

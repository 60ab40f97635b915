"""Check the data of a recipe and the first seconds of its run, for `paceline check`."""

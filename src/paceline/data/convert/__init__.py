"""Convert data sets: into packs and LMDBs, and packs back into folders."""

"""Convert datasets: into packs and LMDBs, and packs back into folders."""

"""A run's trained network in use: loaded ready to be asked, shown images from files, and its answers ranked."""

"""The folder that `paceline watch` puts on PYTHONPATH of the processes to observe."""

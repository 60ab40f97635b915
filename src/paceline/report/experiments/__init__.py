"""Pages and tables of experiments."""

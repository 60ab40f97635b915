"""Reports of runs and experiments, as one file: HTML, Markdown or JSON."""

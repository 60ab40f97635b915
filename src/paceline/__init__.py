"""Train image classifiers in synchronous data parallel, and account for every second it took."""

__version__ = "0.1.0.dev0"

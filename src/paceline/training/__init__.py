"""Train one model: `run` composes the run, `components` builds what it needs, and `trainer` holds the loop."""

"""Train one model: `run` composes the run, `trainer` holds the loop, the other modules are what they use."""

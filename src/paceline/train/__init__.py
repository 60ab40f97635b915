"""The trainer: `run` composes a run, `engine` holds the loop."""

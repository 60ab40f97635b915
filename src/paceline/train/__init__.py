"""The trainer: one engine, the parts it runs, and the root that composes them."""

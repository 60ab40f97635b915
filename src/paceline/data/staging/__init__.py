"""The parts of staging: what a source reads from, whether there is room for it, and the copying."""

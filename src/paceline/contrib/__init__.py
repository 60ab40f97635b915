"""Optional code that has not run on its hardware. It is off by default, and the core imports it only in functions."""

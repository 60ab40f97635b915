"""Ranks: who they are, how they are started, and how they work together."""

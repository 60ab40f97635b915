"""Look at a machine or an allocation the way a run would: what it can do, and what is wrong with it."""

"""What other numbers of ranks would take, reckoned and not run: no torch, no processes."""

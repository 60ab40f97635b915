"""Types and rules that every package shares:

Units, errors, results, run directories. No torch, no other package of ours.
"""

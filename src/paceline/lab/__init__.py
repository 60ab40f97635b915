"""Measure runs: profiles, A/B tests, ladders, searches, scaling studies, and checks of the machine."""

"""How property tests search: the same examples on every machine, and no time limit that a busy one would break."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "paceline",
    derandomize=True,
    database=None,
    deadline=None,  # the limit of a test is pytest's
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("paceline")

"""The limit of open files for connections; the rendezvous itself is in `test_process_group.py` and `numerics`."""

import resource

import pytest

from paceline.parallel import rendezvous

ANY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "set_to"),
    [
        (1024, 4096, 16, None),
        (1024, 524_288, 1024, (4160, 524_288)),
        (1024, ANY, 1024, (4160, ANY)),
        (1024, 2048, 1024, (2048, 2048)),  # as far as it goes
        (ANY, ANY, 1024, None),
    ],
)
def test_the_limit_of_open_files_is_raised_for_connections_to_all_ranks(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, ranks: int, set_to: tuple[int, int] | None
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    rendezvous._allow_connections(ranks)
    assert raised == ([set_to] if set_to else [])

"""How far a data verb is, as lines and as a bar."""

import io

import pytest
from rich.console import Console

from paceline.cli.progress_output import DataProgress


@pytest.fixture
def clock():
    """Return a clock, and a list whose only number is its time."""
    time_s = [100.0]
    return lambda: time_s[0], time_s


def test_a_line_every_ten_seconds_has_speed_and_time_left(clock, capsys):
    now, time_s = clock
    with DataProgress("images", now=now) as progress:
        for at_s, done in ((105, 50), (112, 120), (115, 150), (122.5, 225)):
            time_s[0] = at_s
            progress(done, 1000, "3 bad")
    assert progress.elapsed_s == 22.5
    assert capsys.readouterr().err.splitlines() == [
        "120/1,000 images  3 bad  10 images/s  1 min 28 s left",
        "225/1,000 images  3 bad  10 images/s  1 min 18 s left",
    ]


def test_bytes_have_byte_units(clock, capsys):
    now, time_s = clock
    with DataProgress("bytes", now=now) as progress:
        time_s[0] = 110.0
        progress(10**9, 3 * 10**9)
    assert capsys.readouterr().err == "1 GB of 3 GB  100 MB/s  20 s left\n"


def test_a_bar_shows_the_same(clock):
    now, time_s = clock
    out = io.StringIO()
    with DataProgress("images", Console(file=out, force_terminal=True, width=100), now) as progress:
        time_s[0] = 102.0
        progress(20, 100)
        assert progress.elapsed_s == 2.0
    assert "20/100 images" in out.getvalue() and "10 images/s  8 s left" in out.getvalue()


def test_no_time_left_is_printed_before_the_rate_is_reliable(clock):
    now, time_s = clock
    out = io.StringIO()
    with DataProgress("images", Console(file=out, force_terminal=True, width=100), now) as progress:
        time_s[0] = 100.5
        progress(20, 100)
    assert "left" not in out.getvalue()

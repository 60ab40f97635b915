"""Output on a page is compared with real output, ignoring numbers and widths of columns."""

import pytest

from .compare_output import missing_line


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("top-1 98.61 % (359 images)", "top-1  9.00 % (1,359 images)"),
        ("first\nlast", "first\nsecond\nlast"),
        ("first\n…\nlast", "first\nlast"),
        ("error: …/photos: is missing", "error: /home/me/photos: is missing"),
        ("│ top-1 │ 98 % │", "│ top-1    │ 100.0 % │"),
        ("╭───┬──╮", "╭──────┬────╮"),
        ("", "anything"),
        ("loss 1.2e-05", "loss 0.1"),
    ],
)
def test_other_numbers_and_widths_match(shown: str, printed: str) -> None:
    assert missing_line(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("top-1 98 %", "top-5 98 %", "top-1 98 %"),
        ("a\nb", "b\na", "b"),
        ("a\na", "a", "a"),
        ("completed", "completed: recipe", "completed"),
        ("3 runs", "no runs", "3 runs"),
    ],
)
def test_other_text_does_not_match(shown: str, printed: str, missing: str) -> None:
    assert missing_line(shown, printed) == missing

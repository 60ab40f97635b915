"""Redo the picture in the README: run the demo in a terminal of 100 columns and keep what it leaves on the screen.

    .venv/bin/python docs/images/make_demo.py

The run is real, so its seconds are those of the machine that makes the picture. Nothing is cut or reworded.
"""

import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from fcntl import ioctl
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).with_name("demo.svg")
COMMAND = ("paceline", "train", "--ranks", "2")
COLUMNS, ROWS = 100, 40
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def run_in_terminal(command: list[str], folder: str) -> str:
    """Return all that `command` writes to a terminal of `COLUMNS` columns, control sequences included."""
    terminal, inside = pty.openpty()
    ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with subprocess.Popen(command, cwd=folder, env=environ, stdin=inside, stdout=inside, stderr=inside) as process:
        os.close(inside)
        written = b"".join(iter(lambda: _read(terminal), b"")).decode()
    os.close(terminal)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}:\n{written}")
    return written


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other side has closed
        return b""


def final_screen(written: str) -> str:
    """Return the lines that stay: live ones are erased (`ESC[2K`), some after going up to them (`ESC[1A`)."""
    lines: list[str] = []
    for line in written.replace("\r\n", "\n").split("\n"):
        for _ in range(line.count("\x1b[1A")):
            lines.pop()
        lines.append(re.split(r"\r|\x1b\[2K", line)[-1])
    return "\n".join(lines).strip("\n")


def picture_of(screen: str) -> str:
    """Return an SVG of a screen. It names fonts that machines have, and fetches none."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(screen), soft_wrap=True)
    svg = console.export_svg(title=" ".join(COMMAND), unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: .*?;", f"font-family: {FONTS};", svg)
    assert 'url("' not in svg and "@import" not in svg, "the picture would fetch something"
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def main() -> None:
    """Run the demo and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        written = run_in_terminal([sys.executable, "-m", *COMMAND], folder)
    PICTURE.write_text(picture_of(final_screen(written)), encoding="utf-8")


if __name__ == "__main__":
    main()

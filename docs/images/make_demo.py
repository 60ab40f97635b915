"""Run the demo in a terminal of 100 columns, and draw its final screen as the image of the README.

    .venv/bin/python docs/images/make_demo.py

Times are those of the machine that runs it. The output is complete and unchanged.
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

IMAGE = Path(__file__).with_name("demo.svg")
COMMAND = ("paceline", "train", "--ranks", "2")
COLUMNS, ROWS = 100, 40
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def run_in_terminal(command: list[str], folder: str) -> str:
    """Return the output of `command` in a terminal of `COLUMNS` columns, with control sequences."""
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
    except OSError:  # on Linux, the other side has closed
        return b""


def final_screen(written: str) -> str:
    """Return the lines that remain on the screen."""
    # Live lines are erased (`ESC[2K`), some after moving up to them (`ESC[1A`).
    lines: list[str] = []
    for line in written.replace("\r\n", "\n").split("\n"):
        for _ in range(line.count("\x1b[1A")):
            lines.pop()
        lines.append(re.split(r"\r|\x1b\[2K", line)[-1])
    return "\n".join(lines).strip("\n")


def render_svg(screen: str) -> str:
    """Return an SVG of a screen; it uses installed fonts only."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(screen), soft_wrap=True)
    svg = console.export_svg(title=" ".join(COMMAND), unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: .*?;", f"font-family: {FONTS};", svg)
    assert 'url("' not in svg and "@import" not in svg, "the image would fetch something"
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def main() -> None:
    """Run the demo and write the image."""
    with tempfile.TemporaryDirectory() as folder:
        written = run_in_terminal([sys.executable, "-m", *COMMAND], folder)
    IMAGE.write_text(render_svg(final_screen(written)), encoding="utf-8")


if __name__ == "__main__":
    main()

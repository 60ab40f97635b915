"""paceline in a process that cannot reach a network: `guarded.py FILE train ...`. `FILE` gets a line for each attempt.

Sockets of this machine's own files are let through: W&B speaks to its own process by one.
"""

import socket
import sys
from pathlib import Path

from paceline.cli import main


def guard(file: Path) -> None:
    """Refuse from now on, and note in `file`, every name that is looked up and every address that is spoken to."""

    def refuse(event: str, words: tuple) -> None:
        is_look_up = event in ("socket.getaddrinfo", "socket.gethostbyname")
        if is_look_up or (event in ("socket.connect", "socket.sendto") and words[0].family != socket.AF_UNIX):
            with file.open("a") as lines:
                lines.write(f"{event} {words[-1] if not is_look_up else words[0]}\n")
            raise OSError(f"{event}: there is no network here")

    file.touch()
    sys.addaudithook(refuse)


if __name__ == "__main__":
    guard(Path(sys.argv.pop(1)))
    sys.argv[0] = "paceline"
    main()

"""Run paceline without network access: `guarded.py FILE train ...`. `FILE` gets one line per attempt.

Unix domain sockets are allowed, because W&B uses one for its own process.
"""

import socket
import sys
from pathlib import Path

from paceline.cli import main


def guard(file: Path) -> None:
    """Refuse name lookups and connections from now on, and log each in `file`."""

    def refuse(event: str, args: tuple) -> None:
        is_look_up = event in ("socket.getaddrinfo", "socket.gethostbyname")
        if is_look_up or (event in ("socket.connect", "socket.sendto") and args[0].family != socket.AF_UNIX):
            with file.open("a") as lines:
                lines.write(f"{event} {args[-1] if not is_look_up else args[0]}\n")
            raise OSError(f"{event}: there is no network here")

    file.touch()
    sys.addaudithook(refuse)


if __name__ == "__main__":
    guard(Path(sys.argv.pop(1)))
    sys.argv[0] = "paceline"
    main()

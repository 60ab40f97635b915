"""Serve the report of a run on loopback while the run goes on."""

import json
import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Final, Literal

from paceline import __version__
from paceline.core.errors import PacelineError
from paceline.core.run_dir import LOCK, RunDir
from paceline.core.units import count
from paceline.report.document import ReportPage
from paceline.report.read_run import RunData, read_run, read_run_facts, require_run
from paceline.report.render import LiveVersion
from paceline.report.run_page import build_run_page, run_status
from paceline.report.text import clean_text
from paceline.report.write import render_page

HOST: Final = "127.0.0.1"
CHECK_S: Final = 2.0
"""Shortest time between two looks at the run directory, in seconds."""
_BUILD_SHARE: Final = 0.1
"""Largest share of the time to spend on building pages, which take cores from the run."""
_TIMEOUT_S: Final = 10.0
_QUIET_S: Final = 120.0
"""A run whose files have not changed for this long is reported as quiet, in seconds."""
# Another site can resolve its own name to 127.0.0.1; its requests then carry that name. A tunnel may change the port.
_LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # a page cannot say this of itself
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

RunState = Literal["missing", "running", "preempted", "ended"]
_STATE_TEXTS: Final[dict[RunState, str]] = {
    "missing": "Live: waiting for the run.",
    "running": "Live: the run has not ended.",
    "preempted": "Live: the run was stopped, and can be resumed.",
    "ended": "The run has ended: this is its final report.",
}


@dataclass(frozen=True)
class LivePage:
    """A version of the page, and the state of the run in it."""

    version: str
    state: RunState
    html: bytes


class LiveReport:
    """The newest page of a run that may not exist yet, rebuilt when its files have changed.

    It looks at most every `CHECK_S` seconds, and less often if building takes long. `now` returns seconds.
    """

    def __init__(self, rundir: RunDir, now: Callable[[], float]) -> None:
        self._rundir = rundir
        self._now = now
        self._lock = threading.Lock()
        self._session = secrets.token_hex(4)  # a browser may still have a page of an earlier server
        self._number = 0
        self._seen: object = None
        self._page: LivePage | None = None
        self._next_s = 0.0
        self._built_s = 0.0

    def version_json(self) -> bytes:
        """Return what the page in the browser polls: the newest version, and a sentence on the run."""
        page = self.latest()
        text, idle_s = _STATE_TEXTS[page.state], self._now() - self._built_s
        if page.state == "running" and idle_s >= _QUIET_S:  # it may have been killed
            text += f" No file has changed for {count(int(idle_s // 60), 'minute')}."
        return json.dumps({"version": page.version, "state": text}).encode()

    def latest(self) -> LivePage:
        """Return the newest page; of several threads, one builds and the others wait."""
        with self._lock:
            if self._page is None or self._now() >= self._next_s:
                began_s = self._now()
                seen = list_changes(self._rundir.path)
                if self._page is None or seen != self._seen:
                    self._number += 1
                    self._built_s = began_s
                    self._page, self._seen = self._build(f"{self._session}-{self._number}"), seen
                took_s = self._now() - began_s
                self._next_s = self._now() + max(CHECK_S, took_s / _BUILD_SHARE)
            return self._page

    def _build(self, version: str) -> LivePage:
        state: RunState = "missing"
        try:
            run = read_run(self._rundir)
            state, _ = _state_of(run)
            return self._render(build_run_page(run), version, state)
        except PacelineError as error:
            page = _message_page(self._rundir, "no run yet", str(error))
        except Exception as error:  # files vanish while they are read, and one bad version must not end the server
            state = "running"
            page = _message_page(self._rundir, "cannot be shown", f"{type(error).__name__}: {error}")
        return self._render(page, version, state)

    def _render(self, page: ReportPage, version: str, state: RunState) -> LivePage:
        text = render_page(self._rundir.path, page, LiveVersion(version, _STATE_TEXTS[state]))
        return LivePage(version, state, text.encode())


def read_state(rundir: RunDir) -> tuple[RunState, str]:
    """Return the state of a run, and in words how it ended ("" before), without building a page."""
    try:
        require_run(rundir.path)
    except PacelineError:
        return "missing", ""
    return _state_of(read_run_facts(rundir)) if (rundir.path / "result.json").is_file() else ("running", "")


def _state_of(run: RunData) -> tuple[RunState, str]:
    if run.result is None:
        return "running", ""
    return "preempted" if run.result.status == "preempted" else "ended", run_status(run)[0]


def _message_page(rundir: RunDir, status: str, message: str) -> ReportPage:
    return ReportPage(
        title=clean_text(rundir.path.name),
        subtitle=[clean_text(message, 1000)],
        status=status,
        tone="warning",
        paceline=__version__,
    )


def list_changes(folder: Path) -> object:
    """Return a value that differs when a file directly in `folder` has changed, or an entry of a folder in it.

    Leaves out the report and the lock.
    """
    try:
        with os.scandir(folder) as entries:
            watched = [each for each in entries if each.name not in (LOCK, RunDir(folder).report.name)]
        stats = {each.name: each.stat(follow_symlinks=False) for each in watched}
    except OSError as error:
        return error.errno
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


class ReportServer(ThreadingMixIn, TCPServer):
    """An HTTP server on 127.0.0.1 for one page and its version. Port 0 selects a free one. Raise `OSError`."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, report: LiveReport, port: int = 0) -> None:
        self.report = report
        super().__init__((HOST, port), _Handler)

    @property
    def port(self) -> int:
        """Return the port that it listens on."""
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """Return the URL of the page."""
        return f"http://{HOST}:{self.port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that the browser closed early."""


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = _TIMEOUT_S
    server_version = "paceline"
    sys_version = ""
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        """Send the page or its version."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _LOCAL_HOST.fullmatch(hosts[0].strip()):
            self.send_error(HTTPStatus.FORBIDDEN, f"open {self.server.address}")
        elif self.path == "/":
            self._send("text/html; charset=utf-8", self.server.report.latest().html)
        elif self.path == "/version":
            self._send("application/json", self.server.report.version_json())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        """Send the headers alone. Other methods are errors 501."""
        self.do_GET()

    def end_headers(self) -> None:
        """Add the headers of every answer."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *values: object) -> None:
        """Log nothing."""

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

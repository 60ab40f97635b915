"""`paceline report`: write the report of a run."""

import contextlib
import json
import os
import sys
import threading
import time
from typing import NoReturn, TextIO

from paceline.cli.options import ReportOptions
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import write_output
from paceline.core.run_dir import RunDir, write_atomic
from paceline.core.watch_result import is_watch_dir
from paceline.data.files import printable
from paceline.report.read_run import is_experiment_dir
from paceline.report.write import render_report, write_report


def report(options: ReportOptions) -> int:
    """Run `paceline report`, and return the exit code.

    HTML goes to the run directory, Markdown and JSON to stdout, unless `out` names a file.
    """
    rundir, format, out = RunDir(options.run.expanduser()), options.format, options.out
    if options.follow:
        return follow_report(options, rundir)
    if options.port is not None:
        raise RecipeError(f"--port: {options.port} has no effect without --follow (add --follow, or leave it out)")
    text = render_report(rundir, format)
    if format == "html" and out is None:
        out, write = (
            rundir.report,
            write_atomic,
        )  # atomic and without following links: another user may own the run directory
    else:
        write = write_output
    if out is None:
        if options.as_json and format == "md":
            raise RecipeError("--json: Markdown goes to stdout too (add --out PATH, or use --format json)")
        sys.stdout.write(text)
        return 0
    out = out.expanduser()
    try:
        write(out, text)
    except OSError as error:
        raise PacelineError(f"--out: {out} cannot be written: {error.strerror} (name another with --out)") from None
    written = {"path": str(out), "format": format, "bytes": len(text.encode())}
    print(json.dumps(written, indent=2) if options.as_json else f"report: {printable(out)}")
    return 0


def follow_report(options: ReportOptions, rundir: RunDir) -> int:
    """Serve the report of a run that may not exist yet, until Ctrl-C; return the exit code."""
    from paceline.report.follow import LiveReport, ReportServer

    if options.format != "html" or options.out is not None:
        given = "--out" if options.format == "html" else "--format"
        raise RecipeError(f"--follow: serves the page and writes no file (leave {given} out)")
    if is_experiment_dir(rundir.path):
        raise RecipeError(f"--follow: {rundir.path} is an experiment, and only runs are followed (name one in trials/)")
    if is_watch_dir(rundir.path):
        raise RecipeError(
            f"--follow: {rundir.path} is a watched script, and only runs are followed (leave --follow out once it has "
            "ended)"
        )
    try:
        server = ReportServer(LiveReport(rundir, time.monotonic), options.port or 0)
    except OSError as error:
        raise RecipeError(f"--port: {options.port or 0}: {error.strerror} (name another, or leave it out)") from None
    with server:
        threading.Thread(target=server.serve_forever, name="report server", daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            _print_address(server.address, server.port, as_json=options.as_json)
            _watch_states(rundir, sys.stderr if options.as_json else sys.stdout)
    return 0


def _print_address(address: str, port: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"address": address, "port": port}), flush=True)
        return
    print(f"report: {address} (updated while the run trains; stop with Ctrl-C)", flush=True)
    if "SSH_CONNECTION" in os.environ:  # the browser is on another machine
        print(f"from your machine: ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}", flush=True)


def _watch_states(rundir: RunDir, out: TextIO) -> NoReturn:
    """Print a line when the run appears, ends or resumes."""
    from paceline.report.follow import CHECK_S, read_state

    name, before = printable(rundir.path), ""
    while True:
        state, status = read_state(rundir)
        if state != before:
            match state:
                case "missing":
                    print(f"{name}: is not a run yet; waiting for it", file=out, flush=True)
                case "running" if before:
                    print(f"{name}: is training", file=out, flush=True)
                case "preempted" | "ended":
                    print(f"{name}: {status}; the page stays until Ctrl-C", file=out, flush=True)
            before = state
        time.sleep(CHECK_S)


def try_write_report(rundir: RunDir) -> None:
    """Write the report of a finished run; a failure is a warning."""
    try:
        write_report(rundir)
    except Exception as error:
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        print(f"warning: {rundir.report}: was not written: {what} (see paceline report)", file=sys.stderr)

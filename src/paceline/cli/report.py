"""`paceline report`: the report of a run, as a file or on stdout."""

import json
import sys
from pathlib import Path

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import write_output
from paceline.core.rundir import RunDir, write_atomic
from paceline.data.sources.places import printable
from paceline.report.write import report_text, write_report


def report(run: Path, format: str, out: Path | None, *, as_json: bool) -> int:
    """Do what `paceline report` was asked for; return the exit code.

    HTML goes into the run directory unless `out` names a file; Markdown and JSON go to stdout. With `as_json` what is
    said of a file that was written is JSON.
    """
    rundir = RunDir(run.expanduser())
    text = report_text(rundir, format)
    if format == "html" and out is None:
        out, write = rundir.report, write_atomic  # whatever lies there: the run directory may be somebody else's
    else:
        write = write_output
    if out is None:
        if as_json and format == "md":
            raise RecipeError("--json: Markdown goes to stdout too (add --out PATH, or take --format json)")
        sys.stdout.write(text)
        return 0
    out = out.expanduser()
    try:
        write(out, text)
    except OSError as error:
        raise PacelineError(f"--out: {out} cannot be written: {error.strerror} (name another with --out)") from None
    written = {"path": str(out), "format": format, "bytes": len(text.encode())}
    print(json.dumps(written, indent=2) if as_json else f"report: {printable(out)}")
    return 0


def leave_report(rundir: RunDir) -> None:
    """Write the report of a run that has ended. Where that fails, for whatever reason, the run has not: a warning."""
    try:
        write_report(rundir)
    except Exception as error:
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        print(f"warning: {rundir.report}: was not written: {what} (see paceline report)", file=sys.stderr)

"""`paceline report`: write the report of a run."""

import json
import sys

from paceline.cli.options import ReportOptions
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import write_output
from paceline.core.run_dir import RunDir, write_atomic
from paceline.data.files import printable
from paceline.report.write import render_report, write_report


def report(options: ReportOptions) -> int:
    """Run `paceline report`, and return the exit code.

    HTML goes to the run directory, Markdown and JSON to stdout, unless `out` names a file.
    """
    rundir, format, out = RunDir(options.run.expanduser()), options.format, options.out
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


def try_write_report(rundir: RunDir) -> None:
    """Write the report of a finished run; a failure is a warning."""
    try:
        write_report(rundir)
    except Exception as error:
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        print(f"warning: {rundir.report}: was not written: {what} (see paceline report)", file=sys.stderr)

"""What every result file holds beside its numbers, and how seconds are summed up."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from paceline.measure.machine import describe_machine


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the median of `seconds`, their 10th and 90th percentile, and how many there are."""
    low, median, high = np.percentile(seconds, [10, 50, 90])
    return {"median_s": round(median, 6), "p10_s": round(low, 6), "p90_s": round(high, 6), "n": len(seconds)}


def provenance() -> dict[str, Any]:
    """Return when, by which command and on what a result was measured; no user, host name or path.

    `load_average_tensors` is the kernel's, of the last 1, 5 and 15 minutes: more than the threads in use says that
    somebody else was computing too.
    """
    script = Path(sys.argv[0])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]]),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "machine": describe_machine(),
    }


def write(path: Path, values: dict[str, Any]) -> None:
    """Write a result as JSON, its lists of numbers on one line each."""
    lines = [f"  {json.dumps(name)}: {_text(value)}" for name, value in values.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _text(value: Any) -> str:
    return json.dumps(value, indent=2).replace("\n", "\n  ") if isinstance(value, dict) else json.dumps(value)

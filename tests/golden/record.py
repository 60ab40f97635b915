"""Record the behaviour of one checkout of paceline: `python tests/golden/record.py CHECKOUT -o FILE`.

This takes about five minutes on two cores. Everything that must not change is recorded by place: bits of small training
runs, keys of all JSON, files, exit codes, options and public names. paceline is not imported here.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

FOLDERS = ("runs", "output", "home")
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # threads do not survive a fork
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
    "TERM": "dumb",
    "PYTHONUNBUFFERED": "",
}


def main() -> int:
    """Record a checkout, in a process that starts with the final environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", default="", help="record only cases whose name has this (train, verbs, codes ...)")
    parser.add_argument("--names", type=Path, help="an earlier record, whose public names are looked for too")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is kept")
    asked = parser.parse_args()
    source = str(asked.checkout.resolve() / "src")
    if not Path(source, "paceline").is_dir():
        parser.error(f"{asked.checkout}: is no checkout of paceline (there is no src/paceline)")
    if os.environ.get("PYTHONPATH") != source:
        os.execve(sys.executable, [sys.executable, *sys.argv], clean_environ(source))
    started_s = time.monotonic()
    # Every process forked from here would remove a TemporaryDirectory when it ends.
    work = asked.keep or Path(tempfile.mkdtemp(prefix="paceline-golden-"))
    try:
        failed = record_in(work.resolve(), asked)
    finally:
        if not asked.keep:
            shutil.rmtree(work)
    print(f"{asked.out}: recorded in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return 1 if failed else 0


def clean_environ(source: str) -> Mapping[str, str]:
    """Return an environment without a launcher's or a job's variables and without settings of the user."""
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": source, **SETTINGS}


def record_in(work: Path, asked: argparse.Namespace) -> bool:
    """Record the checkout with `work` as the current folder of all commands; return whether anything failed."""
    import cases  # its modules import libraries, which takes time
    from values import Record

    for name in FOLDERS:
        (work / name).mkdir(parents=True)
    os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = str(work / "home")
    checkout = asked.checkout.resolve()
    record = Record({sys.executable: "PYTHON", sys.prefix: "PREFIX", str(work): "WORK", str(checkout): "CHECKOUT"})
    names = json.loads(asked.names.read_text())["values"] if asked.names else {}
    cases.record_all(record, work, checkout, asked.only, public_names=[*names])
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    document = {"format": 1, "commit": commit, "values": dict(sorted(record.values.items()))}
    asked.out.write_text(re.sub(r"\n {4,}", "\n  ", json.dumps(document, indent=1)) + "\n")
    for failure in record.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return bool(record.failures)


if __name__ == "__main__":
    sys.exit(main())

"""Does anything but a one-line error come out of files that are broken, foreign or hostile?

    python benchmarks/fuzz.py --minutes 10 --json benchmarks/results/fuzz.json

Whole inputs of every kind that paceline reads are changed at random, byte by byte or by splicing, and read as a run
would read them. An input may be accepted, or refused by one line (`PacelineError`); anything else is a finding: another
exception, a warning, a message of several lines, a crash of the process, or more than `SLOW_S`. Checkpoints are read
twice: with the manifest that finds damage, and with digests put right, as who crafts one would. Each finding is saved
with its input under `--findings`, one for each kind and place.

Runs of the same seed see the same inputs in the same order, whatever the machine. The exit status is 1 for a finding.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import record
from fuzz_inputs import Target, build_targets

from paceline.core.errors import PacelineError

SLOW_S = 10.0
CRASHED = 70
TOKENS = (
    b"\0", b"\n", b"\r", b"\t", b"\x1b[2J", b"\xff", b"\xed\xa0\x80", b"\xe2\x80\xae", b'"', b"'", b",", b":", b"{",
    b"}", b"[", b"]", b"-", b"- ", b"&a", b"*a", b"!!python/name:os.system", b"<<", b"%YAML 1.1\n---\n", b"%",
    b"$(touch x)", b"NaN", b"Infinity", b"1e999", b"-1", b"0", b"18446744073709551616", b"true", b"null", b"on", b"1ep",
    b"../", b"/etc", b"\xff\xff\xff\xff", b"\x80\x02", b"cos\nsystem\n", b"R.",
    b"\x7f\xff\xff\xff\xff\xff\xff\xff", b"Exif\0\0", b"A" * 300,
)  # fmt: skip


@dataclass
class Count:
    """What became of the inputs of a target."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    findings: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Fuzz for the time asked for, print what came of it, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="decides every input (default: 0)")
    parser.add_argument("--only", default="", help="the targets to fuzz, separated by commas (default: all)")
    parser.add_argument("--memory-gb", type=float, default=4.0, help="the most a reader may use; 0: any (default: 4)")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs are saved")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        targets = [each for each in build_targets(Path(scratch)) if each.name in (args.only or each.name).split(",")]
        if args.memory_gb:
            limit_bytes = int(args.memory_gb * (1 << 30))
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))  # readers inherit it
        counts = fuzz(targets, args.seed, args.minutes * 60, Path(scratch), args.findings)
    print(table(counts))
    if args.json:
        values = {name: asdict(count) | {"slowest_s": round(count.slowest_s, 3)} for name, count in counts.items()}
        head = {"benchmark": "fuzz", **record.provenance(), "seed": args.seed, "minutes": args.minutes}
        record.write(args.json, {**head, "targets": values})
    sys.exit(any(count.findings for count in counts.values()))


def fuzz(targets: list[Target], seed: int, seconds: float, scratch: Path, findings: Path) -> dict[str, Count]:
    """Return what became of the inputs. They are read in a process of their own, which may crash and is replaced."""
    counts = {target.name: Count() for target in targets}
    deadline, number, notes = time.monotonic() + seconds, 0, scratch / "notes.jsonl"
    while time.monotonic() < deadline:
        notes.write_text("")
        pid = os.fork()
        if not pid:
            _be_reader(targets, seed, number, deadline, scratch, findings)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        rows = [json.loads(line) for line in notes.read_text().splitlines()]
        for row in rows:
            _add(counts[row["target"]], row)
        number += sum("took_s" in row for row in rows)
        if code:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            last = json.loads((scratch / "last.json").read_text())
            took_s = time.monotonic() - last["began_s"]
            _add(
                counts[last["target"]],
                _saved({**last, "took_s": took_s, "finding": f"process {how}"}, scratch, findings),
            )
            number = last["number"] + 1
    return counts


def _be_reader(targets: list[Target], seed: int, number: int, deadline: float, scratch: Path, findings: Path) -> None:
    """Read inputs from the `number`-th on until the deadline; never returns."""
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an input that hangs ends the process
    try:
        with (scratch / "notes.jsonl").open("a") as notes, Path(os.devnull).open("w") as nowhere:
            sys.stderr = nowhere
            while time.monotonic() < deadline:
                row = _read_one(targets[number % len(targets)], seed, number, scratch)
                print(json.dumps(_saved(row, scratch, findings)), file=notes, flush=True)
                number += 1
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(CRASHED)


def _read_one(target: Target, seed: int, number: int, scratch: Path) -> dict[str, Any]:
    """Make input `number` and have it read; return how it went."""
    folder = scratch / "input"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    draw = random.Random(f"{seed} {number}")
    victim = draw.choice(sorted(target.examples))
    for name, examples in target.examples.items():
        content = draw.choice(examples)
        (folder / name).write_bytes(mutated(content, examples, draw) if name == victim else content)
    row: dict[str, Any] = {"target": target.name, "number": number, "began_s": time.monotonic()}
    (scratch / "last.json").write_text(json.dumps(row))
    signal.alarm(int(SLOW_S * 6))
    finding = ""
    try:
        target.read(folder)
        row["is_accepted"] = True
    except PacelineError as error:
        lines = str(error).splitlines()
        finding = "" if len(lines) == 1 and len(lines[0]) < 1000 else f"message of {len(lines)} lines"
    except BaseException as error:
        finding = f"{type(error).__name__} at {_place(error)}"
        row["detail"] = " ".join(str(error).split())[:200]
    signal.alarm(0)
    row["took_s"] = time.monotonic() - row["began_s"]
    if row["took_s"] > SLOW_S and not finding:
        finding = f"over {SLOW_S:g} s"
    return row | {"finding": finding}


def _place(error: BaseException) -> str:
    """Return the innermost place of paceline's that an error came through."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next(
        (f"{Path(each.filename).name}:{each.name}" for each in frames if "/src/paceline/" in each.filename), "?"
    )


def _saved(row: dict[str, Any], scratch: Path, findings: Path) -> dict[str, Any]:
    """Copy the input of a finding, the first of its kind and place; return `row`."""
    kind = "".join(
        character if character.isalnum() else "-" for character in f"{row['target']} {row.get('finding', '')}"
    )
    if row["finding"] and not (findings / kind).exists():
        shutil.copytree(scratch / "input", findings / kind, symlinks=True)
        (findings / kind / "finding.json").write_text(json.dumps(row, indent=2) + "\n")
    return row


def _add(count: Count, row: dict[str, Any]) -> None:
    count.inputs += 1
    count.accepted += row.get("is_accepted", False)
    count.refused += not row.get("is_accepted", False) and not row["finding"]
    count.slowest_s = max(count.slowest_s, row["took_s"])
    if row["finding"] and row["finding"] not in count.findings:
        count.findings[row["finding"]] = f"input {row['number']}: {row.get('detail', '')}"
        print(f"finding: {row['target']}: {row['finding']}: {count.findings[row['finding']]}", flush=True)


def mutated(content: bytes, examples: list[bytes], draw: random.Random) -> bytes:
    """Return `content` after one to eight random changes; short ones more often."""
    changed = bytearray(content)
    for _ in range(min(8, 1 + int(draw.expovariate(0.7)))):
        place = draw.randrange(len(changed) + 1)
        length = min(len(changed) - place, int(2 ** draw.uniform(0, 10)))
        match draw.randrange(9):
            case 0 if place < len(changed):
                changed[place] ^= 1 << draw.randrange(8)
            case 1 if place < len(changed):
                changed[place] = draw.randrange(256)
            case 2:
                del changed[place : place + length]
            case 3:
                changed[place:place] = draw.choice(TOKENS)
            case 4:
                token = draw.choice(TOKENS)
                changed[place : place + len(token)] = token
            case 5:
                changed[place:place] = changed[place : place + length] * draw.randrange(1, 4)
            case 6:
                other = draw.choice(examples)
                start = draw.randrange(len(other) + 1)
                changed[place : place + length] = other[start : start + length]
            case 7:
                del changed[place:]
            case _:
                _renumber(changed, draw)
    return bytes(changed)


def _renumber(changed: bytearray, draw: random.Random) -> None:
    """Change a run of digits of a text, or four bytes of a binary file, to another number."""
    digits = [place for place, byte in enumerate(changed) if 48 <= byte < 58]
    if digits:
        place = draw.choice(digits)
        changed[place : place + 1] = draw.choice((b"", b"0", b"-1", b"99999999999999999999", b"1e400", b"0.5", b"nan"))
    elif len(changed) >= 4:
        place = draw.randrange(len(changed) - 3)
        changed[place : place + 4] = draw.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x80"))


def table(counts: dict[str, Count]) -> str:
    """Return the result as a person reads it."""
    lines = [f"{'target':17} {'inputs':>8} {'accepted':>9} {'refused':>8} {'slowest':>8}  findings"]
    for name, count in counts.items():
        lines.append(
            f"{name:17} {count.inputs:8,} {count.accepted:9,} {count.refused:8,} {count.slowest_s:6.2f} s  "
            + ("; ".join(f"{what} ({detail})" for what, detail in count.findings.items()) or "none")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

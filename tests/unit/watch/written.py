"""Records as the observer writes them."""

import json
from pathlib import Path

STEP_S = 0.1


def header(rank: int = 0, world_size: int = 1, **fields) -> dict:
    """Return the first record of a process that started at 100 s of its clock, 1,000,100 s after 1970."""
    return {
        "kind": "process",
        "format": 1,
        "pid": 50 + rank,
        "ppid": 1,
        "host": "node0",
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "argv": ["train.py"],
        "python": "3.11.9",
        "torch": "2.6.0",
        "unix_s": 1_000_200.0,
        "clock_s": 200.0,
        "started_s": 100.0,
        "framework": "",
        "threads": 2,
    } | fields


def steps(
    number: int, *, start_s: float = 110.0, step_s: float = STEP_S, samples: int | None = 32, **shares: float
) -> list[dict]:
    """Return steps of equal length; stages that are not in `shares` of a step fill it: forward 1, backward 2 parts."""
    rest = 1 - sum(shares.values())
    stages = {name: share * step_s for name, share in shares.items()}
    for name, share in (("forward", rest / 3), ("backward", 2 * rest / 3)):
        stages[name] = stages.get(name, 0.0) + share * step_s
    return [
        {
            "kind": "step",
            "n": n,
            "start_s": start_s + n * step_s,
            "end_s": start_s + (n + 1) * step_s,
            "stages": dict(stages),
            "samples": samples,
            "micro_batches": 1,
            "memory": None,
            "loader": 1,
        }
        for n in range(number)
    ]


def pause(name: str, start_s: float, end_s: float) -> dict:
    """Return the record of a pause."""
    return {"kind": "pause", "name": name, "start_s": start_s, "end_s": end_s}


def end(end_s: float, number: int = 0) -> dict:
    """Return the last record of a process that ended by itself."""
    return {"kind": "end", "end_s": end_s, "steps": number}


def write(folder: Path, *records: dict, name: str = "") -> Path:
    """Write the file of a process; the first of `records` is its header."""
    path = folder / (name or f"{records[0]['host']}-{records[0]['pid']}.jsonl")
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path

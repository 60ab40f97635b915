"""Flatten documents and folders to a record of places, such as `train/ema/result.json eval.top1`, and values.

Values that must not change are recorded unchanged: losses, evaluations, samples, digests, settings. Values that vary
with time are recorded as their types, and prose as "text".
"""

import contextlib
import csv
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXACT = {
    *("status", "event", "how", "name", "class", "label", "schema_version", "format_version", "recipe_hash"),
    *("world_size", "ranks", "parameters", "trained_parameters", "weights_sha256", "dataset", "num_classes"),
    *("step", "steps", "epoch", "epochs", "images", "images_seen", "skipped_steps", "bad_images", "best_step"),
    *("best_epoch", "loss", "lr", "top1", "top5", "ece", "mean_class_accuracy", "gap", "train_top1", "train_loss"),
    *("ema_top1", "ema_top5", "ema_loss", "ema_ece", "ema_mean_class_accuracy", "batch_top1", "batch_top5"),
    *("probability", "train_images", "val_images", "eval_images", "index", "split"),
}
"""Keys whose values are recorded."""
VARYING = {
    *("loader", "throughput", "stages", "account", "communication", "verdict", "host_to_device", "checkpoints"),
    *("goodput", "memory", "time", "stragglers", "straggler", "provenance", "machine", "spent", "since_eval"),
}
"""Keys below which every value is recorded as its type: measurements."""

Flat = dict[str, Any]


@dataclass
class Record:
    """The values of a checkout, by place; `folders` are replaced by their names in every text."""

    folders: dict[str, str] = field(default_factory=dict)
    values: Flat = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def fail(self, failure: str) -> None:
        """Record that a case failed, which makes the record incomplete."""
        self.failures.append(failure)

    def put(self, place: str, value: Any) -> None:
        """Record one value; a place cannot have two."""
        place = self._without_folders(place)
        assert place not in self.values, place
        self.values[place] = self._without_folders(value) if isinstance(value, str) else value

    def put_document(self, place: str, document: Any, *, exact: bool = False) -> None:
        """Record each value of a JSON or YAML document below `place`."""
        for key, value in flatten(document, exact=exact).items():
            self.put(f"{place} {key}".rstrip(), value)

    def put_json(self, place: str, text: str, *, exact: bool = False) -> None:
        """Record a text that should be JSON."""
        try:
            document = json.loads(text)
        except ValueError:
            self.put(place, "not JSON")
        else:
            self.put_document(place, document, exact=exact)

    def put_error(self, place: str, text: str) -> None:
        """Record the errors on stderr: their number and the location that each names, because the rest is prose."""
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        named = [line.removeprefix("error: ").split(": ")[0] for line in errors]
        self.put(f"{place} errors", len(errors))
        for number, each in enumerate(named):
            self.put(f"{place} error {number}", "text" if " " in each else each)
        self.put(f"{place} traceback", "Traceback (most recent" in text)

    def put_run(self, place: str, run: Path) -> None:
        """Record all files of a run directory."""
        self.put_files(place, run)
        for name in ("plan.json", "dataset.json"):
            self._put_file(f"{place}/{name}", run / name, exact=True)
        for name in (
            "result.json",
            "machine.json",
            "profile.json",
            "asked.json",
            "experiment.json",
            "worst/worst.json",
        ):
            self._put_file(f"{place}/{name}", run / name)
        if (run / "recipe.yaml").is_file():
            self.put_recipe(f"{place}/recipe.yaml", run / "recipe.yaml")
        for path in sorted(run.glob("*.jsonl")):
            self._put_lines(f"{place}/{path.name}", path)
        for path in sorted(run.glob("*.csv")):
            self._put_table(f"{place}/{path.name}", path)
        for folder in sorted(run.glob("checkpoints/step-*")):
            self._put_checkpoint(f"{place}/{folder.relative_to(run)}", folder)

    def put_files(self, place: str, folder: Path) -> None:
        """Record the names of the files in a folder."""
        for path in sorted(folder.rglob("*")):
            name = re.sub(r"tfevents\..*", "tfevents", str(path.relative_to(folder)))
            if path.is_file() and f"{place} file {name}" not in self.values:
                self.put(f"{place} file {name}", "there")

    def put_recipe(self, place: str, path: Path) -> None:
        """Record every setting of a recipe, and the comment on its first line."""
        from ruamel.yaml import YAML

        text = path.read_text()
        self.put(f"{place} line 1", text.splitlines()[0])
        self.put_document(place, YAML(typ="safe").load(text), exact=True)

    def put_tensors(self, place: str, path: Path) -> None:
        """Record names, types and shapes in a safetensors file, and its metadata."""
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        self.put_document(f"{place} metadata", header.pop("__metadata__", {}))
        for name, tensor in header.items():
            self.put(f"{place} {name}", f"{tensor['dtype']} {tensor['shape']}")

    def _put_file(self, place: str, path: Path, *, exact: bool = False) -> None:
        if path.is_file():
            self.put_json(place, path.read_text(), exact=exact)

    def _put_lines(self, place: str, path: Path) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if path.name.startswith("steps.rank"):
            for row in rows:
                for key in ("samples", "crc32"):
                    self.put(f"{place} step {row['step']} {key}", _crc(json.dumps(row.pop(key)).encode()))
                self.put(f"{place} step {row['step']} other keys", ",".join(row))
        elif path.name in ("steps.jsonl", "evals.jsonl"):
            for number, row in enumerate(rows):
                self.put_document(f"{place} line {number}", row)
        else:  # the number of lines depends on time
            self.put_document(place, rows)

    def _put_table(self, place: str, path: Path) -> None:
        text = path.read_text()
        rows = list(csv.reader(io.StringIO(text)))
        self.put(f"{place} columns", ",".join(rows[0]))
        self.put(f"{place} rows", len(rows) - 1)
        if path.name in ("classes.csv", "confusion.csv"):
            self.put(f"{place} crc32", _crc(text.encode()))

    def _put_checkpoint(self, place: str, folder: Path) -> None:
        for name, digest in json.loads((folder / "manifest.json").read_text()).items():
            self.put(f"{place}/manifest.json {name}", digest if name.endswith(".safetensors") else "text")
        self._put_file(f"{place}/state.json", folder / "state.json")

    def _without_folders(self, text: str) -> str:
        for folder, name in self.folders.items():
            text = text.replace(folder, name)
        return re.sub(r"\b\d+\.\d+\.\d+\.dev\d+\+\w+", "VERSION", text)  # of a checkout, by its commit


def flatten(document: Any, *, exact: bool = False) -> Flat:
    """Return the values of a document by their dotted places, or the types of most of them if not `exact`."""
    found: dict[str, set[Any]] = {}
    for place, value in _leaves(document, "", exact):
        found.setdefault(place, set()).add(value)
    return {
        place: values.copy().pop() if len(values) == 1 else "|".join(sorted(map(str, values)))
        for place, values in found.items()
    }


def _leaves(value: Any, place: str, exact: bool | None) -> Iterator[tuple[str, Any]]:
    match value:
        case dict() if value:
            for key, each in value.items():
                below = True if exact else (None if exact is None or key in VARYING else False)
                if below is False and key in EXACT and not isinstance(each, dict | list):
                    below = True
                yield from _leaves(each, f"{place}.{key}".lstrip("."), below)
        case list() if value:
            for number, each in enumerate(value):
                yield from _leaves(each, f"{place}[{number if exact else ''}]", exact)
        case dict() | list():
            yield place, "{}" if isinstance(value, dict) else "[]"
        case str() if " " in value.strip() or "\n" in value:
            yield place, "text"
        case _:
            yield place, value if exact else _type(value)


def _type(value: Any) -> str:
    return {str: "text", int: "int", float: "float", bool: "bool", type(None): "null"}.get(type(value), "other")


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def lines_in(path: Path) -> int:
    """Return the current number of lines of a file."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0

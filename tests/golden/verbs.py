"""Run every verb on small data, and record its JSON, its files, its options and the public names."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jobs import Case, Job, JobResult
from recipes import SHORT, SYNTHETIC
from values import Record

VERBS = (
    *((), ("train",), ("eval",), ("predict",), ("export",), ("recipes",), ("submit",), ("doctor",), ("profile",)),
    *(("ladder",), ("scale",), ("tune",), ("compare",), ("report",), ("data",), ("data", "inspect"), ("data", "pack")),
    *(("data", "unpack"), ("data", "stage"), ("data", "verify"), ("data", "bench")),
)
QUICK = (
    *("digits", "parallel.device=cpu", "parallel.threads=1", "model.width=0.05", "data.batch_size=32"),
    *("log.tensorboard=off", "log.report=off", "measure.telemetry=off"),
)
FULL = (
    *("train", *SYNTHETIC, *SHORT, "log.tensorboard=on", "log.report=on", "measure.telemetry=1s", "train.ema=on"),
    *(
        "measure.communication=on",
        "measure.trace=2",
        "measure.warmup_steps=2",
        "checkpoint.every=3st",
        "checkpoint.keep=1",
    ),
)
LADDER = """\
# One setting over the other.
recipe: digits
steps: 2
warmup_steps: 1
repeats: 1
rungs:
  - {name: base, set: {parallel.device: cpu, parallel.threads: 1, model.width: 0.05, log.tensorboard: "off"}}
  - {name: loop, set: {optim.implementation: loop}, expects: [optimizer]}
"""
POINTS = "ranks,nodes,rank_batch,images,time_s\n1,1,32,64000,100\n2,1,32,64000,52\n4,1,32,64000,28\n8,2,32,64000,16\n"
API = """\
import dataclasses, json, sys
import paceline
words = sys.argv[2:]
result = paceline.train("digits", *words, run_dir=sys.argv[1])
print(json.dumps({"result": result.to_dict() if hasattr(result, "to_dict") else vars(result)}, default=str))
"""
NAMES = """\
import importlib, inspect, json, sys
from pydantic import BaseModel

def resolve(name):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)

def describe(value):
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "value"
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    is_class = inspect.isclass(value)
    members = sorted(set(dir(value)) - set(dir(BaseModel))) if is_class else []
    return {
        "is": kind,
        "parameters": [str(each.replace(annotation=each.empty)).replace(" ", "") for each in parameters],
        "members": {each: True for each in members if not each.startswith("_")},
    }

found = {}
for name in sys.argv[1:]:
    try:
        found[name] = describe(resolve(name))
    except AttributeError:
        found[name] = "missing"
print(json.dumps(found))
"""


def data_cases(record: Record, work: Path) -> Iterator[Case]:
    """Return the cases that create the data for others."""
    (work / "forms.yaml").write_text(LADDER)
    (work / "points.csv").write_text(POINTS)
    (work / "api.py").write_text(API)
    (work / "names.py").write_text(NAMES)
    for name, args in (
        ("pack", ("photos", "photos.pack")),
        ("shards", ("photos", "shards", "--shard-size", "2MB")),
        ("lmdb", ("photos", "photos.lmdb", "--format", "lmdb")),
        ("resized", ("photos", "small.pack", "--resize", "24", "--quality", "80")),
    ):
        yield _packed(record, name, ("data", "pack", *args, "--workers", "1", "--json"))


def interface_cases(record: Record, work: Path, checkout: Path, public_names: Iterable[str]) -> Iterator[Case]:
    """Return the cases that list options, recipes, fields and public names."""
    for verb in VERBS:
        yield _options(record, verb)
    yield _recipes(record)
    yield _schema(record)
    yield _names(record, checkout, public_names)


def verb_cases(record: Record, work: Path) -> Iterator[Case]:
    """Return the verbs, the slowest first; those that read a run come after it in the same case."""
    yield _experiment(record, work, "ladder", ("ladder", "forms.yaml", "--ranks", "1"))
    yield _tune(record, work)
    yield _experiment(record, work, "scale", ("scale", *QUICK, "--ranks", "1,2", "--steps", "2", "--repeats", "1"))
    study = ("--batch-sizes", "16,32", "--seeds", "1", "--warmups", "0ep", "--lr-rules", "linear")
    yield _experiment(record, work, "scale batches", ("scale", *QUICK, "train.epochs=1", *study, "--ranks", "1"))
    yield _profile(record, work)
    yield _experiment(
        record, work, "profile vary", ("profile", *QUICK, "--steps", "2", "--vary", "optim.implementation=loop,foreach")
    )
    yield _run_and_readers(record, work)
    yield _json(record, "doctor", ("doctor", "digits", "--mtbf", "8h", "--json"), codes=(0, 1))
    yield _json(record, "doctor two ranks", ("doctor", "--ranks", "2", "--json"), codes=(0, 1), cores=2)
    yield _json(record, "scale collective", ("allreduce", "--ranks", "2", "--json", "--out", "net.json"), cores=2)
    yield _launched(record, work)
    yield _api(record, work)
    yield _predictions(record, work)
    yield _data(record, work)
    yield _submit(record, work)


def _json(record: Record, name: str, args: tuple[str, ...], codes: tuple[int, ...] = (0,), cores: int = 1) -> Case:
    completed = yield Job(args, cores=cores)
    _put_json(record, name, completed, codes)


def _put_json(record: Record, name: str, completed: JobResult, codes: tuple[int, ...] = (0,)) -> bool:
    if completed.codes[0] not in codes:
        record.fail(f"{name}: ended with {completed.codes[0]}: {completed.err.strip()[-400:]}")
        return False
    record.put_json(f"json/{name}", completed.out)
    return True


def _packed(record: Record, name: str, args: tuple[str, ...]) -> Case:
    completed = yield Job(args)
    if completed.codes != [0]:
        record.fail(f"data pack {name}: ended with {completed.codes[0]}: {completed.err.strip()[-400:]}")
    record.put_json(f"sets/{name}", completed.out)


def _experiment(record: Record, work: Path, name: str, args: tuple[str, ...]) -> Case:
    folder = f"runs/{name.replace(' ', '-')}"
    completed = yield Job((*args, "--run-dir", folder, "--json"))
    if _put_json(record, name, completed):
        record.put_run(f"experiment/{name}", work / folder)
        for trial in sorted((work / folder / "trials").glob("*")):
            record.put_document(f"experiment/{name}/trials result", json.loads((trial / "result.json").read_text()))
            break
        report = yield Job(("report", folder, "--format", "json"))
        if report.codes == [0]:
            record.put_json(f"json/report of {name}", report.out)
        else:
            record.put(f"json/report of {name}", f"code {report.codes[0]}")


def _tune(record: Record, work: Path) -> Case:
    """Search one setting; which value wins, and whether any is tried, depends on the load of the machine."""
    quick = (*QUICK, "data.batch_size=64", "model.norm=none", "train.accumulate=16", "--vary", "train.accumulate=1")
    args = ("tune", *quick, "--steps", "4", "--repeats", "1", "--run-dir", "runs/tune", "--json")
    completed = yield Job(args)
    if completed.codes != [0]:
        record.fail(f"tune: ended with {completed.codes[0]}: {completed.err.strip()[-400:]}")
        return
    document = json.loads(completed.out)
    record.put_document("json/tune", dict.fromkeys(document, "there"), exact=True)
    record.put_document("timing/json/tune", document)
    record.put_run("timing/experiment/tune", work / "runs/tune")
    for path in sorted((work / "runs/tune").iterdir()):
        record.put(f"experiment/tune file {path.name}", "there")


def _profile(record: Record, work: Path) -> Case:
    completed = yield Job(("profile", *QUICK, "--steps", "2", "--trace", "--run-dir", "runs/profile", "--json"))
    if _put_json(record, "profile", completed):
        record.put_run("experiment/profile", work / "runs/profile")


def _run_and_readers(record: Record, work: Path) -> Case:
    """Train a run with all features on, and read it with every verb that reads runs."""
    completed = yield Job((*FULL, "--run-dir", "runs/full", "--json"))
    if not _put_json(record, "train", completed):
        return
    record.put_run("run/full", work / "runs/full")
    for path in sorted((work / "runs/full/checkpoints").glob("*/*.safetensors")):
        record.put_tensors(f"run/full/{path.parent.name}/{path.name}", path)
    yield from _json(record, "train dry run", (*FULL, "--run-dir", "runs/never", "--dry-run", "--json"))
    second = yield Job((*FULL, "seed=1", "--run-dir", "runs/other"))
    record.put("verbs/train full with seed", second.codes[0])
    yield from _json(record, "eval", ("eval", "runs/full", "--classes", "--out", "evaluated", "--json"))
    record.put_run("files/eval --out", work / "evaluated")
    yield from _json(record, "eval best", ("eval", "runs/full", "--checkpoint", "best", "--json"))
    yield from _json(record, "predict", ("predict", "runs/full", "photos/val", "--json"))
    for form in ("csv", "jsonl", "table"):
        completed = yield Job(("predict", "runs/full", "photos/val", "--format", form, "--top", "2"))
        _put_prediction(record, form, completed)
    for form, out in (
        ("safetensors", "exported"),
        ("state_dict", "exported.pth"),
        ("torch", "exported.pt2"),
        ("onnx", "e.onnx"),
    ):
        args = ("export", "runs/full", "--format", form, "--out", out, "--json")
        yield from _json(record, f"export {form}", args)
    record.put_files("files/export safetensors", work / "exported")
    for path in sorted((work / "exported").glob("*.safetensors")):
        record.put_tensors(f"export/{path.name}", path)
    for path in sorted((work / "exported").glob("*.json")):
        record.put_json(f"export/{path.name}", path.read_text(), exact=True)
    for form in ("json", "md", "html"):
        completed = yield Job(
            ("report", "runs/full", "--format", form, *(["--out", "r.html"] if form == "html" else []))
        )
        record.put(f"verbs/report {form}", completed.codes[0])
        if form == "json":
            record.put_json("json/report", completed.out)
    yield from _json(record, "report --json", ("report", "runs/full", "--json"))
    args = ("compare", "runs/full", "runs/other", "--target", "0.05", "--json", "--out", "compared.json")
    yield from _json(record, "compare", args)
    record.put_json("json/compare --out", (work / "compared.json").read_text())
    yield from _json(
        record,
        "scale predict from a run",
        ("predict-scaling", "runs/full", "--at", "8,16", "--network", "hdr", "--json"),
    )
    yield from _json(record, "submit eval", ("submit", "eval", "runs/full", "--engine", "slurm", "--dry-run", "--json"))


def _put_prediction(record: Record, form: str, completed: JobResult) -> None:
    record.put(f"verbs/predict {form}", completed.codes[0])
    lines = completed.out.splitlines()
    record.put(f"predict/{form} lines", len(lines))
    if form == "csv":
        record.put("predict/csv columns", lines[0])
    if form == "jsonl":
        for number, line in enumerate(lines):
            record.put_document(f"predict/jsonl line {number}", json.loads(line), exact=True)


def _launched(record: Record, work: Path) -> Case:
    """Two ranks that paceline launches."""
    completed = yield Job(
        ("train", *SYNTHETIC, *SHORT, "--ranks", "2", "--run-dir", "runs/launched", "--json"), cores=2
    )
    if _put_json(record, "train launched", completed):
        record.put_run("run/launched", work / "runs/launched")


def _api(record: Record, work: Path) -> Case:
    """`paceline.train(...)` from a script."""
    args = ("parallel.threads=1", "parallel.device=cpu", "train.epochs=auto", "train.steps=4", "log.tensorboard=off")
    completed = yield Job(("runs/api", *args), script="api.py")
    _put_json(record, "python paceline.train", completed)


def _predictions(record: Record, work: Path) -> Case:
    args = ("predict-scaling", "--points", "points.csv", "--at", "16,32", "--price", "2", "--json")
    completed = yield Job((*args, "--run-dir", "runs/predicted"))
    if _put_json(record, "scale predict from points", completed):
        record.put_run("experiment/scale predict", work / "runs/predicted")


def _data(record: Record, work: Path) -> Case:
    for name, path in (("pack", "photos.pack"), ("resized pack", "small.pack")):
        record.put(f"data/{name} sha256", hashlib.sha256((work / path).read_bytes()).hexdigest())
    record.put_files("data/shards", work / "shards")
    for name in ("photos", "photos.pack", "train.csv", "shards", "digits"):
        yield from _json(record, f"data inspect {name}", ("data", "inspect", name, "--json"))
    yield from _json(record, "data inspect --held-out", ("data", "inspect", "photos", "--held-out", "--json"))
    yield from _json(record, "data verify", ("data", "verify", "photos.pack", "--against", "photos", "--json"))
    yield from _json(record, "data verify damaged", ("data", "verify", "damaged", "--json"), codes=(2,))
    yield from _json(record, "data unpack", ("data", "unpack", "photos.pack", "unpacked", "--json"))
    record.put_files("data/unpacked", work / "unpacked")
    (work / "disk").mkdir()
    yield from _json(record, "data stage", ("data", "stage", "photos", "disk", "--json"))
    yield from _json(record, "data stage --remove", ("data", "stage", "disk", "--remove", "--json"))
    args = ("data", "bench", "photos", "--seconds", "0.1", "--rounds", "1", "--no-cold", "--workers", "1", "--json")
    yield from _json(record, "data bench", args)


def _submit(record: Record, work: Path) -> Case:
    for name, args in (
        ("slurm", ("digits", "--engine", "slurm", "--run-dir", "runs/job", "slurm.time=2h")),
        (
            "kubernetes",
            (
                "digits",
                "--engine",
                "kubernetes",
                "--run-dir",
                "/data/job",
                "kubernetes.image=paceline",
                "kubernetes.claim=disk",
            ),
        ),
        ("slurm ladder", ("ladder", "forms.yaml", "--engine", "slurm", "--run-dir", "runs/ladder-job")),
        ("slurm scale", ("scale", "digits", "--engine", "slurm", "--run-dir", "runs/scale-job", "--array")),
    ):
        nodes = () if "ladder" in args else ("--nodes", "2", "--ranks-per-node", "1")
        completed = yield Job(("submit", *args, *nodes, "--dry-run", "--json"))
        record.put(f"verbs/submit {name}", completed.codes[0])
        if completed.codes[0]:
            record.put_error(f"verbs/submit {name}", completed.err)
            continue
        record.put_json(f"json/submit {name}", completed.out)
        for path, script in json.loads(completed.out).get("scripts", {}).items():
            script = re.sub(r"\s*\\\n\s*", " ", script)  # line breaks depend on the length of paths
            lines = [line for line in script.splitlines() if line and not re.match(r"\s*#(?!SBATCH)", line)]
            for number, line in enumerate(lines):
                command = "text" if re.search("recipe [0-9a-f]{12}, ", line) else re.sub("  # .*", "", line)
                record.put(f"script/{name} {path} line {number}", command)


def _options(record: Record, verb: tuple[str, ...]) -> Case:
    completed = yield Job((*verb, "--help"))
    name = " ".join(verb) or "paceline"
    record.put(f"options/{name} exit code", completed.codes[0])
    for option in sorted(set(re.findall(r"^\W*(?:\*\s+)?(--[a-z][\w-]*)", completed.out, re.MULTILINE))):
        record.put(f"options/{name} {option}", "there")
    commands = re.search(r"Commands ─(.*)", completed.out, re.DOTALL)
    for command in re.findall(r"^│ ([a-z]+) ", commands[1], re.MULTILINE) if commands else ():
        record.put(f"options/{name} verb {command}", "there")


def _recipes(record: Record) -> Case:
    completed = yield Job(("recipes", "--json"))
    record.put_json("recipes", completed.out, exact=True)
    for name in json.loads(completed.out):
        completed = yield Job(("recipes", name, "--json"))
        if completed.codes == [0]:  # a base is not a recipe
            record.put_json(f"recipes/{name}", completed.out, exact=True)
        else:
            record.put(f"recipes/{name}", f"code {completed.codes[0]}")


def _schema(record: Record) -> Case:
    """Record the schema as values of fields see it: without prose, and without the names of our classes."""
    completed = yield Job(("recipes", "--schema"))
    schema = json.loads(completed.out)
    record.put_document("schema", _resolved(schema, schema["$defs"]), exact=True)


def _resolved(schema: Any, classes: dict[str, Any]) -> Any:
    match schema:
        case {"$ref": str(name), **more}:
            return _resolved({**classes[name.removeprefix("#/$defs/")], **more}, classes)
        case dict():
            left_out = ("$defs", "description", "title", "discriminator")
            return {
                key: _resolved(value, classes)
                for key, value in schema.items()
                if key not in left_out or (key == "title" and not isinstance(value, str))
            }
        case list():
            return [_resolved(each, classes) for each in schema]
        case _:
            return schema


def _names(record: Record, checkout: Path, more: Iterable[str]) -> Case:
    """Record the signatures of the names on the Python API page, of this record or of an earlier one."""
    pages = [checkout / "docs/reference/python.md", *(checkout / "docs/reference/python").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages if page.exists())  # an earlier commit has one page
    names = {name.removesuffix("()") for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    earlier = {found[1] for place in more if (found := re.match(r"python/(\S+)", place))}
    completed = yield Job(tuple(sorted(names | earlier)), script="names.py")
    if completed.codes != [0]:
        record.fail(f"public names: {completed.err}")
        return
    for name, value in json.loads(completed.out).items():
        record.put_document(f"python/{name}", value, exact=True)

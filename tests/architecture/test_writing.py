"""Files are opened to be written, and trees are removed, in one module and in few named places beside it."""

import ast

MODULE = "core/files.py"

# Each has a reason; a place that no longer opens anything must go from the list.
MAY_WRITE = {
    "data/sources/download.py": "a scratch folder of tempfile's, in which torchvision writes",
    "cli/data_bench.py": "a scratch folder of tempfile's",
    "cli/python_ranks.py": "a scratch folder of tempfile's",
    "inference/export.py": "a scratch folder of tempfile's",
    "lab/doctor/host.py": "a probe without a name",
    "training/outputs.py": "a probe without a name",
    "training/preflight.py": "a scratch folder of tempfile's",
    "measure/profiler.py": "a scratch folder of tempfile's, in which torch's profiler writes",
    "measure/chrome_trace.py": "gzip, over a file that `core.files` has opened",
    "watch/inject/sitecustomize.py": "records in a script that runs without the rest of paceline",
    "watch/record_writer.py": "records in a script that runs without the rest of paceline",
}
MAY_REMOVE_TREES = {
    "cli/experiment.py": "the data that the experiment has made",
    "cli/profile.py": "traces, from one of its runs to the profile's own folder",
    "cli/script_ladder.py": "a run of the experiment that was interrupted, whose folder this process has locked",
    "cli/submit.py": "the job's folder in a run directory that was claimed for it a moment ago",
    "data/remote/cache.py": "a pack's folder of the cache, which this process has locked",
    "data/staging/stage.py": "a copy that this process has locked",
    "data/file_lock.py": "a folder with its mark, which this process has locked",
    "inference/export.py": "a scratch folder of tempfile's",
    "lab/prepare_data.py": "what was made for an experiment, in its folder",
    "lab/runner.py": "a run of the experiment that was killed, which this process has locked",
    "training/checkpoint/storage.py": "checkpoints that are no longer kept",
    "training/eval_outputs.py": "the new folder of `eval --out`, and the run's worst images of an earlier evaluation",
    "training/thumbnails.py": "the run's worst images and those of the first step, which are replaced",
}
OPENERS = {"open", "io.open", "os.open", "os.fdopen", "os.mkfifo", "os.truncate", "gzip.open", "bz2.open", "lzma.open"}
COPIERS = {f"shutil.{name}" for name in ("copy", "copy2", "copyfile", "copytree")}
METHODS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"}


def writes(module) -> list[str]:
    """Return where a module opens a file that may be written to, makes a temporary one, or copies one."""
    dotted = {id(node): name for name, node in module.names}
    found = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted.get(id(node.func), "")
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        is_open = name in OPENERS or (method == "open" and name.partition(".")[0] not in ("lmdb", "tarfile", "zipfile"))
        is_writing = name == "os.truncate" or name in COPIERS or name.startswith("tempfile.") or method in METHODS
        is_writing |= is_open and _is_to_write(node)
        if name == "os.open":
            is_writing |= not any(word in ast.unparse(node) for word in ("O_RDONLY", "os.devnull"))
        if is_writing:
            found.append(module.at(node.lineno, ast.unparse(node)))
    return found


def _is_to_write(call: ast.Call) -> bool:
    """Whether a mode has any of w, a, x and +, or is none that can be read here; without one files are read."""
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    modes += [each for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return any(not isinstance(mode, ast.Constant) or set("wax+") & set(mode.value) for mode in modes)


def removes(module) -> list[str]:
    return [module.at(node.lineno, name) for name, node in module.names if name in ("shutil.rmtree", "shutil.move")]


def outside(modules, look, *allowed: str) -> list[str]:
    found = {module.path: places for module in modules.values() if (places := look(module))}
    unused = [place for place in allowed if not any(path.startswith(place) for path in found)]
    assert not unused, f"these need no exception any more: {unused}"
    return [place for path, places in found.items() if not path.startswith(allowed) for place in places]


def test_files_are_opened_to_be_written_in_one_module(modules, none_of):
    none_of(outside(modules, writes, MODULE, *MAY_WRITE))


def test_trees_are_removed_in_named_places_only(modules, none_of):
    none_of(outside(modules, removes, *MAY_REMOVE_TREES))

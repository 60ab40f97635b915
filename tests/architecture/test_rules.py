"""What the house forbids everywhere, or everywhere but in one named place."""

import ast


def uses(modules, wanted) -> dict[str, list[str]]:
    """Return, for each module path, the places at which it reads a name in `wanted`."""
    found: dict[str, list[str]] = {}
    for module in modules.values():
        for dotted, node in module.names:
            if dotted in wanted:
                found.setdefault(module.path, []).append(module.at(node.lineno, dotted))
    return found


def importers(modules, wanted) -> dict[str, list[str]]:
    """Return, for each module path, the places at which it imports a package in `wanted`."""
    found: dict[str, list[str]] = {}
    for module in modules.values():
        for each in module.imports:
            if each.target.partition(".")[0] in wanted:
                found.setdefault(module.path, []).append(module.at(each.line, each.target))
    return found


def outside(found: dict[str, list[str]], *allowed: str) -> list[str]:
    """Return the places that are in none of the `allowed` files and folders, each of which must be used."""
    assert all(any(path.startswith(place) for path in found) for place in allowed), f"{allowed} holds none"
    return [place for path, places in found.items() if not path.startswith(allowed) for place in places]


def test_the_environment_is_read_only_by_the_command_line_and_the_world(modules, none_of):
    """`parallel/environ.py` is handed a mapping today; it may read the environment, nothing else below `cli` may.

    But for passwords: `data/remote/http.py` reads them in the process that sends them, so that no plan or pickle
    carries them there. `watch` reads them in scripts that paceline did not start, to which nothing can be handed.
    """
    names = {f"os.{name}" for name in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")}
    found = uses(modules, names)
    places = outside(found, "cli/", "data/remote/http.py", "watch/observer.py", "watch/inject/")
    none_of([place for place in places if "/parallel/environ.py:" not in place])


def test_time_is_read_only_by_the_clock_and_at_the_edges(modules, none_of):
    """Everything that is reported comes from `measure`. `cli` stamps the start of the process, `parallel/launch.py`
    waits for processes, `parallel/heartbeat.py`, `watchdog.py` and `rendezvous.py` for ranks that may never answer,
    `data/remote/http.py` for servers that may never finish, and `data/sources/listing.py` for the age of folders.
    `watch` times scripts that paceline did not write.
    """
    found = importers(modules, {"time"})
    waiting = tuple(f"parallel/{name}.py" for name in ("launch", "heartbeat", "watchdog", "rendezvous"))
    others = ("data/remote/http.py", "data/sources/listing.py", "watch/")
    none_of(outside(found, "measure/", "cli/", *others, *waiting))


def test_pickle_is_imported_only_where_it_is_fenced_in(modules, none_of):
    names = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    none_of(outside(importers(modules, names), "data/sources/restricted_pickle.py"))


def test_nothing_unpickles_on_the_side(modules, none_of):
    """`torch.load` is a pickle even with `weights_only`; numpy's is one with `allow_pickle`.

    Pretrained weights come as such files, and they alone are read so, restricted to tensors (ADR 9).
    """
    none_of(outside(uses(modules, {"torch.load"}), "models/pretrained.py"))
    none_of(keywords(modules, "allow_pickle"))
    source = modules["paceline.models.pretrained"].text
    assert source.count("torch.load(") == 1 and source.count("weights_only=True") == 1


def test_nothing_runs_text_as_code_or_a_shell(modules, none_of):
    names = {"eval", "exec", "os.system", "os.popen", "builtins.eval", "builtins.exec"}
    names |= {"subprocess.getoutput", "subprocess.getstatusoutput"}
    wrong = [place for places in uses(modules, names).values() for place in places]
    none_of(wrong + keywords(modules, "shell"))


def test_every_process_is_tied_to_the_one_that_starts_it(modules, none_of):
    """Programs are started by `die_with_parent_command`; forked processes call `die_with_parent`.

    `subprocess.run` waits for short commands, such as git and sbatch, which end by themselves.
    """
    wrong, programs = [], 0
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Popen"):
                programs += 1
                if not ast.unparse(node.args[0]).startswith("die_with_parent_command("):
                    wrong.append(module.at(node.lineno, ast.unparse(node.func)))
    assert programs == 4
    none_of(wrong)
    starters = {"multiprocessing.get_context", "torch.utils.data.DataLoader"}
    forking = {*uses(modules, starters)}
    assert forking >= {"lab/loader_bench.py", "data/verify.py", "data/loaders/process.py"}
    ties = {*uses(modules, {"paceline.core.process.die_with_parent", "paceline.data.workers.init_worker"})}
    none_of([f"src/paceline/{path}: forks, and does not call die_with_parent" for path in forking - ties])


def keywords(modules, name: str) -> list[str]:
    """Return the calls that give argument `name` anything but a plain False."""
    wrong, calls = [], 0
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                calls += 1
                for keyword in node.keywords:
                    is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    if keyword.arg == name and not is_false:
                        wrong.append(module.at(node.lineno, f"{name}={ast.unparse(keyword.value)}"))
    assert calls > 500
    return wrong


def test_no_file_is_a_drawer_for_anything(modules, none_of):
    names = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
    wrong = [module.at(1, module.name) for module in modules.values() if names & set(module.name.split("."))]
    none_of(wrong)

"""Imports follow the arrow of the design, form no circle, and keep torch out of what must answer at once."""

from itertools import pairwise

FOUR = {"data", "models", "parallel", "measure"}
BELOW_TRAINING = FOUR | {"recipe", "core"}

# cli -> lab|cluster|inference -> training -> {data|models|parallel|measure} -> recipe -> core;  cli -> report -> core
# cli|lab -> watch -> measure|interop, as a patch of a script puts paceline's decoder into it
# interop -> training;  contrib -> training, and data and training import contrib in functions alone
MAY_IMPORT = {
    "core": set(),
    "recipe": {"core"},
    "data": {"recipe", "core"},
    "models": {"recipe", "core"},
    "parallel": {"recipe", "core"},
    "measure": {"recipe", "core"},
    "training": BELOW_TRAINING,
    "contrib": BELOW_TRAINING | {"training"},
    "lab": BELOW_TRAINING | {"training", "watch"},
    "cluster": BELOW_TRAINING | {"training"},
    "inference": BELOW_TRAINING | {"training"},
    "interop": BELOW_TRAINING | {"training"},
    "watch": {"core", "measure", "interop"},
    "report": {"core"},
    "cli": BELOW_TRAINING | {"training", "lab", "cluster", "inference", "report", "watch"},
}
MAY_IMPORT_CONTRIB_IN_FUNCTIONS = {"data", "training"}
MAY_IMPORT_FROM_BESIDE_THE_PACKAGES = {"paceline": {"core", "recipe"}, "paceline.__main__": {"cli"}}

# What answers at once (`paceline --help`, `recipes`, `submit --dry-run`, `report`) and what starts the ranks.
TORCH_FREE_PACKAGES = {"core", "recipe", "report", "cluster"}
TORCH_FREE_MODULES = {
    "paceline", "paceline.__main__", "paceline.cli", "paceline.cli.app", "paceline.lab.predict",
    "paceline.parallel", "paceline.parallel.environ", "paceline.parallel.launch",
    "paceline.cli.watch", "paceline.watch", "paceline.watch.advice", "paceline.watch.launch", "paceline.watch.records",
    "paceline.watch.summary", "paceline.watch.trace", "paceline.watch.measured_run",
}  # fmt: skip
HEAVY = {"torch", "torchvision", "timm"}


def is_torch_free(module) -> bool:
    if module.name.startswith("paceline.lab.predict."):
        return True
    return module.package in TORCH_FREE_PACKAGES or module.name in TORCH_FREE_MODULES


def heavy_imports(module):
    return [each for each in module.imports if each.target.partition(".")[0] in HEAVY]


def test_every_package_has_a_place_in_the_order(modules):
    packages = {module.package for module in modules.values()} - {""}
    assert packages >= {"core", "recipe", "training", "cli"} | FOUR
    assert packages - set(MAY_IMPORT) == set()
    assert {name for name, module in modules.items() if not module.package} == set(MAY_IMPORT_FROM_BESIDE_THE_PACKAGES)


def test_a_package_imports_only_what_stands_to_its_right(modules, edges, none_of):
    wrong, seen = [], set()
    for name, targets in edges.items():
        module = modules[name]
        allowed = MAY_IMPORT[module.package] if module.package else MAY_IMPORT_FROM_BESIDE_THE_PACKAGES[name]
        for target, each in targets:
            package = modules[target].package
            seen.add((module.package, package))
            if package == "contrib" and module.package in MAY_IMPORT_CONTRIB_IN_FUNCTIONS and not each.at_once:
                continue
            if package not in allowed | {module.package, ""}:
                wrong.append(module.at(each.line, f"{module.package or name} imports {package} ({each.target})"))
    none_of(wrong)
    assert {("recipe", "core"), ("data", "recipe"), ("training", "data"), ("cli", "training")} <= seen


def test_only_training_imports_all_four(modules, edges, none_of):
    """Elsewhere one module that imports all four would be a second composition root."""
    packages = {name: {modules[target].package for target, _ in targets} for name, targets in edges.items()}
    in_training = set().union(*(packages[name] for name in modules if modules[name].package == "training"))
    assert in_training >= FOUR
    meeting = [name for name in modules if packages[name] >= FOUR and modules[name].package != "training"]
    none_of([modules[name].at(1, "imports data, models, parallel and measure") for name in meeting])


def test_torch_free_modules_import_no_torch_at_any_level(modules, none_of):
    wrong = [
        module.at(each.line, f"imports {each.target}")
        for module in modules.values()
        if is_torch_free(module)
        for each in heavy_imports(module)
    ]
    none_of(wrong)
    assert sum(is_torch_free(module) for module in modules.values()) > 25
    assert sum(bool(heavy_imports(module)) for module in modules.values()) > 15


def test_importing_a_torch_free_module_loads_none_that_imports_torch(modules, edges, none_of):
    """Importing `a.b.c` runs `a` and `a.b` too, so those count as imported."""
    imports_torch = {name for name, module in modules.items() if any(each.at_once for each in heavy_imports(module))}

    def loaded_by(name: str) -> list[str]:
        chains, queue = {name: [name]}, [name]
        while queue:
            current = queue.pop()
            parents = [current.rsplit(".", up)[0] for up in range(1, current.count(".") + 1)]
            for target in [*parents, *(target for target, each in edges[current] if each.at_once)]:
                if target not in chains:
                    chains[target] = [*chains[current], target]
                    queue.append(target)
        return [" -> ".join(chains[end]) for end in chains if end in imports_torch]

    starts = [name for name, module in modules.items() if is_torch_free(module)]
    assert len(starts) > 25
    none_of([chain for name in starts for chain in loaded_by(name)])
    assert loaded_by("paceline.training.run") != []


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return one shortest circle per set of nodes that lead back to themselves; its first node is also its last."""

    def circle_through(start: str) -> list[str]:
        paths, queue = {start: [start]}, [start]
        while queue:
            current = queue.pop(0)
            for target in sorted(graph.get(current, ())):
                if target == start:
                    return [*paths[current], start]
                if target not in paths:
                    paths[target] = [*paths[current], target]
                    queue.append(target)
        return []

    return list({frozenset(circle): circle for name in graph if (circle := circle_through(name))}.values())


def test_no_modules_import_one_another_in_a_circle(modules, edges, none_of):
    """Imports inside functions count: they hide a circle, they do not open it."""

    def places(circle: list[str]) -> str:
        steps = pairwise(circle)
        lines = [(name, next(each.line for target, each in edges[name] if target == after)) for name, after in steps]
        return " -> ".join(modules[name].at(line, f"from {name}") for name, line in lines)

    graph = {name: {target for target, _ in targets} - {name} for name, targets in edges.items()}
    none_of([places(circle) for circle in circles(graph)])


def test_no_folders_import_one_another_in_a_circle(modules, edges, none_of):
    """A folder can be read without those above it. An `__init__` may offer names from the folders below its own."""

    def folder_of(name: str) -> str:
        return modules[name].path.rpartition("/")[0]

    graph: dict[str, set[str]] = {}
    for name, targets in edges.items():
        folder = folder_of(name)
        used = {folder_of(target) for target, each in targets if each.at_once} - {folder, ""}
        if folder:  # the package's own files, `paceline/__init__.py` and `__main__.py`, stand above all folders
            graph.setdefault(folder, set()).update(
                each for each in used if not (name.endswith(folder.replace("/", ".")) and each.startswith(f"{folder}/"))
            )
    assert len(graph) > 20
    none_of([f"src/paceline: {' -> '.join(circle)}" for circle in circles(graph)])


def test_a_circle_is_found():
    assert [set(each) for each in circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})] == [{"a", "b", "c"}]

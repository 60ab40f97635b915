"""What should answer at once loads nothing heavy, seen from outside: a fresh process tells what it loaded."""

import json
import subprocess
import sys

HEAVY = {"torch", "torchvision", "timm", "sklearn", "tensorboard"}
WAIT_S = 60

TELL = """
import json, sys
def tell():
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules if "." not in name})), file=sys.stderr)
"""
RUN = """
from paceline.cli import main
sys.argv = ["paceline", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    tell()
    sys.exit(end.code)
"""
RUN_ALL = """
from paceline.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["paceline", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    print(chr(30), flush=True)
    tell()
"""


def loaded(code: str, *words: str) -> tuple[str, set[str]]:
    """Return what a fresh process says, and the packages that it has loaded when it ends."""
    said, told = answered(code, *words)
    return said, told[-1]


def answered(code: str, *words: str) -> tuple[str, list[set[str]]]:
    """Return what a fresh process says, and the packages that it had loaded whenever it told."""
    finished = subprocess.run(
        [sys.executable, "-c", TELL + code, *words], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    return finished.stdout, [set(json.loads(line)) for line in finished.stderr.splitlines() if line.startswith("[")]


def test_importing_the_command_line_loads_nothing_heavy():
    _, packages = loaded("import paceline.cli\ntell()")
    assert {"paceline", "typer"} <= packages
    assert packages & HEAVY == set()


def test_what_should_answer_at_once_loads_nothing_heavy():
    """In one process: what one of them has loaded stays."""
    commands = [
        (["--help"], "Usage"),
        (["train", "--help"], "--ranks"),
        (["watch", "--help"], "--warmup"),
        (["--version"], "0."),
        (["recipes"], "digits"),
        (["recipes", "digits", "optim.lr=1", "--origin"], "command line"),
        (["recipes", "--schema"], "$schema"),
        (["--show-completion", "bash"], "complete -o default"),
        (["--complete", "train", "digits", "optim.l"], "optim.lr="),
        (["--complete", "ladder", ""], "ddp-post"),
    ]
    said, told = answered(RUN_ALL, json.dumps([words for words, _ in commands]))
    for (words, says), text, packages in zip(commands, said.split(chr(30))[:-1], told, strict=True):
        assert says in text, words
        assert "paceline" in packages
        assert packages & HEAVY == set(), words


AT_TORCH = """
import gc, os
class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("cycles are searched" if gc.isenabled() else "cycles are not searched", flush=True)
            tell()
            sys.stderr.flush()
            os._exit(0)
sys.meta_path.insert(0, AtTorch())
"""
"""Ends a process as soon as it imports torch."""


def test_a_run_prints_its_first_line_before_it_imports_anything_heavy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said, packages = loaded(AT_TORCH + RUN, "train", "digits")
    first, last = said.splitlines()
    assert "starting 1 rank" in first
    assert last == "cycles are not searched"  # which would take a quarter of the time to import torch
    assert packages & (HEAVY | {"scipy", "pandas", "PIL"}) == set()


def test_other_verbs_search_no_cycles_while_they_import_torch_either():
    said, packages = loaded(AT_TORCH + RUN, "probe", "digits")
    assert said.splitlines()[-1] == "cycles are not searched"
    assert packages & HEAVY == set()


def test_the_process_that_starts_ranks_loads_nothing_heavy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = "import paceline.cli.train as train\ntrain.start_ranks = lambda ranks, *_, **__: print(ranks) or 0\n"
    said, packages = loaded(started + RUN, "train", "digits", "--ranks", "2", "--oversubscribe")
    assert said.splitlines()[-1] == "2"
    assert packages & (HEAVY | {"numpy", "scipy", "pandas", "PIL"}) == set()


def test_a_watched_command_runs_without_anything_heavy_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said, packages = loaded(RUN, "watch", "--json", "true")
    assert json.loads(said)["exit_code"] == 0
    assert packages & (HEAVY | {"scipy", "pandas", "PIL"}) == set()


def test_a_script_that_starts_ranks_loads_no_torch():
    _, packages = loaded("import paceline.cli.python_api, paceline.cli.python_ranks\ntell()")
    assert "paceline" in packages
    assert packages & HEAVY == set()


def test_reading_digits_loads_no_scikit_learn():
    code = "from paceline.data.sources.builtin import load_digits\nprint(len(load_digits().train))\ntell()"
    said, packages = loaded(code)
    assert said == "1438\n"
    assert packages & {"sklearn", "scipy", "pandas"} == set()


def test_every_torch_free_module_can_be_imported_without_torch(modules):
    """Torch is hidden, so that an import of it would fail, wherever it stands."""
    names = [name for name, module in modules.items() if module.package in {"core", "recipe", "report", "cluster"}]
    names += ["paceline.parallel.environ", "paceline.parallel.launch", "paceline.cli.app", "paceline.cli.watch"]
    assert len(names) > 20
    hide = "for name in ('torch', 'torchvision', 'timm'): sys.modules[name] = None\n"
    said, _ = loaded(hide + "".join(f"import {name}\n" for name in names) + "print('imported')\ntell()")
    assert said == "imported\n"

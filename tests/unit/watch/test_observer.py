"""Training scripts under observation: the same weights, and records of where their time went."""

import json
import math
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import paceline.watch

HERE = Path(__file__).parent
INJECT = Path(paceline.watch.__file__).parent / "inject"
TIMEOUT_S = 120


def run(folder, *command, records=None, **environ):
    """Run Python with `command`; observe it if `records` is a folder. Return its standard output."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if records is not None:
        records.mkdir(exist_ok=True)
        environ = {"PYTHONPATH": f"{INJECT}:{INJECT.parents[2]}", "PACELINE_WATCH_DIR": str(records), **environ}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(script):
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", HERE / "scripts" / script)


def read(records):
    """Return the records of each process by kind, in the order of ranks, once they are consistent."""
    found = []
    for path in records.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = {
            kind: [line for line in lines if line["kind"] == kind] for kind in ("process", "step", "pause", "note")
        }
        assert lines[0]["kind"] == "process" and lines[-1]["kind"] == "end"
        assert lines[-1]["steps"] == len(kinds["step"])
        found.append(kinds)
    return sorted(found, key=lambda kinds: kinds["process"][0]["rank"] or 0)


def totals_of(steps):
    names = {name for step in steps for name in step["stages"]}
    return {name: math.fsum(step["stages"].get(name, 0.0) for step in steps) for name in names}


def output_of(process):
    out, err = process.communicate(TIMEOUT_S)
    assert process.returncode == 0, err
    return out


@pytest.fixture(scope="module")
def alone(forking, tmp_path_factory):
    """Return a function from a script to its standard output without observation; torch is imported already."""
    folder = tmp_path_factory.mktemp("alone")
    return lambda script: output_of(forking.start([str(HERE / "scripts" / script)], folder, {}))


@pytest.fixture(scope="module")
def plain(alone, tmp_path_factory):
    """Return the output of the plain script without observation, then with, and the records."""
    folder = tmp_path_factory.mktemp("plain")
    observed = run(folder, HERE / "scripts" / "plain.py", records=folder / "records")
    return alone("plain.py"), observed, read(folder / "records")


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return what the plain script prints with a worker process and its losses, and the folder of its records."""
    folder = tmp_path_factory.mktemp("printed")
    printing = (HERE / "scripts" / "plain.py").read_text()
    printing = printing.replace(".backward()", ".backward(); print((loss / MICRO_BATCHES).item(), 'loss')")
    (folder / "printing.py").write_text(printing)
    said = run(folder, "printing.py", "1", records=folder / "records", PACELINE_WATCH_LOSSES="1")
    return said, folder / "records"


def test_observation_does_not_change_a_bit(plain):
    assert plain[0] == plain[1]


def test_losses_are_those_of_the_script_summed_over_micro_batches(plain, printed):
    said, records = printed
    assert said.splitlines()[-1:] == plain[0].splitlines()  # the same weights
    losses_said = [float(line.split()[0]) for line in said.splitlines() if line.endswith(" loss")]
    lines = [json.loads(line) for path in records.iterdir() for line in path.read_text().splitlines()]
    losses = {line["n"]: line["loss"] for line in lines if line["kind"] == "loss"}
    assert losses == {n: losses_said[2 * n - 2] + losses_said[2 * n - 1] for n in range(1, 19)}


def test_a_process_writes_its_steps_and_pauses(plain):
    _, _, (records,) = plain
    process = records["process"][0]
    assert (process["rank"], process["world_size"], process["framework"]) == (None, None, "")
    assert process["started_s"] < records["step"][0]["start_s"] - 0.5  # torch takes longer to import
    assert process["unix_s"] > 1.7e9
    steps = records["step"]
    assert [step["n"] for step in steps] == list(range(1, 19))
    assert {step["micro_batches"] for step in steps} == {2}
    assert {step["samples"] for step in steps} == {16}
    names = [pause["name"] for pause in records["pause"]]
    epoch = ["epoch_boundary", "evaluate", "checkpoint"]
    assert names == ["start_up", "epoch_boundary", *epoch, "epoch_boundary", *epoch, "epoch_boundary", *epoch]
    assert records["note"] == []


def test_stages_and_pauses_add_up_to_the_wall_clock(plain):
    _, _, (records,) = plain
    for step, following in zip(records["step"], records["step"][1:], strict=False):
        assert step["end_s"] == following["start_s"]
    for step in records["step"]:
        start_s, end_s = step["start_s"], step["end_s"]
        inside = [pause for pause in records["pause"] if start_s <= pause["start_s"] < end_s]
        paused_s = math.fsum(pause["end_s"] - pause["start_s"] for pause in inside)
        assert math.fsum(step["stages"].values()) + paused_s == pytest.approx(end_s - start_s, abs=1e-6)


def test_plain_steps_are_attributed(plain):
    _, _, (records,) = plain
    totals = totals_of(records["step"][2:])
    assert {"data_wait", "forward", "loss", "backward", "optimizer", "log"} <= {name for name, s in totals.items() if s}
    shares = [step["stages"].get("other", 0.0) / math.fsum(step["stages"].values()) for step in records["step"][2:]]
    assert statistics.median(shares) < 0.1  # of a few milliseconds; other processes may interrupt some steps
    assert "exposed_communication" not in totals


def test_workers_of_loaders_write_nothing(printed):
    _, records = printed
    assert len(read(records)) == 1


@pytest.mark.parametrize(
    ("break_it", "is_named"),
    [
        ("import paceline.watch.step_timer as t; t.StepTimer.begin_stage = lambda self, stage: 1 / 0", True),
        ("import paceline.watch.observer as o; o.Observer._describe_process = lambda self: 1 / 0", True),
        ("import shutil, os; shutil.rmtree(os.environ['PACELINE_WATCH_DIR'])", False),
    ],
)
def test_a_broken_observer_leaves_the_script_alone(plain, tmp_path, break_it, is_named):
    records = tmp_path / "records"
    script = f"import runpy; runpy.run_path({str(HERE / 'scripts' / 'plain.py')!r}, run_name='__main__')"
    code = f"import sys; sys.argv = ['plain.py']; {break_it}; {script}"
    assert run(tmp_path, "-c", code, records=records) == plain[0]
    notes = [line for path in records.glob("*") for line in path.read_text().splitlines() if '"note"' in line]
    assert len(notes) == is_named


def test_unusual_scripts_run_as_without_observation(alone, tmp_path):
    observed = run(tmp_path, HERE / "scripts" / "unusual.py", records=tmp_path / "records")
    assert observed == alone("unusual.py")
    (records,) = read(tmp_path / "records")
    assert (len(records["step"]), records["note"]) == (8, [])


PRINTING = """
import sys, time, torch

class SlowDisk:
    def write(self, text):
        time.sleep(0.01)

    def flush(self):
        pass

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sys.stdout = SlowDisk()
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print("step")  # two writes: the text and the end of the line
"""


def test_printing_is_logging(tmp_path):
    run(tmp_path, "-c", PRINTING, records=tmp_path / "records")
    (records,) = read(tmp_path / "records")
    assert all(step["stages"]["log"] >= 0.02 for step in records["step"][1:])


def test_torch_can_be_imported_after_the_environment_was_cleared(tmp_path):
    code = "import os; del os.environ['PACELINE_WATCH_DIR']; import torch; print(torch.ones(1).sum().item())"
    assert run(tmp_path, "-c", code, records=tmp_path / "records") == "1.0\n"


def test_processes_without_torch_load_no_observer(tmp_path):
    code = "import sys; print(sorted(name for name in sys.modules if 'paceline' in name or name in ('json', 'socket')))"
    assert run(tmp_path, "-c", code, records=tmp_path / "records") == "[]\n"
    assert list((tmp_path / "records").iterdir()) == []


def test_a_hidden_sitecustomize_runs(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.HIDDEN = __name__\n")
    path = f"{INJECT}:{tmp_path / 'own'}"
    assert run(tmp_path, "-c", "print(HIDDEN)", records=tmp_path / "records", PYTHONPATH=path) == "sitecustomize\n"


def test_two_finders_that_ask_the_rest_do_not_ask_each_other_for_ever(tmp_path):
    code = """
import sys
from paceline.watch.imports import AfterImport
found = []
for name in ("first", "second"):
    sys.meta_path.insert(0, AfterImport(["colorsys"], lambda module, name=name: found.append((name, module.__name__))))
import colorsys
print(found, colorsys.rgb_to_yiq(0, 0, 0))
"""
    out = run(tmp_path, "-c", code, PYTHONPATH=str(INJECT.parents[2]))
    assert out == "[('first', 'colorsys'), ('second', 'colorsys')] (0.0, 0.0, 0.0)\n"


def test_torch_compile_compiles_the_same_graphs(alone, tmp_path):
    observed = run(tmp_path, HERE / "scripts" / "compiled.py", records=tmp_path / "records")
    assert observed == alone("compiled.py")


@pytest.fixture(scope="module")
def ranks(forking, tmp_path_factory):
    """Return the output of the script with two ranks without observation, then with, and the records of each rank.

    Only those under observation are torchrun's.
    """
    folder = tmp_path_factory.mktemp("ranks")
    observed = run(folder, *torchrun("ddp.py"), records=folder / "records")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    script = [str(HERE / "scripts" / "ddp.py")]
    both = [forking.start(script, folder, {**environ, "RANK": str(rank)}) for rank in range(2)]
    return "".join(map(output_of, both)), observed, read(folder / "records")


def test_ranks_train_the_same_weights(ranks):
    assert ranks[0] == ranks[1]


def test_only_the_ranks_of_a_launcher_write(ranks):
    _, _, records = ranks
    processes = [each["process"][0] for each in records]
    assert [(each["rank"], each["local_rank"], each["world_size"]) for each in processes] == [(0, 0, 2), (1, 1, 2)]
    assert [len(each["step"]) for each in records] == [40, 40]


@pytest.mark.parametrize(("phase", "late_stage"), [(1, "data_wait"), (2, "forward"), (3, "backward")])
def test_a_rank_waits_for_a_late_one_in_exposed_communication(ranks, phase, late_stage):
    _, _, (on_time, late) = ranks
    on_time_s, late_s = (totals_of(each["step"][8 * phase + 2 : 8 * phase + 8]) for each in (on_time, late))
    due_s = 0.02 * 6
    assert late_s[late_stage] > due_s
    assert late_s["exposed_communication"] < due_s / 2
    assert on_time_s["exposed_communication"] > due_s / 2
    assert on_time_s[late_stage] < due_s / 2


def test_micro_batches_without_synchronization_are_one_step(ranks):
    _, _, (on_time, _) = ranks
    assert [step["micro_batches"] for step in on_time["step"]] == [1] * 32 + [2] * 8


def test_forked_ranks_write_their_end(tmp_path):
    run(tmp_path, HERE / "scripts" / "forked.py", records=tmp_path / "records")
    assert [len(each["step"]) for each in read(tmp_path / "records")] == [3, 3]


def test_accelerate_moves_batches_through_the_observed_function():
    from paceline.watch.targets import ALIASES, TARGETS

    loaders = pytest.importorskip(
        "accelerate.data_loader", reason="accelerate is not installed: pip install accelerate"
    )
    source = "accelerate.utils.operations"
    (alias,), ((name, _),) = ALIASES[source], TARGETS[source]
    assert alias == loaders.__name__
    assert vars(loaders)[name] is vars(sys.modules[source])[name]

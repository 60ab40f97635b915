"""`paceline report --follow`: the page of a run in the background, by HTTP and in a browser, until it has ended."""

import importlib.util
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from paceline.core.run_dir import RunDir
from paceline.report.follow import LiveReport, ReportServer

RUNS = Path(__file__).parents[1] / "unit" / "report" / "runs.py"
WAIT_S = 240
ARGS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=240", "data.source.num_val_images=24"),
    *("data.batch_size=12", "train.epochs=3", "log.every=2st", "train.eval_every=3ep", "checkpoint.every=off"),
    *("data.workers=0", "parallel.device=cpu", "log.tensorboard=off", "log.report=off", "measure.telemetry=off"),
    *("train.callbacks=[gates:Gates]", "--ranks", "2", "--run-dir", "run"),
)
GATES = """
import time

from paceline.training.callbacks import Callback

GATES = {30: "first", 50: "second"}


class Gates(Callback):
    def step_ended(self, view):
        while view.step in GATES and not (view.run_dir.parent / GATES[view.step]).exists():
            time.sleep(0.02)
"""
"""A callback with which a run waits after two of its steps, each until the test has created a file."""


def wait_for(find: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not find():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def read(address: str) -> str:
    with urlopen(address, timeout=30) as answer:
        return answer.read().decode()


@pytest.fixture
def start(paceline) -> Iterator[Callable[..., Any]]:
    """Return what starts the program, which is killed if the test fails."""
    started = []

    def start_one(*args: str, **environ: str) -> Any:
        started.append(paceline.start(*args, **environ))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        if not process.stdout.closed:
            process.communicate()


def test_the_page_changes_while_the_run_trains_and_is_final_afterwards(start, tmp_path: Path) -> None:
    (tmp_path / "gates.py").write_text(GATES)
    follower = start("report", "run", "--follow")
    line = follower.stdout.readline()
    assert line.startswith("report: http://127.0.0.1:") and "Ctrl-C" in line
    address = line.split()[1]
    assert "is not a run directory" in read(address)

    def told() -> dict[str, str]:
        return json.loads(read(f"{address}version"))

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    trained = start(*ARGS, PYTHONPATH=path)
    wait_for(lambda: "data wait so far" in read(address))
    page, first = read(address), told()
    assert "communication so far" in page and "Stages so far" in page
    assert first["state"] == "Live: the run has not ended."
    assert follower.stdout.readline() == "run: is not a run yet; waiting for it\n"
    assert follower.stdout.readline() == "run: is training\n"
    (tmp_path / "first").touch()
    wait_for(lambda: told()["version"] != first["version"])
    assert read(address) != page and trained.poll() is None

    (tmp_path / "second").touch()
    trained.communicate(timeout=2 * WAIT_S)
    assert trained.returncode == 0
    wait_for(lambda: told()["state"] == "The run has ended: this is its final report.")
    wait_for(lambda: "The process of rank 0" in read(address) and "completed" in read(address))
    assert follower.poll() is None

    ended = follower.stdout.readline()
    assert ended.startswith("run: completed") and ended.endswith("the page stays until Ctrl-C\n")
    time.sleep(0.5)  # a signal while Python flushes a line has it written twice
    os.kill(follower.pid, signal.SIGINT)
    assert follower.communicate() == ("", "") and follower.returncode == 0
    with pytest.raises(URLError):
        read(address)


def test_other_options_and_experiments_are_refused(paceline, tmp_path: Path) -> None:
    (tmp_path / "ladder" / "trials").mkdir(parents=True)
    paceline("report", "run", "--follow", "--format", "md").assert_error("--follow: ", "leave --format out")
    paceline("report", "run", "--follow", "--out", "page.html").assert_error("--follow: ", "leave --out out")
    paceline("report", "ladder", "--follow").assert_error("--follow: ladder is an experiment")
    paceline("report", "run", "--port", "8000").assert_error("--port: 8000 has no effect without --follow")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunDir, str]]:
    """Return a run that has not ended, and the address of its page, whose server looks at the run at every request."""
    monkeypatch.setattr("paceline.report.follow.CHECK_S", 0.1)
    monkeypatch.setattr("paceline.report.follow._BUILD_SHARE", 1.0)
    spec = importlib.util.spec_from_file_location("runs", RUNS)
    runs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runs)
    rundir = runs.write_run(tmp_path / "run")
    shutil.move(rundir.path / "result.json", tmp_path)
    with ReportServer(LiveReport(rundir, time.monotonic)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield rundir, server.address
        server.shutdown()


def test_a_browser_keeps_folds_scrolling_and_focus_when_the_page_changes(served, opened, tmp_path: Path) -> None:
    rundir, address = served
    page, asked, errors = opened(address)
    fold = page.locator("details", has_text="Evaluations (12)").locator("summary")
    fold.click()
    switch = page.locator("#learning .switch button")
    switch.nth(1).click()
    unit = switch.nth(1).inner_text()
    page.locator("#learning thead th button", has_text="epoch").first.click()
    page.locator("#learning thead th button", has_text="epoch").first.click()
    fold.focus()
    page.evaluate("document.getElementById('telemetry').scrollIntoView({behavior: 'instant'})")
    page.locator("#telemetry").evaluate("each => window.before = each.getBoundingClientRect().top")
    rows = rundir.evals.read_text().splitlines()
    rundir.evals.write_text("\n".join([*rows, rows[-1].replace('"step": 4692', '"step": 4700'), ""]))
    page.locator("summary", has_text="Evaluations (13)").wait_for()
    assert page.locator("details[open] > summary").all_inner_texts() == ["Evaluations (13)"]
    pressed = page.locator("#learning .switch button[aria-pressed=true]")
    assert pressed.all_inner_texts() == [unit]
    assert page.locator("#learning th[aria-sort]").first.get_attribute("aria-sort") == "descending"
    top = page.locator("#telemetry").evaluate("each => each.getBoundingClientRect().top")
    assert abs(top - page.evaluate("window.before")) <= 2
    assert page.evaluate("document.activeElement.textContent") == "Evaluations (13)"
    assert "Live: the run has not ended. Updated at" in page.inner_text("#live")

    shutil.copy(tmp_path / "result.json", rundir.path)
    page.locator("#live", has_text="this is its final report").wait_for()
    assert page.title() != "run: not finished" and page.evaluate("window.hacked") is None
    assert {url for url in asked if not url.startswith("data:")} == {address, f"{address}version"}
    assert errors == []


def test_a_page_whose_server_has_ended_says_so(served, opened) -> None:
    rundir, _ = served
    with ReportServer(LiveReport(rundir, time.monotonic)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page, _, _ = opened(server.address)
        page.locator("#live", has_text="Live").wait_for()
        server.shutdown()
    page.locator("#live", has_text="Not connected").wait_for()
    assert page.locator("main h1").inner_text() == "run"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_followed_page_has_no_barriers_for_assistive_technology(served, opened, barriers, theme) -> None:
    page, *_ = opened(served[1], theme=theme)
    page.locator("#live", has_text="Live").wait_for()
    assert barriers(page) == []

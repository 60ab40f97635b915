"""Shared fixtures: real datasets, a browser, and the program, started as users do or by a fork server."""

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.core.process import STOP_SIGNALS

FORKING = Path(__file__).with_name("forking.py")
ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240
HOME = tempfile.TemporaryDirectory(prefix="home-")  # of programs, which keep indexes of JPEG files below it
PARTS = ("model", "optimizer", "average", "precision", "compression")
POLL_S = 0.005
PRINT_STACKS = signal.SIGRTMAX  # for a program of `forking.py`
STACKS_S = 1.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = ("apt-get", "install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core")
FLAGS = (
    "--no-sandbox",  # root has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

# Programs in the background of a script ignore SIGINT, and those under `nohup` ignore SIGHUP. Children would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Leave what the tests have imported out of searches for cycles, a second's work each.

    Python searches by itself, and a run after it has measured memory.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let all be freed at the end: libraries print what is not."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Restore the handlers of stop signals: a command that ends in a test's process ignores them from then on.

    Children would inherit that, and could not be terminated.
    """
    before = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    try:
        return (yield)
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@dataclass(frozen=True)
class ProgramResult:
    """The exit code and output of a finished process."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict:
        """The JSON on standard output of a successful run."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    def assert_error(self, *parts: str) -> None:
        """Assert that the program exited with 2 and printed one error line that contains all of `parts`."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        for part in parts:
            assert part in lines[0], (part, lines[0])


class Process:
    """A program that `forking.py` started, with the part of `subprocess.Popen`'s interface that tests use."""

    def __init__(self, pid: int, out: int, err: int, code_of: Callable[[int], int | None]) -> None:
        self.pid, self._code_of = pid, code_of
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        if self.returncode is None:
            self.returncode = self._code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Return the exit code after the program ends, or raise `subprocess.TimeoutExpired`."""
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            self._not_after(deadline_s, timeout)
            time.sleep(POLL_S)
        return code

    def communicate(self, timeout: float = TIMEOUT_S) -> tuple[str, str]:
        """Return all output of the program and of its children, after all of them have ended."""
        deadline_s = time.monotonic() + timeout
        output = {stream: b"" for stream in (self.stdout, self.stderr) if not stream.closed}
        with selectors.DefaultSelector() as open_ones:
            for stream in output:
                open_ones.register(stream, selectors.EVENT_READ)
            while open_ones.get_map():
                for key, _ in open_ones.select(max(0.0, deadline_s - time.monotonic())):
                    part = os.read(key.fd, 1 << 16)
                    output[key.fileobj] += part
                    if not part:
                        open_ones.unregister(key.fileobj)
                self._not_after(deadline_s, timeout)
        self.wait(max(POLL_S, deadline_s - time.monotonic()))
        for stream in output:
            stream.close()
        return output.get(self.stdout, b"").decode(), output.get(self.stderr, b"").decode()

    def send_signal(self, number: int) -> None:
        """Send the program a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program."""
        self.send_signal(signal.SIGKILL)

    def _not_after(self, deadline_s: float, timeout: float) -> None:
        if time.monotonic() > deadline_s:
            error = subprocess.TimeoutExpired(str(self.pid), timeout)
            error.add_note(self._read_stacks())
            raise error

    def _read_stacks(self) -> str:
        """Return what the program has printed to standard error, and then the stack of each of its threads."""
        self.send_signal(PRINT_STACKS)
        text, until_s = b"", time.monotonic() + STACKS_S
        while select.select([self.stderr], [], [], max(0.0, until_s - time.monotonic()))[0]:
            if not (part := os.read(self.stderr.fileno(), 1 << 16)):
                break
            text += part
        return text.decode(errors="replace")


@dataclass(frozen=True)
class Forking:
    """A fork server that has imported torch, so that programs start without delay. See `forking.py`."""

    server: "subprocess.Popen[bytes]"
    calls: socket.socket
    always: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every program, unless `start` overrides them."""

    def start(
        self,
        args: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        *,
        listener: int | None = None,
        terminal: int | None = None,
    ) -> Process:
        """Start `python ARGS` in `folder`; `listener` becomes descriptor 3, `terminal` standard output and error."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with Path(os.devnull).open() as nothing:
            streams = (out_end, err_end) if terminal is None else (terminal, terminal)
            files = [nothing.fileno(), *streams, *(() if listener is None else (listener,))]
            request = {"args": [*args], "environ": clean_environ({**self.always, **environ}), "folder": str(folder)}
            pid = self._request(request, files)
        os.close(out_end)
        os.close(err_end)
        return Process(pid, out, err, lambda pid: self._request({"code_of": pid}, []))

    def _request(self, request: dict, files: Sequence[int]) -> int:
        socket.send_fds(self.calls, [json.dumps(request).encode()], files)
        answer = self.calls.recv(64)
        assert answer, "the server of tests has ended"
        return json.loads(answer)


@dataclass(frozen=True)
class Fresh:
    """The Python that users start."""

    def start(self, args: Sequence[str], folder: Path, environ: Mapping[str, str]) -> "subprocess.Popen[str]":
        """Start `python ARGS` in `folder`."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, *args], cwd=folder, env=clean_environ(environ), text=True, **pipes)


@dataclass(frozen=True)
class Program:
    """The program under test, started in `folder`, with a time limit."""

    folder: Path
    python: Forking | Fresh

    def start(self, *args: str, program: tuple[str, ...] = (), **environ: str) -> "Process | subprocess.Popen[str]":
        """Start the program; `program` replaces `python -m paceline`."""
        command = ["-m", *(program or ("paceline",)), *args]
        return self.python.start(command, self.folder, environ)

    def __call__(self, *args: str, program: tuple[str, ...] = (), **environ: str) -> ProgramResult:
        """Run the program until it ends."""
        process = self.start(*args, program=program, **environ)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return ProgramResult(process.returncode, out, err)


def clean_environ(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without a launcher's variables, with an empty home folder, updated with `more`."""
    ranks = ("SLURM_", "RANK", "WORLD")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ranks)}
    return {**inherited, "HOME": HOME.name, **more}


@contextlib.contextmanager
def forking_from(python: str, **always: str) -> Iterator[Forking]:
    """Return a context manager of a fork server of `python`; its programs have the variables `always`."""
    # Threads do not survive a fork, so the pools of OpenMP and OpenBLAS and the allocator of pyarrow (which pandas
    # imports) must not start any. torch reads its log level when it is imported.
    early = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", **always}
    early["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [python, str(FORKING), str(theirs.fileno())]
    with ours, subprocess.Popen(command, env=clean_environ(early), pass_fds=[theirs.fileno()]) as server:
        theirs.close()
        num_threads = ours.recv(64)
        assert num_threads, "paceline cannot be imported"
        assert num_threads == b"1", "threads do not survive a fork"
        yield Forking(server, ours, always)
        # This ends the server, also if a process that the test process forked still has a copy of the socket.
        ours.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def forking() -> Iterator[Forking]:
    """Return a fork server, whose programs need not import torch."""
    with forking_from(sys.executable) as found:
        yield found


@dataclass(frozen=True)
class Installed:
    """A built release, and a Python with its wheel that does not see the checkout.

    Torch and the other dependencies are those of the Python that runs the tests.
    """

    sdist: Path
    wheel: Path
    python: Path

    @property
    def scripts(self) -> Path:
        """The folder of `python` and `paceline`, for PATH."""
        return self.python.parent


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return the release; `installed_in` starts its programs faster and clears PYTHONPATH."""
    pytest.importorskip("build", reason="nothing can be built: pip install build")
    top = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent  # shared by all xdist workers
    with (top / "release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _release_in(top / "release")


def _release_in(folder: Path) -> Installed:
    """Return the release in `folder`; build it unless it exists."""
    python = folder / "venv" / "bin" / "python"
    marker = folder / "complete"
    if not marker.exists():
        # The wheel is built from the source distribution, so files that only the checkout has are missing from it.
        _finish(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT))
        _finish(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
        (wheel,) = (folder / "dist").glob("*.whl")
        _finish(*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel))
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # Python does not process the .pth files of a folder that a .pth file names, so an editable install there stays
        # invisible.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        marker.touch()
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return Installed(sdist, wheel, python)


def _finish(*command: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def installed_in(installed: Installed) -> Iterator[Callable[[Path], Program]]:
    """Return a function from a folder to the installed program, which runs there and starts without delay."""
    path = os.pathsep.join([str(installed.scripts), os.environ["PATH"]])
    with forking_from(str(installed.python), PYTHONPATH="", PATH=path) as found:
        yield lambda folder: Program(folder, found)


@pytest.fixture(scope="session")
def paceline_in(forking: Forking) -> Callable[[Path], Program]:
    """Return a function from a folder to the program, which runs there and starts without delay."""
    return lambda folder: Program(folder, forking)


@pytest.fixture
def paceline(paceline_in: Callable[[Path], Program], tmp_path: Path) -> Program:
    """Return the program in the test's own folder; it starts without delay."""
    return paceline_in(tmp_path)


@pytest.fixture
def paceline_anew(tmp_path: Path) -> Program:
    """Return the program in the test's own folder, started in a new interpreter as users do, which takes seconds."""
    return Program(tmp_path, Fresh())


@pytest.fixture(scope="session")
def lines_of() -> Callable[[Path], list[dict]]:
    """Return a function that reads the records of a JSON Lines file."""
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def cut_after() -> Callable[[Path, int], None]:
    """Return a function that truncates a finished run to the state of a kill right after a step was saved."""

    def truncate(run: Path, step: int) -> None:
        (run / "result.json").unlink()
        newer = [path for path in (run / "checkpoints").glob("step-*") if int(path.name.removeprefix("step-")) > step]
        assert newer
        for path in newer:
            shutil.rmtree(path)

    return truncate


@pytest.fixture(scope="session")
def cut(cut_after: Callable[[Path, int], None]) -> Callable[[Path, Path, int], Path]:
    """Return a function that copies a finished run, truncates the copy by `cut_after`, and returns it."""

    def copy(whole: Path, part: Path, step: int) -> Path:
        cut_after(shutil.copytree(whole, part), step)
        return part

    return copy


@pytest.fixture
def real_data():
    """Return a function from a dataset's name to its folder in `PACELINE_TEST_DATA`, or skip the test."""

    def folder_of(name):
        top = os.environ.get("PACELINE_TEST_DATA")
        if not top:
            pytest.skip("PACELINE_TEST_DATA names no folder of real datasets")
        folder = Path(top, name)
        if not folder.is_dir():
            pytest.skip(f"PACELINE_TEST_DATA has no {name}/")
        return folder

    return folder_of


@pytest.fixture(scope="session")
def state_digest() -> Callable[[Path], Mapping[str, str]]:
    """Return a function from a run directory or checkpoint to the digests of its state.

    The digests are those of the tensors of model, optimizer, average, precision and compression in the manifest of the
    newest checkpoint, and of the values beside them that do not depend on the clock.
    """

    def digests(run: Path) -> dict[str, str]:
        steps = sorted((run / "checkpoints").glob("step-*"))
        checkpoint = steps[-1] if steps else run
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        found = {name: manifest[f"{name}.safetensors"] for name in PARTS if f"{name}.safetensors" in manifest}
        assert {"model", "optimizer"} <= found.keys()
        values = json.loads((checkpoint / "state.json").read_text())
        progress = {key: value for key, value in values["train"].items() if not key.endswith("_s") and key != "spent"}
        progress["since_eval"] = progress["since_eval"]["steps"]  # without its seconds
        others = [values.get(key) for key in ("schedule", "scale", "compression")]
        text = json.dumps([progress, *others], sort_keys=True).encode()
        return {**found, "values": hashlib.sha256(text).hexdigest(), "step": checkpoint.name}

    return digests


@pytest.fixture(scope="module")
def browser():
    """Return Chromium without access to other hosts; install it if it is missing and that is possible."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install 'paceline[dev]')")
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(INSTALL, env=environ, capture_output=True, timeout=TIMEOUT_S)
        found = shutil.which(BROWSERS[0])
    if found is None:
        pytest.skip(f"no browser: {' '.join(INSTALL)} would install one, and was not possible here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Return a function that opens an address and returns the page, its requests and its errors."""
    contexts = []

    def open_page(address, width=1280, theme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        asked, output = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: output.append(message.text))
        page.on("pageerror", lambda error: output.append(str(error)))
        page.goto(address)
        return page, asked, output

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def barriers():
    """Return a function from a page, and rules to leave out, to axe-core's serious and critical findings.

    It prints the others too.
    """
    module = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed (pip install 'paceline[dev]')"
    )
    axe = module.Axe()

    def find(page, *left_out):
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        rules = {rule: {"enabled": False} for rule in left_out}
        answer = axe.run(page, options={"resultTypes": ["violations"], "rules": rules}).response
        assert len(answer["passes"]) > 10  # rules that apply to the page
        found = [
            (rule["impact"], rule["id"], " ".join(map(str, node["target"])), node["html"][:200])
            for rule in answer["violations"]
            for node in rule["nodes"]
        ]
        for each in found:
            print(page.url, *each)
        return [each for each in found if each[0] in ("serious", "critical")]

    return find

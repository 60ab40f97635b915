"""The page of a run that goes on: served to this machine alone, and rebuilt when files change."""

import http.client
import json
import shutil
import socket
import threading
import time
from contextlib import closing

import pytest

from paceline.core.errors import PacelineError
from paceline.core.run_dir import RunDir
from paceline.report import follow
from paceline.report.follow import CHECK_S, LiveReport, ReportServer, list_changes, read_state


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    return runs.write_run(tmp_path_factory.mktemp("runs") / "whole", runs.SMALL)


@pytest.fixture
def rundir(whole, tmp_path):
    """Return a run that has not ended."""
    path = shutil.copytree(whole.path, tmp_path / "run")
    (path / "result.json").unlink()
    return RunDir(path)


@pytest.fixture
def server(rundir):
    with ReportServer(LiveReport(rundir, time.monotonic)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", method="GET", **headers):
    """Return the status, headers and body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()


def ask_raw(server, text):
    """Return the first line of the answer to a request as these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(text.encode())
        return connection.makefile("rb").readline().decode()


def test_it_serves_the_page_and_its_version(server):
    status, headers, text = ask(server)
    assert status == 200 and text.startswith("<!doctype html>") and "not finished" in text
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    status, headers, body = ask(server, "/version")
    told = json.loads(body)
    assert (status, told["state"]) == (200, "Live: the run has not ended.")
    assert f'data-version="{told["version"]}"' in text
    for name, value in (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")):
        assert headers[name] == value
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"] and "Python" not in headers["Server"]


def test_it_listens_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1" and server.port > 0
    assert server.address == f"http://127.0.0.1:{server.port}/"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"])
def test_a_tunnel_may_have_another_port(server, host):
    assert ask(server, "/version", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "127.0.0.1:x"]
)
def test_another_host_name_is_refused(server, host):
    for path in ("/", "/version"):
        status, _, text = ask(server, path, Host=host)
        assert status == 403 and "<" not in text and "not finished" not in text


def test_a_request_without_one_host_is_refused(server):
    assert " 403 " in ask_raw(server, "GET / HTTP/1.0\r\n\r\n")
    assert " 403 " in ask_raw(server, "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT"])
def test_other_methods_are_refused(server, method):
    assert ask(server, method=method)[0] == 501


def test_head_has_the_length_and_no_body(server):
    status, headers, body = ask(server, method="HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 10_000 and body == ""


@pytest.mark.parametrize(
    "path", ["/recipe.yaml", "/..", "/../run/recipe.yaml", "/%2e%2e/", "/version/", "/?x", "http://evil/", "*"]
)
def test_nothing_else_is_served(server, path):
    assert " 404 " in ask_raw(server, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")


def test_a_client_that_leaves_does_not_end_it(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET / HT")
    assert ask(server, "/version")[0] == 200


def test_a_version_is_built_when_files_change_and_not_too_often(rundir, monkeypatch):
    built = []
    monkeypatch.setattr(follow, "read_run", lambda run, inner=follow.read_run: built.append(1) or inner(run))
    clock = Clock()
    live = LiveReport(rundir, clock)
    first = live.latest()
    with rundir.steps.open("a") as file:
        file.write('{"step": 31, "loss": 0.25}\n')
    assert live.latest() is first
    clock.now_s += CHECK_S
    second = live.latest()
    assert second.version != first.version and b"31" in second.html and len(built) == 2
    clock.now_s += CHECK_S
    assert live.latest() is second and len(built) == 2
    assert LiveReport(rundir, clock).latest().version != second.version  # a page of an earlier server is replaced


def test_a_page_that_takes_long_is_built_less_often(rundir, monkeypatch):
    clock = Clock()

    def read_slowly(run, inner=follow.read_run):
        clock.now_s += 3
        return inner(run)

    monkeypatch.setattr(follow, "read_run", read_slowly)
    live = LiveReport(rundir, clock)
    first = live.latest()
    rundir.steps.write_text("")
    clock.now_s += 29
    assert live.latest() is first
    clock.now_s += 1.5
    assert live.latest() is not first


def test_a_run_appears_ends_and_resumes(whole, tmp_path):
    clock, rundir = Clock(), RunDir(tmp_path / "run")
    live = LiveReport(rundir, clock)

    def next_page():
        clock.now_s += CHECK_S
        return live.latest()

    assert live.latest().state == "missing" and b"is not a run directory" in live.latest().html
    shutil.copytree(whole.path, rundir.path, ignore=shutil.ignore_patterns("result.json"))
    assert next_page().state == "running" and read_state(rundir) == ("running", "")
    result = json.loads((whole.path / "result.json").read_text())
    (rundir.path / "result.json").write_text(json.dumps(result | {"status": "preempted"}))
    assert next_page().state == "preempted" and "resume with" in read_state(rundir)[1]
    (rundir.path / "result.json").unlink()
    assert next_page().state == "running"
    shutil.copy(whole.path / "result.json", rundir.path)
    assert next_page().state == read_state(rundir)[0] == "ended" and read_state(rundir)[1].startswith("target reached")
    assert b"this is its final report" in live.version_json()
    shutil.rmtree(rundir.path)
    assert next_page().state == "missing" and read_state(rundir) == ("missing", "")


def test_a_run_whose_files_do_not_change_is_reported(rundir):
    clock = Clock()
    live = LiveReport(rundir, clock)
    assert json.loads(live.version_json())["state"] == "Live: the run has not ended."
    clock.now_s += 190
    assert "No file has changed for 3 minutes." in json.loads(live.version_json())["state"]
    rundir.steps.write_text("")
    clock.now_s += CHECK_S
    assert json.loads(live.version_json())["state"] == "Live: the run has not ended."


def test_damaged_files_and_errors_are_on_the_page(rundir, monkeypatch):
    clock = Clock()
    live = LiveReport(rundir, clock)
    live.latest()
    for content in (b"\xff\xfe\x00", b"{", b"[" * 9999):
        for path in rundir.path.glob("*.json*"):
            path.write_bytes(content)
        clock.now_s += CHECK_S
        assert live.latest().state == "running" and b"not finished" in live.latest().html

    def fail(run):
        raise ValueError("<b>bad</b>")

    monkeypatch.setattr(follow, "read_run", fail)
    rundir.steps.write_text("")
    clock.now_s += CHECK_S
    assert b"ValueError: &lt;b&gt;bad&lt;/b&gt;" in live.latest().html


def test_changes_are_those_of_files_and_folders_but_not_of_report_and_lock(rundir):
    before = list_changes(rundir.path)
    rundir.report.write_text("anew")
    (rundir.path / ".lock").write_text("{}")
    assert list_changes(rundir.path) == before
    (rundir.worst / "new.png").write_bytes(b"")
    after = list_changes(rundir.path)
    assert after != before
    (rundir.path / "dangling").symlink_to("nowhere")
    assert list_changes(rundir.path) not in (before, after)
    assert list_changes(rundir.path / "none") == list_changes(rundir.path / "neither")


def test_a_served_page_allows_its_scripts_alone_and_a_file_has_none_that_asks(rundir):
    text = LiveReport(rundir, Clock()).latest().html.decode()
    policy = text.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert "default-src 'none';" in policy and "connect-src 'self';" in policy and "unsafe-inline'" in policy
    script = policy.partition("script-src ")[2].partition(";")[0]
    assert script.count("'sha256-") == text.count("<script>") > 0 and "unsafe" not in script
    follow_script = text.rpartition("<script>")[2].partition("</script>")[0]
    assert "fetch(" in follow_script and "innerHTML" not in follow_script
    written = follow.render_page(rundir.path, follow.build_run_page(follow.read_run(rundir)))
    assert "connect-src" not in written and "fetch(" not in written and 'id="live"' not in written


def test_a_taken_port_is_an_os_error(server, rundir):
    with pytest.raises(OSError, match="in use"):
        ReportServer(LiveReport(rundir, time.monotonic), server.port)


def test_a_folder_that_is_no_run_is_missing(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(PacelineError, match="is not a run directory"):
        follow.read_run(RunDir(tmp_path))
    assert LiveReport(RunDir(tmp_path), Clock()).latest().state == "missing"

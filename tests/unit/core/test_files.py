"""`core.files`: refused files and folders, atomic replacement, and no waiting for pipes."""

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.core import files
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import (
    RefusedFileError,
    make_folder,
    move_without_overwriting,
    open_lock_file,
    open_text_to_write,
    open_to_read,
    open_to_write,
    read_bytes,
    read_text,
    remove_abandoned,
    replace_file,
    write_new,
    write_output,
)
from paceline.core.run_dir import append_line, read_lines, run_lock, write_atomic

THESIS = "years of work\n"
MODES = ["wb", "ab", "a+b", "r+b"]
NOBODY = 65534


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """Return a file of the user's outside the folder that is written to."""
    path = tmp_path / "thesis.txt"
    path.write_text(THESIS)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.parametrize("mode", MODES)
def test_a_file_is_not_written_to_through_a_link_or_a_second_name(thesis, run, mode) -> None:
    for name, make in (("soft", os.symlink), ("hard", os.link)):
        make(thesis, run / name)
        with pytest.raises(RefusedFileError, match=name):
            open_to_write(run / name, mode)
    (run / "dangling").symlink_to(run.parent / "new.txt")
    with pytest.raises(OSError):
        open_to_write(run / "dangling", mode)
    assert thesis.read_text() == THESIS and not (run.parent / "new.txt").exists()


@pytest.mark.parametrize("mode", MODES)
def test_pipes_devices_and_folders_are_not_written_to_and_not_waited_for(run, mode) -> None:
    os.mkfifo(run / "pipe")
    (run / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run / "socket"))
        for name in ("pipe", "folder", "socket"):
            with pytest.raises(OSError):
                open_to_write(run / name, mode)
    with pytest.raises(OSError, match="device"):
        open_to_write(Path("/dev/null"), mode)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o1775])
def test_a_file_of_another_user_in_a_world_writable_folder_is_not_written_to(run, mode) -> None:
    run.chmod(mode)
    path = run / "steps.jsonl"
    path.write_text("theirs")
    assert os.geteuid() == 0, "this test gives a file to another user, which root alone can"
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(OSError, match="another user"):
        open_to_write(path, "wb")
    assert path.read_text() == "theirs"
    os.chown(run, NOBODY, NOBODY)  # a run of another user, which root resumes
    with open_to_write(path, "ab") as file:
        file.write(b", and ours")
    assert path.read_text() == "theirs, and ours"


def test_a_file_of_another_member_of_the_group_that_shares_the_folder_is_written_to(run) -> None:
    run.chmod(0o2775)
    path = run / "shared.json"
    path.write_text("theirs")
    os.chown(path, NOBODY, NOBODY)
    with open_to_write(path, "wb") as file:
        file.write(b"ours")
    assert path.read_text() == "ours"


def test_modes_are_those_of_open(run) -> None:
    path = run / "file"
    assert write_new(path, "one\n") == 4
    with pytest.raises(FileExistsError):
        write_new(path, "")
    with open_text_to_write(path, "a") as file:
        file.write("two ä\n")
    with open_to_write(path, "r+b") as file:
        file.write(b"O")
    assert read_text(path) == "One\ntwo ä\n" and read_bytes(path) == path.read_bytes()
    with open_text_to_write(path, "w") as file:
        file.write("x")
    assert path.read_text() == "x"
    os.close(open_lock_file(run / "lock", 0o600))
    assert (run / "lock").stat().st_mode & 0o777 == 0o600


def test_replacing_a_file_follows_no_link(thesis, run) -> None:
    for name in (".report.html.tmp", "report.html"):
        (run / name).symlink_to(thesis)
    write_atomic(run / "report.html", "<html>")
    assert thesis.read_text() == THESIS
    assert (run / "report.html").read_text() == "<html>" and not (run / "report.html").is_symlink()
    assert sorted(path.name for path in run.iterdir()) == [".report.html.tmp", "report.html"]


def test_a_failed_replacement_keeps_the_file_and_leaves_no_temporary_one(run) -> None:
    path = run / "file"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), replace_file(path) as file:
        file.write(b"after")
        raise ZeroDivisionError
    assert [each.name for each in run.iterdir()] == ["file"] and path.read_text() == "before"


def test_temporary_files_of_dead_processes_are_removed_and_no_others(run) -> None:
    for name in (".notes.tmp", ".mine.0123.tmp", "x.0123456789abcdef.tmp"):
        (run / name).write_text("text")
    before = {path.name for path in run.iterdir()}
    code = f"""
import os
from pathlib import Path
from paceline.core.files import replace_file
with replace_file(Path({str(run / "plan.json")!r})):
    os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    assert len(list(run.iterdir())) == len(before) + 1
    with replace_file(run / "other.json"), run_lock(run):  # the first of a process that lives
        assert len(list(run.iterdir())) == len(before) + 2
    (run / "other.json").unlink()
    remove_abandoned(run)
    assert {path.name for path in run.iterdir()} - {".lock"} == before


def test_outputs_may_be_pipes_and_devices_that_the_user_names(run, thesis) -> None:
    write_output(run / "file.md", "text")
    assert (run / "file.md").read_text() == "text"
    os.mkfifo(run / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((run / "pipe").read_text()))
    reader.start()
    write_output(run / "pipe", "text")
    reader.join(10)
    assert read == ["text"]
    code = """
from pathlib import Path
from paceline.core.files import write_output
write_output(Path("/dev/stdout"), "text")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "text"


def test_standard_output_is_written_to_where_it_is_a_file_too(run) -> None:
    (run / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout is, which root could replace
    code = """
import sys
from pathlib import Path
from paceline.core.files import write_output
print("before")
write_output(Path(sys.argv[1]), "text")
print("after")
"""
    with (run / "out.txt").open("w") as out:
        subprocess.run([sys.executable, "-c", code, run / "stdout"], stdout=out, check=True, timeout=60)
    assert (run / "out.txt").read_text() == "before\ntextafter\n"
    assert (run / "stdout").is_symlink()


@pytest.mark.parametrize("atomic", [True, False], ids=["renameat2", "without it"])
def test_moving_does_not_overwrite(run, monkeypatch, atomic) -> None:
    if not atomic:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *arguments, **options: object())
    (run / "file").write_text("made")
    (run / "folder").mkdir()
    (run / "folder" / "a").write_text("made")
    (run / "thesis").write_text(THESIS)
    (run / "empty").mkdir()
    (run / "link").symlink_to(run / "nowhere")
    for made in ("file", "folder"):
        for there in ("thesis", "empty", "link", "folder" if made == "file" else "new-file"):
            with pytest.raises(FileExistsError):
                move_without_overwriting(run / made, run / there)
        move_without_overwriting(run / made, run / f"new-{made}")
    assert (run / "thesis").read_text() == THESIS and (run / "link").is_symlink()
    assert (run / "new-file").read_text() == (run / "new-folder" / "a").read_text() == "made"
    with pytest.raises(FileNotFoundError):
        move_without_overwriting(run / "gone", run / "other")
    assert not (run / "other").exists()


def test_a_folder_that_is_a_link_or_another_users_is_refused(run, tmp_path) -> None:
    (run / "link").symlink_to(tmp_path)
    (run / "file").touch()
    (run / "theirs").mkdir()
    run.chmod(0o777)
    os.chown(run / "theirs", NOBODY, NOBODY)
    for name, reason in (("link", "link"), ("theirs", "another user")):
        with pytest.raises(RefusedFileError, match=reason):
            make_folder(run / name)
    with pytest.raises(FileExistsError):
        make_folder(run / "file")
    make_folder(run / "a" / "b", 0o700, parents=True)
    make_folder(run / "a" / "b")
    assert (run / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_only_regular_files_are_read_and_links_to_them(run, thesis) -> None:
    (run / "link").symlink_to(thesis)
    assert read_text(run / "link") == THESIS
    with pytest.raises(RefusedFileError) as refused:
        open_to_read(run / "link", follow_links=False)
    assert refused.value.errno == errno.ELOOP and str(refused.value) == "link is a link, which is not followed"
    os.mkfifo(run / "pipe")
    (run / "zero").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a pipe"), ("zero", "a device")):
        with pytest.raises(OSError, match=f"{name} is {kind}"):
            read_bytes(run / name)
    with pytest.raises(IsADirectoryError):
        read_bytes(run)


def test_the_files_of_a_run_are_appended_to_in_place_only(run, thesis) -> None:
    (run / "warnings.jsonl").symlink_to(thesis)
    with pytest.raises(OSError, match=r"warnings\.jsonl is a link"):
        append_line(run / "warnings.jsonl", {"message": "x"})
    (run / ".lock").symlink_to(thesis)
    with pytest.raises(RecipeError, match=r"\.lock is a link.* \(name another\)"), run_lock(run):
        pass
    assert thesis.read_text() == THESIS
    os.mkfifo(run / "evals.jsonl")
    with pytest.raises(PacelineError, match=r"evals\.jsonl: cannot be read: evals\.jsonl is a pipe.*\(move it away\)"):
        list(read_lines(run / "evals.jsonl"))

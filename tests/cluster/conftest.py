"""Test machines, each with its own host name, network, processes, /etc/hosts and shared memory, on one switch.

They are namespaces of this machine, and share its files like a network file system. They need root. They touch nothing
outside, and nothing of them is left when their fixture ends or the tests are killed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("ip", "unshare", "nsenter")
SUBNET = "10.79.0"
LIMIT_S = 60
# The first process of a machine reaps orphans, and ends, and with it all other processes, when its pipe is closed.
FIRST = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
BOOT = """set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs -o mode=1777 shared-memory /dev/shm
ip link set lo up
exec "$3" -I -S -c "$4"
"""


class CannotBootError(Exception):
    """Test machines are not possible here, for the reason given."""


@dataclass(frozen=True)
class Machine:
    """A running machine: `holder` keeps it alive, and `pid` is its first process, seen from outside."""

    name: str
    address: str
    holder: "subprocess.Popen[str]"
    pid: int

    def entered(self, args: Sequence[str], folder: Path = Path("/")) -> list[str]:
        """Return the command, outside, that starts a program in `folder` of the machine."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid"]
        return [*enter, "env", f"--chdir={folder}", *args]

    def start(
        self, args: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a program in `folder`, as if logged in on the machine."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(self.entered(args, folder), env=environ, text=True, **pipes)

    def run(
        self, *args: str, folder: Path = Path("/"), environ: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program until it ends; return its exit code and output."""
        with self.start(args, folder, environ) as process:
            try:
                out, err = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def __call__(self, *args: str) -> str:
        """Run a program that must succeed; return its output."""
        completed = self.run(*args)
        assert completed.returncode == 0, (self.name, args, completed.stdout, completed.stderr)
        return completed.stdout


@dataclass(frozen=True)
class Machines:
    """Machines by name; the first has the switch, and `folder` has their files."""

    names: Sequence[str]
    folder: Path
    up: dict[str, Machine] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Machine:
        return self.up[name]

    def address(self, name: str) -> str:
        """Return the address of a machine, whether it runs or not."""
        return f"{SUBNET}.{self.names.index(name) + 1}"

    def boot(self, name: str) -> Machine:
        """Start a machine and connect it. Raises `CannotBootError` if that is not possible."""
        assert name not in self.up
        hosts = self.folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(each)} {each}\n" for each in self.names))
        namespaces = ("--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--uts", "--mount")
        command = ["unshare", *namespaces, "sh", "-c", BOOT, "sh", name, str(hosts), sys.executable, FIRST]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        holder = subprocess.Popen(command, text=True, **streams)
        assert holder.stdout is not None
        if holder.stdout.readline() != "up\n":
            raise CannotBootError(holder.communicate(timeout=LIMIT_S)[1].strip())
        (first,) = psutil.Process(holder.pid).children()
        self.up[name] = Machine(name, self.address(name), holder, first.pid)
        self._connect(self.up[name])
        return self.up[name]

    def lose(self, name: str) -> None:
        """Disconnect a machine, then kill all its processes, so that none sends a last packet."""
        switch = self.up[self.names[0]]
        switch("ip", "link", "set", name, "down")
        self.end(name)
        switch("ip", "link", "delete", name)  # the kernel would do that too, but later

    def end(self, name: str) -> None:
        """Kill a machine and all processes on it."""
        machine = self.up.pop(name)
        os.kill(machine.pid, signal.SIGKILL)  # its first process, with which the kernel kills all others
        machine.holder.communicate(timeout=LIMIT_S)

    def received_bytes(self, name: str) -> int:
        """Return the number of bytes that the switch has received from a machine since it was started."""
        (link,) = json.loads(self.up[self.names[0]]("ip", "-json", "-stats", "link", "show", "dev", name))
        return link["stats64"]["rx"]["bytes"]

    def _connect(self, machine: Machine) -> None:
        switch = self.up[self.names[0]]
        if machine is switch:
            device = "switch"
            ip(switch, "link", "add", device, "type", "bridge")
        else:
            device = "eth0"
            # The same in every boot, because other machines cache it.
            own = ("address", f"02:00:00:00:00:{self.names.index(machine.name):02x}", "netns", str(machine.pid))
            other = ("name", machine.name, "netns", str(switch.pid))
            do("ip", "link", "add", device, *own, "type", "veth", "peer", *other)
            ip(switch, "link", "set", machine.name, "master", "switch", "up")
        ip(machine, "address", "add", f"{machine.address}/24", "dev", device)
        ip(machine, "link", "set", device, "up")


def ip(machine: Machine, *args: str) -> None:
    """Change the network of a machine. Raises `CannotBootError` if that is not possible."""
    do(*machine.entered(["ip", *args]))


def do(*command: str) -> None:
    """Run a command outside the machines. Raises `CannotBootError` with its output if it fails."""
    completed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if completed.returncode != 0:
        raise CannotBootError(completed.stderr.strip())


@pytest.fixture(scope="session")
def boot_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Machines]]:
    """Return a function that boots machines of these names, or skips if that is not possible."""
    there: list[Machines] = []

    def boot(*names: str) -> Machines:
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing:
            pytest.skip(f"machines of their own need {', '.join(missing)} (apt-get install iproute2 util-linux)")
        if os.geteuid() != 0:
            pytest.skip("machines of their own need root")
        machines = Machines(names, tmp_path_factory.mktemp("machines"))
        there.append(machines)
        try:
            for name in names:
                machines.boot(name)
        except CannotBootError as error:
            pytest.skip(f"machines of their own need namespaces and virtual networks, and here: {error}")
        return machines

    yield boot
    for machines in there:
        for name in reversed([*machines.up]):
            machines.end(name)

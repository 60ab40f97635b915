"""Build the libraries that stand for those of a GPU, with each function that the torch installed here asks for."""

import hashlib
import importlib.util
import os
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
NEEDED = re.compile(r"\*UND\*.*\blibcudart\.so\.\d+\)?\s+(\w+)$", re.MULTILINE)
DEFINED = re.compile(r"^(?:API|TOOL [^(]*?)\s*\*{0,2}(\w+)\(", re.MULTILINE)
DRIVER = r"""
#include <stdlib.h>
static int nothing() { return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    *found = (void *)nothing;
    if (status) *status = 0;
    return 0;
}
int cuGetErrorString(int error, const char **text) { *text = "an error of the emulated driver"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
"""


def site_packages() -> Path:
    """Return where torch lies, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


def why_not() -> str:
    """Return what is missing here, in words; nothing where nothing is."""
    packages = site_packages()
    if not (packages / "torch/lib/libtorch_cuda.so").exists():
        return "torch is built without CUDA"
    if not (packages / "triton/backends/nvidia/include/cuda_runtime_api.h").exists():
        return "no header files of CUDA"
    missing = [each for each in ("g++", "gcc", "objdump") if not _has(each)]
    return f"no {missing[0]}" if missing else ""


def build(folder: Path) -> dict[str, str]:
    """Return what the environment of a program needs that is to see the emulated GPU; the libraries lie in `folder`."""
    packages = site_packages()
    source = (HERE / "runtime.cpp").read_text()
    version = (packages / "torch/version.py").read_bytes()
    libraries = folder / hashlib.sha256(source.encode() + version + Path(__file__).read_bytes()).hexdigest()[:16]
    if not (libraries / "libcuda.so.1").exists():
        libraries.mkdir(parents=True, exist_ok=True)
        _compile(packages, source, libraries)
    paths = [str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
    return {
        "LD_PRELOAD": str(next(libraries.glob("libcudart.so.*"))),
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "EMULATED_GPU": "1",
    }


def _compile(packages: Path, source: str, libraries: Path) -> None:
    needed: set[str] = set()
    name = ""
    for library in sorted((packages / "torch/lib").glob("lib*.so")):
        table = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
        needed.update(NEEDED.findall(table))
        name = name or "".join(re.findall(r"\b(libcudart\.so\.\d+)", table)[:1])
    rest = sorted(needed - set(DEFINED.findall(source)))
    (libraries / "rest.c").write_text("".join(f"int {each}() {{ return 0; }}\n" for each in rest))
    (libraries / "versions").write_text(f"{name} {{ global: *; }};\n")
    (libraries / "driver.c").write_text(DRIVER)
    for language, arguments in (
        ("gcc", ["-c", "rest.c", "-o", "rest.o"]),
        ("gcc", ["-shared", "-Wl,-soname,libcuda.so.1", "driver.c", "-o", "driver.so"]),
        ("g++", ["-std=c++17", "-I", packages / "triton/backends/nvidia/include", "-c", HERE / "runtime.cpp"]),
        ("g++", ["-shared", f"-Wl,-soname,{name},--version-script=versions", "runtime.o", "rest.o", "-o", name]),
    ):
        subprocess.run([language, "-O1", "-fPIC", "-w", *arguments], cwd=libraries, check=True)
    (libraries / "driver.so").rename(libraries / "libcuda.so.1")  # last, as the mark that all are there


def _has(program: str) -> bool:
    return any((Path(each) / program).exists() for each in os.environ.get("PATH", "").split(os.pathsep))

"""Build libraries that replace those of a GPU, with every function that the installed torch requires."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
NEEDED = re.compile(r"\*UND\*.*\s((?:__)?cuda[A-Z_]\w*|nccl[A-Z]\w*)$", re.MULTILINE)
DEFINED = re.compile(r"^(?:API|TOOL)\b[^(]*?\b(\w+)\(", re.MULTILINE)
TRITON = "triton/backends/nvidia/include"
SOURCES = ("runtime.cpp", "collectives.cpp")
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
    """Return the folder of torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


def missing_requirement() -> str:
    """Return the reason why emulation is not possible, or an empty string."""
    packages = site_packages()
    if not (packages / "torch/lib/libtorch_cuda.so").exists():
        return "torch is built without CUDA"
    headers = ("nvidia/cu13/include/cuda_runtime_api.h", f"{TRITON}/crt/host_defines.h", "nvidia/nccl/include/nccl.h")
    for header in headers:
        if not (packages / header).exists():
            return f"no {header}, which torch for CUDA 13 brings"
    missing = [each for each in ("g++", "gcc", "objdump") if not _has(each)]
    return f"no {missing[0]}" if missing else ""


def build(folder: Path) -> dict[str, str]:
    """Return the environment variables of a program that uses emulated GPUs; the libraries are in `folder`."""

    def before(variable: str, *paths: Path) -> str:
        return ":".join(filter(None, [*map(str, paths), os.environ.get(variable, "")]))

    packages = site_packages()
    digest = hashlib.sha256((packages / "torch/version.py").read_bytes())
    for file in (*SOURCES, Path(__file__).name):
        digest.update((HERE / file).read_bytes())
    libraries = folder / digest.hexdigest()[:16]
    if not (libraries / "libcuda.so.1").exists():
        _compile(packages, libraries)
    preloaded = (next(libraries.glob("libcudart.so.*")), libraries / "libnccl.so.2")
    return {
        "LD_PRELOAD": before("LD_PRELOAD", *preloaded),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", libraries),
        "PYTHONPATH": before("PYTHONPATH", HERE / "site"),
        "EMULATED_GPU": "1",
        **dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), ""),  # that of a real GPU
    }


def _compile(packages: Path, libraries: Path) -> None:
    """Compile the replacements of CUDA's runtime, its driver and NCCL; the folder appears once it is complete."""
    folder = libraries.with_suffix(f".{os.getpid()}")
    folder.mkdir(parents=True)
    needed: set[str] = set()
    name = ""
    for library in sorted((packages / "torch/lib").glob("lib*.so")):
        table = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
        needed.update(NEEDED.findall(table))
        name = name or "".join(re.findall(r"\b(libcudart\.so\.\d+)", table)[:1])
    for file, prefix in zip(SOURCES, ("(__)?cuda", "nccl"), strict=True):
        ours = set(DEFINED.findall((HERE / file).read_text()))
        rest = sorted(each for each in needed - ours if re.match(prefix, each))
        (folder / f"{file}.c").write_text("".join(f"int {each}() {{ return 0; }}\n" for each in rest))
    (folder / "versions").write_text(f"{name} {{ global: *; }};\n")
    (folder / "driver.c").write_text(DRIVER)
    for header in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):  # nccl.h names them and needs nothing of them
        (folder / header).touch()
    places = (".", packages / "nvidia/cu13/include", packages / TRITON, packages / "nvidia/nccl/include")
    headers = [f"-I{place}" for place in places]
    for language, arguments in (
        ("gcc", ["-c", "driver.c", *(f"{file}.c" for file in SOURCES)]),
        ("g++", ["-std=c++17", *headers, "-c", *(HERE / file for file in SOURCES)]),
        ("g++", [f"-Wl,-soname,{name},--version-script=versions", "runtime.o", "runtime.cpp.o", "-o", name]),
        ("g++", ["-Wl,-soname,libnccl.so.2", "collectives.o", "collectives.cpp.o", "-o", "libnccl.so.2"]),
        ("gcc", ["-Wl,-soname,libcuda.so.1", "driver.o", "-o", "libcuda.so.1"]),
    ):
        kind = [] if "-c" in arguments else ["-shared"]
        subprocess.run([language, "-O2", "-fPIC", "-w", *kind, *arguments], cwd=folder, check=True)
    try:
        folder.rename(libraries)
    except OSError:  # another process was faster
        shutil.rmtree(folder)


def _has(program: str) -> bool:
    return any((Path(each) / program).exists() for each in os.environ.get("PATH", "").split(os.pathsep))

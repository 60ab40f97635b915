"""Say the version, and build the native core (csrc/) as an extension of the stable ABI, or go on without it.

The version is what git says (`src/paceline/core/version.py`); PACELINE_VERSION says it where there is neither a
repository nor a source distribution, as in the image. Everything else about the package is in pyproject.toml.
"""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# As `paceline.data.native.NATIVE_MISSING_MESSAGE`, which cannot be imported before the package is installed.
WHAT_IS_LOST = (
    "the native core was not built, so JPEGs are decoded by torchvision, several times slower; "
    "install a C compiler and Python's headers, and install paceline again"
)


class BuildOrLeaveOut(build_ext):  # setuptools asks for a subclass
    """Build the extension, or say in one sentence what is lost without it."""

    def run(self) -> None:
        """Build, or say so; what an earlier build has left is never taken for this one's."""
        built = {each.name: Path(self.build_lib, self.get_ext_filename(each.name)) for each in self.extensions}
        for path in built.values():
            path.unlink(missing_ok=True)
        super().run()
        missing = [name for name, path in built.items() if not path.exists()]
        for name in missing:
            Path(self.get_ext_fullpath(name)).unlink(missing_ok=True)
        if missing:
            print(f"paceline: {WHAT_IS_LOST}", flush=True)


NATIVE = Extension(
    "paceline.data._native",
    sources=sorted(map(str, Path("csrc").glob("*.c"))),
    depends=sorted(map(str, Path("csrc").glob("*.h"))),
    # No -march: what a processor has is asked at run time. No contraction: every processor gives the same bits.
    extra_compile_args=["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,
)

VERSIONS = runpy.run_path("src/paceline/core/version.py")
VERSION = os.environ.get("PACELINE_VERSION") or VERSIONS["version_of"](Path.cwd()) or f"{VERSIONS['FIRST']}.dev0"

setup(
    version=VERSION,
    ext_modules=[NATIVE],
    cmdclass={"build_ext": BuildOrLeaveOut},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

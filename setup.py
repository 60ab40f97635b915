"""Build the native library (csrc/) as an optional extension. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# As `paceline.data.native.NATIVE_MISSING_MESSAGE`, which cannot be imported before the package is installed.
WHAT_IS_LOST = (
    "the native core was not built, so Pillow decodes JPEGs, several times slower "
    "(install a C compiler and Python's headers, and install paceline again)"
)


class OptionalBuildExt(build_ext):  # setuptools asks for a subclass
    """Build the extension; where that fails, print one sentence on what is lost and go on."""

    def run(self) -> None:
        """Build each extension. Files of an earlier build are deleted first, so none is used where this build fails."""
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

setup(
    ext_modules=[NATIVE],
    cmdclass={"build_ext": OptionalBuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

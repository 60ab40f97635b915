"""Write the bill of materials of a release (CycloneDX 1.6, JSON): its files, and every package of the lock file.

    python .ci/sbom.py DIST --out FILE

DIST holds the source distribution and the wheels of one version. The packages, with the hashes of all their files, are
those of requirements.lock, which the image has too.
"""

import argparse
import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"


@dataclass(frozen=True)
class Locked:
    """A package of a lock file: where it is, and the SHA-256 of each of its files, in hexadecimal."""

    name: str
    version: str
    hashes: tuple[str, ...]


def locked(text: str) -> Iterator[Locked]:
    """Yield the packages of a lock file as uv and pip-tools write it."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            pinned, *options = line.split(" --hash=sha256:")
            requirement = Requirement(pinned)
            (specifier,) = requirement.specifier
            hashes = tuple(each.strip() for each in options)
            yield Locked(canonicalize_name(requirement.name), specifier.version, hashes)


def bill(files: list[Path], lock: str) -> Bom:
    """Return the bill of the `files` of one version, used with what `lock` has."""
    versions = {str(_version(file)) for file in files}
    assert len(versions) == 1, f"{[file.name for file in files]} are not of one version"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    subject = _component(project["name"], versions.pop(), description=project["description"])
    subject.licenses.add(DisjunctiveLicense(id=project["license"]))
    subject.components.update(_file(each) for each in files)
    bom = Bom()
    bom.metadata.component = subject
    packages = {each.name: _package(each) for each in locked(lock)}
    bom.components.update(packages.values())
    direct = {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}
    bom.register_dependency(subject, [packages[name] for name in sorted(direct)])
    return bom


def _version(file: Path) -> object:
    parse = parse_wheel_filename if file.suffix == ".whl" else parse_sdist_filename
    return parse(file.name)[1]


def _component(name: str, version: str, description: str | None = None) -> Component:
    purl = PackageURL("pypi", name=name, version=version)
    return Component(
        name=name, version=version, purl=purl, bom_ref=str(purl), type=ComponentType.LIBRARY, description=description
    )


def _file(path: Path) -> Component:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
    return Component(name=path.name, bom_ref=path.name, type=ComponentType.FILE, hashes=hashes)


def _package(locked: Locked) -> Component:
    component = _component(locked.name, locked.version)
    # Which file of a package is installed is the machine's choice: the hashes are of all that may be.
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=each) for each in locked.hashes]
    where = XsUri(str(component.purl))
    component.external_references.add(
        ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=where, hashes=hashes)
    )
    return component


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dist", type=Path, help="the folder of the source distribution and the wheels")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    asked = parser.parse_args()
    files = sorted([*asked.dist.glob("*.tar.gz"), *asked.dist.glob("*.whl")])
    if not files:
        parser.error(f"{asked.dist}: holds neither a source distribution nor a wheel (run make wheel)")
    bom = bill(files, LOCK.read_text(encoding="utf-8"))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    text = JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert error is None, error
    asked.out.write_text(text, encoding="utf-8")
    print(f"{asked.out}: {len(files)} files of {bom.metadata.component.purl}, {len(bom.components)} packages")


if __name__ == "__main__":
    main()

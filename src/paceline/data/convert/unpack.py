"""Write the samples of a pack as image files in class folders."""

import os
import re
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path, PurePosixPath

from paceline.core.dataset import Datasets, JoinedNames, PixelArray, Source
from paceline.core.errors import DataError
from paceline.core.files import write_new
from paceline.data.convert.assemble import get_sample_names
from paceline.data.convert.encode import map_ordered
from paceline.data.decode import NPY_SIGNATURE, detect_format_name
from paceline.data.decode_array import encode_pixels
from paceline.data.file_lock import create_folder_atomically
from paceline.data.files import JPEG_EXTENSIONS, has_image_extension, printable
from paceline.data.pack.format import KIND_FILE, KIND_RECORD
from paceline.data.pack.reader import PackSource

_FILES_PER_TASK = 16
_LOCK_NAME = ".paceline-unpacking"
_MAX_NAME_BYTES = 200


@dataclass(frozen=True)
class UnpackResult:
    """Images and bytes written."""

    images: int
    bytes: int


def unpack(packed: Datasets, folder: Path, progress: Callable[[int, int], None], workers: int) -> UnpackResult:
    """Write both splits to the new folder `folder`; call `progress` with (done, total).

    Unchanged files come back byte for byte, records as JPEG files with identical pixels, raw pixels as PNG. Raise
    `DataError` if the folder exists or cannot be written, and for a damaged sample.
    """
    folder = folder.absolute()
    if os.path.lexists(folder):
        raise DataError(f"{printable(folder)}: exists already (name a folder that does not)")
    if packed.train.info.targets is not None or packed.val.info.targets is not None:
        raise DataError(
            f"{packed.train.info.name}: has several labels per image or soft labels, which class folders cannot hold "
            "(keep the pack)"
        )
    total = len(packed.train) + len(packed.val)
    images = num_bytes = 0
    try:
        with create_folder_atomically(folder, "unpacking", _LOCK_NAME) as temporary:
            for source in (packed.train, packed.val):
                files = _SplitFiles(source, get_sample_names(source), temporary / source.info.split)
                numbers = range(len(source))
                with closing(map_ordered(files.write, numbers, max(1, workers), chunk=_FILES_PER_TASK)) as written:
                    for batch in written:
                        images, num_bytes = images + len(batch), num_bytes + sum(batch)
                        progress(images, total)
    except OSError as error:
        raise DataError(
            f"{printable(folder)}: cannot be written: {error.strerror or error} (write elsewhere)"
        ) from error
    return UnpackResult(images, num_bytes)


@dataclass(frozen=True)
class _SplitFiles:
    source: Source
    names: JoinedNames
    folder: Path

    def write(self, index: int) -> int:
        content, label = self._read_content(index)
        data = content if isinstance(content, bytes) else encode_pixels(content)
        path = self.folder / self._build_path(index, label, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names may repeat, and a prefixed name may be that of another sample.
        names = chain([path.name, f"{index:08d}-{path.name}"], (f"{index:08d}-{n}-{path.name}" for n in count(2)))
        for name in names:
            with suppress(FileExistsError):
                return write_new(path.with_name(name), data)
        raise AssertionError("`count` does not end")

    def _read_content(self, index: int) -> tuple[bytes | PixelArray, int]:
        match self.source:
            case PackSource() as packed if packed.kinds[index] == KIND_FILE:
                return packed.read_stored(index), int(packed.labels[index])  # `read` refuses an empty file
        return self.source.read(index)

    def _build_path(self, index: int, label: int, data: bytes) -> PurePosixPath:
        # Its own name if that lies in its class folder. Names of an untrusted pack cannot lead out of the folder.
        class_name = _sanitize_component(os.fsencode(self.source.info.class_names[label]), f"class-{label}")
        name = self.names[index]
        components = name.split(b"/")
        if (
            len(components) > 1
            and all(_sanitize_component(component, "") == component for component in components)
            and components[0] == class_name
        ):
            file_name, folders = components[-1], components[:-1]
        else:
            file_name, folders = _sanitize_component(components[-1], f"{index:08d}"), [class_name]
        return PurePosixPath(*map(os.fsdecode, folders), os.fsdecode(self._add_extension(index, file_name, data)))

    def _add_extension(self, index: int, name: bytes, data: bytes) -> bytes:
        extension = os.fsdecode(name.rpartition(b".")[2]).lower()
        source = self.source
        if isinstance(source, PackSource) and source.kinds[index] == KIND_RECORD:
            return name if extension in JPEG_EXTENSIONS else name + b".jpg"
        if isinstance(source, PackSource) and source.kinds[index] == KIND_FILE:
            is_image = has_image_extension(os.fsdecode(name), arrays=data.startswith(NPY_SIGNATURE))
            return name if is_image else name + _guess_extension(data)
        return name + _guess_extension(data)


def _sanitize_component(name: bytes, fallback: str) -> bytes:
    # A hidden name, such as `..`, is not valid either.
    is_valid = 0 < len(name) <= _MAX_NAME_BYTES and not re.search(rb"[/\0]", name) and not name.startswith(b".")
    return name if is_valid else fallback.encode()


def _guess_extension(data: bytes) -> bytes:
    if data.startswith(NPY_SIGNATURE):
        return b".npy"
    try:
        name = detect_format_name(data).lower()
    except ValueError:  # a file that cannot be read is kept as well
        name = "tiff"
    return b"." + {"jpeg": "jpg", "tiff": "tif"}.get(name, name).encode()

"""Small datasets to pack, and records made in plain Python, so that no test needs the native core."""

import io
import math
import struct
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.pack.jpeg_record import _ZIGZAG
from paceline.data.pack.reader import open_pack
from paceline.data.sources.folder import load_folder
from paceline.recipe.schema.source import Folder

EXIF_6 = b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"


def photo(seed, width=40, height=30, mode="RGB", kind="JPEG", **options):
    """Return an image file of a few blurred blobs, which survive JPEG compression."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(file, kind, **options)
    return file.getvalue()


def record_of(jpeg, every=8):
    """Return the record of a baseline JPEG; its seek points are zeros, which only the native core would read."""
    if b"\xff\xda" not in jpeg:
        raise ValueError("it has no scan")
    quantisation, huffman, at = {}, {}, 2
    orientation = 1
    while jpeg[at + 1] != 0xDA:
        marker, (length,) = jpeg[at + 1], struct.unpack_from(">H", jpeg, at + 2)
        body = jpeg[at + 4 : at + 2 + length]
        at += 2 + length
        if marker == 0xDB:
            while body:
                natural = np.empty(64, dtype="<u2")
                natural[_ZIGZAG] = np.frombuffer(body[1:65], np.uint8)
                assert body[0] < 4, "16-bit tables"
                quantisation[body[0]], body = natural, body[65:]
        elif marker == 0xC4:
            while body:
                size = 17 + sum(body[1:17])
                huffman[body[0]], body = body[1:size], body[size:]
        elif marker == 0xC0:
            _, height, width, num = struct.unpack_from(">BHHB", body)
            components = [body[6 + 3 * n : 9 + 3 * n] for n in range(num)]
        elif marker == 0xE1:
            orientation = 6 if body == EXIF_6 else 1
        elif marker == 0xC2:
            raise ValueError("it is progressive")
    (length,) = struct.unpack_from(">H", jpeg, at + 2)
    tables = bytes(jpeg[at + 6 + 2 * n] for n in range(num))
    bits = jpeg[at + 2 + length : -2].replace(b"\xff\0", b"\xff")
    sampling = bytes(each[1] for each in components)
    across, down = (1, 1) if num == 1 else (max(f >> 4 for f in sampling), max(f & 15 for f in sampling))
    mcus_x, mcus_y = math.ceil(width / (8 * across)), math.ceil(height / (8 * down))
    num_points = mcus_y * math.ceil(mcus_x / every)
    order = [code for code in (0x00, 0x10, 0x01, 0x11) if code in huffman]
    mask = sum(1 << (0x00, 0x10, 0x01, 0x11).index(code) for code in order)
    codes = b"".join(huffman[code] for code in order)
    head = struct.pack(
        "<4sHHBBBB3s3sBBIII", b"PJ1\0", width, height, num, orientation, every, 0, sampling.ljust(3, b"\0"),
        tables.ljust(3, b"\0"), mask, 0, num_points, len(bits), len(codes),
    )  # fmt: skip
    body = head + b"".join(quantisation[each[2]].tobytes() for each in components) + codes
    body += bytes(-len(body) % 4) + bytes(10 * num_points)
    return body + bytes(-len(body) % 4) + bits + bytes(8)


@pytest.fixture
def make_photo():
    return photo


@pytest.fixture
def make_record():
    return record_of


@pytest.fixture
def core(monkeypatch):
    """Replace the native core by one that makes records in Python."""
    monkeypatch.setattr("paceline.data.convert.pack_writer.load_native", lambda: SimpleNamespace(index_jpeg=record_of))
    monkeypatch.setattr("paceline.data.convert.verify_pack.load_native", lambda: None)


@pytest.fixture
def no_core(monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer.load_native", lambda: None)
    monkeypatch.setattr("paceline.data.convert.verify_pack.load_native", lambda: None)


@pytest.fixture
def folder(tmp_path):
    """Return a folder of two classes with every kind of file: 7 training and 3 validation images."""
    root = tmp_path / "photos"
    files = {
        "train/cat/a.jpg": photo(1), "train/cat/b.jpg": photo(2, mode="L"), "train/cat/c.JPEG": photo(3, exif=EXIF_6),
        "train/cat/d.png": photo(4, kind="PNG"), "train/dög/e.jpg": photo(5, progressive=True),
        "train/dög/f.jpg": photo(6, 9, 17, subsampling=0), "train/dög/deep/g.jpg": photo(7, 64, 64, quality=30),
        "val/cat/h.jpg": photo(8), "val/dög/i.jpg": photo(9), "val/dög/j.gif": photo(10, mode="P", kind="GIF"),
    }  # fmt: skip
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


@pytest.fixture
def photos(folder):
    """Return the dataset in `folder`."""
    return load_folder(Folder(root=str(folder)))


@pytest.fixture
def pixels():
    """Return a dataset of 5 + 3 gray images of 4 x 3."""
    info = DatasetInfo("digits", "train", 5, ("a", "b"), 1, (4, 3), (0.5,), (0.25,), ("a note",))
    images = np.arange(8 * 12, dtype=np.uint8).reshape(8, 4, 3, 1)
    labels = np.arange(8, dtype=np.int64) % 2
    val = replace(info, split="val", num_images=3, notes=())
    return Datasets(ArraySource(info, images[:5], labels[:5]), ArraySource(val, images[5:], labels[5:]))


@pytest.fixture
def packed(tmp_path):
    """Return a function that packs a dataset and opens the pack."""

    def made(datasets, name="made.pack", **options):
        write_pack(datasets, tmp_path / name, PackOptions(**options), lambda done, total: None, workers=2)
        return open_pack(tmp_path / name)

    return made

"""Print an export: a table for people, JSON for programs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.show import print_rows
from paceline.core.class_table import printable_class_name
from paceline.core.units import size

if TYPE_CHECKING:  # imports torch
    from paceline.inference.export import ExportResult


def show_export(exported: "ExportResult", checkpoint: Path, *, format: str, as_json: bool) -> None:
    """Print the path, the format, and the comparison with PyTorch."""
    from paceline.inference.parity import PARITY_TOLERANCE

    parity = exported.parity
    if as_json:
        values = {
            "format": format,
            "path": str(exported.path),
            "card": str(exported.card),
            "bytes": exported.num_bytes,
            "checkpoint": checkpoint.name,
            "parity": {**asdict(parity), "tolerance": PARITY_TOLERANCE},
            **dict(exported.facts),
        }
        print(json.dumps(values, indent=2))
        return
    rows = [
        *exported.facts,
        (
            "parity",
            f"logits differ from PyTorch's by {parity.difference:.2g} of the largest (limit {PARITY_TOLERANCE:g}) on "
            f"{parity.num_images} {parity.of}; the same top-5 on {parity.top5}",
        ),
        ("size", size(exported.num_bytes)),
    ]
    print_rows(rows, f"{format} of {checkpoint.parent.parent.name}, {checkpoint.name}")
    print(f"exported: {printable_class_name(str(exported.path))}")
    print(f"model card, with fields to fill in: {printable_class_name(str(exported.card))}")

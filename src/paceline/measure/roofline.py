"""How near a run comes to what its device could do. Pure: costs, a rate and a peak in, shares out.

The roofline (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785) is taken kernel by kernel: each takes
as long as its FLOPs at the peak, or its bytes at the bandwidth, whichever is longer, and kernels run one after another.
MFU, model FLOPs utilisation, is achieved FLOP/s over the peak's (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from paceline.measure.peaks import Peak


@dataclass(frozen=True)
class Roofline:
    """How near one device came to its peak in training: `flops_per_s` achieved, and `mfu`, the share of the peak's.

    `bound_images_per_s` is what the kernels would allow, and `share` what of that was reached. Against a measured
    `peak` both shares are of what was seen there, and may exceed 1.
    """

    images_per_s: float
    flops_per_s: float
    mfu: float
    bound_images_per_s: float
    share: float
    peak: Peak

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return asdict(self)


def roofline(kernels: Iterable[tuple[float, float]], images_per_s: float, peak: Peak) -> Roofline:
    """Return how near a device that trains `images_per_s` (its own, not all ranks') comes to `peak`.

    `kernels` are those of an image, forward and backward: FLOPs of each, and elements that it moves.
    """
    rows = list(kernels)
    flops = sum(flops for flops, _ in rows)
    image_s = sum(
        max(flops / peak.flops_per_s, elements * peak.element_bytes / peak.bytes_per_s) for flops, elements in rows
    )
    assert image_s > 0, "a network that computes and moves nothing has no roofline"
    achieved = flops * images_per_s
    return Roofline(
        images_per_s=images_per_s,
        flops_per_s=achieved,
        mfu=achieved / peak.flops_per_s,
        bound_images_per_s=1 / image_s,
        share=images_per_s * image_s,
        peak=peak,
    )

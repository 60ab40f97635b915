"""What averaging gradients costs a step, from what a clock and a strategy have measured. Pure."""

from collections.abc import Sequence

from paceline.core.results import BucketResult, CommunicationResult


def communication_result(
    exposed_s: float, step_s: float, wire_s: float | None = None, buckets: Sequence[BucketResult] = ()
) -> CommunicationResult:
    """Return the result for `compute_exposed_s` of the `step_s` seconds of a step (means).

    `wire_s` is from the first bucket being ready to the last being averaged, None where `buckets` were not timed. What
    of it a step does not wait for is hidden behind backward: `overlap` is 1 - exposed_s / wire_s, and 0 where more is
    exposed than that, as buffers are waited for too.
    """
    share = exposed_s / step_s if step_s > 0 else 0.0
    if wire_s is None:
        return CommunicationResult(exposed_s=exposed_s, share=share)
    return CommunicationResult(
        exposed_s=exposed_s,
        share=share,
        bytes=sum(bucket.bytes for bucket in buckets),
        wire_s=wire_s,
        overlap=max(0.0, 1 - exposed_s / wire_s) if wire_s > 0 else 0.0,
        buckets=tuple(buckets),
    )

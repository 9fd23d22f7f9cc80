"""Which microbatch size fits, remembered for each shape of batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from memfit.errors import UsageError
from memfit.training._split import held_bytes, is_opaque, leaves

_FIRST_WAIT_STEPS = 64
_MOST_WAIT_STEPS = 1 << 20
_RETRIES_IN_A_ROW = 2


@dataclass
class _Bucket:
    """What is known about one shape.

    Attributes:
        size: The size in use; None is whatever the batch has.
        failed: The smallest size above ``size`` that failed; None if none is remembered.
        quiet: Steps since the last change or probe.
        wait: How many quiet steps go before a larger size is tried.
        retries: Steps in a row in which the device's allocator had to empty its cache and try again.
    """

    size: int | None = None
    failed: int | None = None
    quiet: int = 0
    wait: int = _FIRST_WAIT_STEPS
    retries: int = 0


class MicrobatchSizes:
    """The largest size that fits, found by halving on failure and by bounded trials upward, for each shape of batch.

    A failure halves the size at once. After ``wait`` quiet steps a larger size is tried once: twice as much, or half
    way to the smallest that failed. A trial that fails doubles the wait, so failures become rare at any length of run.
    Everything is counted in steps and nothing in seconds: a resumed run decides as the uninterrupted one did.

    Args:
        largest: The size to begin with and never to pass; None is the whole batch.

    Example:
        >>> sizes = MicrobatchSizes()
        >>> key = sizes.bucket(torch.zeros(64, 100))
        >>> key, sizes.size_for(key, 64)
        ('float32[:,128]', 64)
        >>> sizes.shrink(key, 64)
        >>> sizes.size_for(key, 64)
        32
    """

    def __init__(self, largest: int | None = None) -> None:
        self.largest = largest
        self._buckets: dict[str, _Bucket] = {}

    def bucket(self, batch: Any) -> str:
        """The shape of a batch: of each tensor and array its type and dimensions, all but the first rounded up.

        They are rounded up to powers of two, so that a length that differs in every batch makes few buckets. Of other
        objects, and of one in a list of them, it is the type and the number of bytes.
        """
        return self.bucket_of(leaf for _, leaf in leaves(batch))

    def bucket_of(self, found: Iterable[Any]) -> str:
        """The same of what the structure of a batch holds."""
        shapes = []
        for leaf in found:
            if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim:
                shapes.append(_shape_text(leaf.dtype, tuple(leaf.shape[1:])))
            elif is_opaque(leaf):
                shapes.append(f"{type(leaf).__name__}[{_power(held_bytes(leaf))}]")
            elif isinstance(leaf, list) and leaf and is_opaque(leaf[0]):
                shapes.append(f"{type(leaf[0]).__name__}[:,{_power(held_bytes(leaf) // len(leaf))}]")
        return " ".join(shapes)

    def size_for(self, key: str, count: int) -> int:
        """The size to take for a batch of ``count`` units; at least 1, at most ``count``."""
        most = count if self.largest is None else min(count, self.largest)
        bucket = self._buckets.get(key)
        if bucket is None or bucket.size is None:
            return most
        size = bucket.size
        if bucket.quiet >= bucket.wait and size < most:
            size = self._trial(bucket)
        return max(1, min(size, most))

    def shrink(self, key: str, failed_size: int) -> None:
        """``failed_size`` did not fit: half of it is next, or the size before it if it was a trial."""
        bucket = self._buckets.setdefault(key, _Bucket())
        if bucket.size is None or failed_size <= bucket.size:
            bucket.size = max(1, (failed_size + 1) // 2)
        if bucket.quiet:  # not on the way down to the first size that fits
            bucket.wait = min(2 * bucket.wait, _MOST_WAIT_STEPS)
        bucket.failed, bucket.quiet, bucket.retries = failed_size, 0, 0

    def succeeded(self, key: str, size: int) -> None:
        """A step with microbatches of ``size`` went through."""
        bucket = self._buckets.get(key)
        if bucket is None or bucket.size is None:
            return
        bucket.quiet += 1
        if size > bucket.size:
            bucket.size, bucket.quiet = size, 0
            if bucket.failed is not None and bucket.failed <= size:
                bucket.failed = None

    def note_alloc_retries(self, key: str, size: int, num_retries: int) -> None:
        """How often the device's allocator had to empty its cache in a step that went through.

        Two such steps in a row count as a failure: the next allocation that finds nothing to give back is one, and
        until then every step pays for freeing and allocating anew.
        """
        bucket = self._buckets.get(key)
        if num_retries == 0:
            if bucket is not None:
                bucket.retries = 0
            return
        bucket = self._buckets.setdefault(key, _Bucket())
        bucket.retries += 1
        if bucket.retries >= _RETRIES_IN_A_ROW and size > 1:
            self.shrink(key, size)

    def state_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {"buckets": {key: asdict(bucket) for key, bucket in self._buckets.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave.

        Raises:
            UsageError: If it is not of that form.
        """
        try:
            self._buckets = {str(key): _Bucket(**fields) for key, fields in state["buckets"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"These are no microbatch sizes: {error!r}.",
                rule="the state is what MicrobatchSizes.state_dict() of this version of memfit gave.",
                remedy="leave it out: sizes are found anew by a few failures",
            ) from error

    def _trial(self, bucket: _Bucket) -> int:
        size, failed = bucket.size or 1, bucket.failed
        if failed is None or 2 * size < failed:
            return 2 * size
        return max((size + failed) // 2, size + 1)


def _power(dim: int) -> int:
    return 1 << max(0, dim - 1).bit_length()


@functools.lru_cache(maxsize=1024)
def _shape_text(dtype: Any, shape: tuple[int, ...]) -> str:
    dims = ",".join([":", *(str(_power(dim)) for dim in shape)])
    return f"{str(dtype).removeprefix('torch.')}[{dims}]"

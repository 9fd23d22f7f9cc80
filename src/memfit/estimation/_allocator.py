"""Replay a trace through a model of torch's caching allocator for CUDA, block for block."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from sys import maxsize

from memfit.estimation._allocator_settings import AllocatorSettings
from memfit.estimation._events import Phase, Trace
from memfit.units import MIB

# c10/core/AllocatorConfig.h (torch 2.13)
MIN_BLOCK = 512  # every size is a multiple of it
SMALL_SIZE = MIB  # the largest request that goes to the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE = 10 * MIB  # requests from here on get a segment of their own size
ROUND_LARGE = 2 * MIB  # what that size is a multiple of
_ENDLESS = 1 << 44  # addresses of an expandable segment


class _Block:
    """Addresses of a segment: given out, free, or (in expandable segments) without memory behind them."""

    __slots__ = ("address", "allocated", "base", "mapped", "next", "pool", "previous", "size", "stream")

    def __init__(self, pool: _Pool, stream: int, address: int, size: int, base: int = -1) -> None:
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        self.base = base  # where its expandable segment starts; -1 in any other
        self.allocated, self.mapped = False, True
        self.previous: _Block | None = None
        self.next: _Block | None = None

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None


class _Pool:
    """The free blocks of small requests, or of large ones, of every stream."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int, int, _Block]] = []  # by stream, size and address
        self.unmapped: list[tuple[int, int, _Block]] = []  # by stream and address

    def add(self, block: _Block) -> None:
        if block.mapped:
            insort(self.free, (block.stream, block.size, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]


class Allocator:
    """The allocator of one device, which can give it ``capacity_bytes``; None for no limit. Not modelled: private pools
    (CUDA graphs, ``MemPool``), and what only gives memory back earlier. Source: c10/cuda/CUDACachingAllocator.cpp and
    c10/core/AllocatorConfig.h (torch 2.13)."""

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int | None = None) -> None:
        self.settings = settings
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = self.num_retries = 0
        self._small, self._large = _Pool(is_small=True), _Pool(is_small=False)
        self._blocks: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, number: int, num_bytes: int, stream: int = 0) -> bool:
        """Give out a block of this number and size on this stream; return False if there is no room."""
        size = self.round(num_bytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        block = self._find_free(pool, size, stream)
        if block is None:
            block = self._take_segment(pool, size, stream)
            if block is None:
                self.release()
                self.num_retries += 1
                block = self._take_segment(pool, size, stream)
            if block is None:
                return False
        self._split(block, size)
        block.allocated = True
        self._blocks[number] = block
        self.allocated_bytes += block.size
        return True

    def free(self, number: int) -> None:
        """Take the block of this number back, and merge it with free neighbours."""
        block = self._blocks.pop(number)
        block.allocated = False
        self.allocated_bytes -= block.size
        _merge(block, block.previous)
        _merge(block, block.next)
        block.pool.add(block)

    def release(self) -> None:
        """Give back every free segment, and every free page of an expandable one: ``torch.cuda.empty_cache``."""
        for pool in (self._large, self._small):
            pages = []
            for *_, block in list(pool.free):
                if block.base >= 0:
                    pages.append(block)
                elif not block.is_split:
                    self.reserved_bytes -= block.size
                    pool.remove(block)
            for block in pages:
                self._unmap(block)
                if not block.is_split and not block.mapped:
                    pool.remove(block)

    def round(self, num_bytes: int) -> int:
        return max(-(-num_bytes // MIN_BLOCK), 1) * MIN_BLOCK

    def segment_size(self, size: int) -> int:
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        return self.settings.large_segment_size if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE

    def _has_room(self, num_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + num_bytes <= self.capacity_bytes

    def _find_free(self, pool: _Pool, size: int, stream: int) -> _Block | None:
        """Take the smallest free block of the stream that is large enough out of the pool."""
        settings, free = self.settings, pool.free
        at = bisect_left(free, (stream, size))
        if at == len(free) or free[at][0] != stream:
            return None
        if free[at][3].base >= 0:  # the size it can grow to counts
            while at + 1 < len(free) and free[at + 1][0] == stream and free[at][3].base >= 0:
                if _room(free[at + 1][3]) >= _room(free[at][3]):
                    break
                at += 1
        most = settings.max_split_size
        if most is not None and (
            free[at][1] >= most if size < most else free[at][1] >= size + settings.max_non_split_rounding
        ):
            return None
        return free.pop(at)[3]

    def _split(self, block: _Block, size: int) -> None:
        """Cut off the end of a block that is not needed, if that is large enough for a block."""
        rest = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            split = rest >= MIN_BLOCK
        else:
            split = rest > SMALL_SIZE and size < (self.settings.max_split_size or maxsize)
        if split:
            self._cut(block, size, mapped=True)

    def _cut(self, block: _Block, size: int, *, mapped: bool) -> None:
        rest = _Block(block.pool, block.stream, block.address + size, block.size - size, block.base)
        rest.previous, rest.next, rest.mapped = block, block.next, mapped
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        rest.pool.add(rest)

    def _take_segment(self, pool: _Pool, size: int, stream: int) -> _Block | None:
        num_bytes = self.segment_size(size)
        if self.settings.expandable_segments:
            return self._grow(pool, size, stream)
        if not self._has_room(num_bytes):
            return None
        self.reserved_bytes += num_bytes
        block = _Block(pool, stream, self._next_address, num_bytes)
        self._next_address += num_bytes
        return block

    def _page(self, pool: _Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self.settings.large_segment_size

    def _grow(self, pool: _Pool, size: int, stream: int) -> _Block | None:
        """Return a block at the lowest address of an expandable segment that can get enough pages."""
        block = self._find_growing(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        pool.remove(block)
        return block

    def _find_growing(self, pool: _Pool, size: int, stream: int) -> _Block:
        for at in range(bisect_left(pool.unmapped, (stream,)), len(pool.unmapped)):
            if pool.unmapped[at][0] != stream:
                break
            first = pool.unmapped[at][2]
            if first.previous is not None and not first.previous.allocated:
                first = first.previous
            found, one = 0, first
            while found < size and not one.allocated:
                found += one.size
                if one.next is None:
                    break
                one = one.next
            if found >= size:
                return first
        block = _Block(pool, stream, self._next_address, _ENDLESS, self._next_address)
        self._next_address += _ENDLESS
        block.mapped = False
        pool.add(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Put memory behind the first pages of a block; return False if there is none."""
        page = self._page(block.pool)
        num_bytes = -(-size // page) * page
        if not self._has_room(num_bytes):
            return False
        block.pool.remove(block)
        if num_bytes < block.size:
            self._cut(block, num_bytes, mapped=False)
        block.mapped = True
        _merge(block, block.previous)
        _merge(block, block.next)
        block.pool.add(block)
        self.reserved_bytes += num_bytes
        return True

    def _unmap(self, block: _Block) -> None:
        """Give back every page that lies wholly within a free block."""
        page, end = self._page(block.pool), block.address + block.size
        first = block.base + -(-(block.address - block.base) // page) * page
        last = block.base + (end - block.base) // page * page
        if first >= last:
            return
        block.pool.remove(block)
        if last < end:
            self._cut(block, last - block.address, mapped=True)
        if block.address < first:
            before = _Block(block.pool, block.stream, block.address, first - block.address, block.base)
            before.previous, before.next = block.previous, block
            if block.previous is not None:
                block.previous.next = before
            block.previous, block.address, block.size = before, first, last - first
            before.pool.add(before)
        block.mapped = False
        self.reserved_bytes -= last - first
        _merge(block, block.previous)
        _merge(block, block.next)
        block.pool.add(block)


def _room(block: _Block) -> int:
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _merge(block: _Block, other: _Block | None) -> None:
    """Merge a free neighbour into a block, if both have memory, or neither."""
    if other is None or other.allocated or block.mapped != other.mapped:
        return
    other.pool.remove(other)
    block.size += other.size
    if block.previous is other:
        block.address, block.previous = other.address, other.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = other.next
        if block.next is not None:
            block.next.previous = block


@dataclass(frozen=True)
class Replay:
    """The peaks of a trace in the allocator, in bytes."""

    allocated_bytes: Mapping[Phase, int]  # of each phase; active bytes are assumed to be the same
    reserved_bytes: int
    num_retries: int = 0  # how often the cache was emptied to find room: each costs time
    fits: bool = True  # there was room for everything; the replay stops if not


def replay(trace: Trace, settings: AllocatorSettings | None = None, *, capacity_bytes: int | None = None) -> Replay:
    allocator = Allocator(settings or AllocatorSettings(), capacity_bytes)
    peaks: dict[Phase, int] = {}
    current, reserved = None, 0
    for block, num_bytes, phase in trace.events:
        if phase != current:
            current, peaks[phase] = phase, max(peaks.get(phase, 0), allocator.allocated_bytes)
        if not num_bytes:
            allocator.free(block)
        elif allocator.allocate(block, num_bytes, trace.streams.get(block, 0)):
            peaks[phase] = max(peaks[phase], allocator.allocated_bytes)
            reserved = max(reserved, allocator.reserved_bytes)
        else:
            return Replay(peaks, reserved, allocator.num_retries, fits=False)
    return Replay(peaks, reserved, allocator.num_retries)

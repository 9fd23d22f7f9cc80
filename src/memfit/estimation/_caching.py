"""Torch's caching allocator for CUDA, block for block."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from sys import maxsize

from memfit.estimation._allocator_settings import AllocatorSettings
from memfit.units import MIB

# c10/core/AllocatorConfig.h (torch 2.13)
MIN_BLOCK = 512  # every size is a multiple of it
SMALL_SIZE = MIB  # the largest request that goes to the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE = 10 * MIB  # requests from here on get a segment of their own size
ROUND_LARGE = 2 * MIB  # what that size is a multiple of
_ENDLESS = 1 << 44  # addresses of an expandable segment on a device of unknown size


@dataclass(frozen=True)
class Usage:
    """What the allocator counts, in bytes.

    Attributes:
        allocated_bytes: Blocks that are given out, rounded as they are.
        active_bytes: The same, as long as no block is used on a second stream (``record_stream``): such a block is
            active until that stream is through, and a trace does not say when.
        reserved_bytes: Segments taken from the device.
    """

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int


class _Block:
    """A stretch of addresses of a segment: given out, free, or (in expandable segments) without memory behind it."""

    __slots__ = ("address", "allocated", "base", "born", "mapped", "next", "pool", "previous", "size", "stream")

    def __init__(self, pool: _Pool, stream: int, address: int, size: int, base: int = -1) -> None:
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        self.base = base  # where its expandable segment starts; -1 in any other
        self.allocated, self.mapped, self.born = False, True, 0
        self.previous: _Block | None = None
        self.next: _Block | None = None

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None


class _Pool:
    """Blocks of small requests, or of large ones, of every stream."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int, int, _Block]] = []  # by stream, size and address
        self.unmapped: list[tuple[int, int, _Block]] = []  # by stream and address
        self.num_searches = 0

    def add(self, block: _Block) -> None:
        if block.mapped:
            block.born = self.num_searches
            insort(self.free, (block.stream, block.size, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]


class Allocator:
    """The allocator of one device.

    Args:
        settings: What it is told; may be changed on the way, as torch allows.
        capacity_bytes: What the device can give it; None for no end.
        total_bytes: The device's memory, of which ``per_process_memory_fraction`` is a share; the capacity if None.

    Addresses are made up: each new segment lies above the others. Private pools (CUDA graphs, ``MemPool``) are not
    modelled.

    Source: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.13).

    >>> allocator = Allocator(AllocatorSettings())
    >>> allocator.allocate(1, 3 << 20), allocator.allocated_bytes, allocator.reserved_bytes
    (True, 3145728, 20971520)
    """

    def __init__(
        self, settings: AllocatorSettings, capacity_bytes: int | None = None, total_bytes: int | None = None
    ) -> None:
        self.settings = settings
        self.capacity_bytes = capacity_bytes
        self.total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self.allocated_bytes = self.reserved_bytes = self.num_retries = 0
        self._small, self._large = _Pool(is_small=True), _Pool(is_small=False)
        self._blocks: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, number: int, num_bytes: int, stream: int = 0) -> bool:
        """Whether there was room for a block of this number and size on this stream: then it is given out."""
        size = self.round(num_bytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        block = self._find_free(pool, size, stream)
        if block is None:
            self._collect_garbage()
            block = self._take_segment(pool, size, stream)
            if block is None and self._release_oversize(pool, size, stream):
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
        """Put the block of this number back; free neighbours become one block with it."""
        block = self._blocks.pop(number)
        block.allocated = False
        self.allocated_bytes -= block.size
        _merge(block, block.previous)
        _merge(block, block.next)
        block.pool.add(block)

    def release(self) -> None:
        """Give every free segment, and every free page of an expandable one, back: ``torch.cuda.empty_cache``."""
        for pool in (self._large, self._small):
            pages = []
            for *_, block in list(pool.free):
                if block.base >= 0:
                    pages.append(block)
                elif not block.is_split:
                    self._release(block)
            for block in pages:
                self._unmap(block)
                if not block.is_split and not block.mapped:
                    pool.remove(block)

    def round(self, num_bytes: int) -> int:
        """The size of the block that a request gets, before what is left over in a block is counted.

        >>> Allocator(AllocatorSettings.parse("roundup_power2_divisions:4")).round(1200 << 10) >> 10
        1280
        """
        table = self.settings.roundup_power2_divisions
        if table and num_bytes >= MIN_BLOCK:
            divisions = table[min(max(num_bytes.bit_length() - 21, 0), len(table) - 1)]
            if divisions > 1 and num_bytes > MIN_BLOCK * divisions:
                floor = 1 << (num_bytes.bit_length() - 1)
                step = floor >> (divisions.bit_length() - 1)
                return -(-num_bytes // step) * step
        return max(-(-num_bytes // MIN_BLOCK), 1) * MIN_BLOCK

    def segment_size(self, size: int) -> int:
        """The bytes of a segment that is taken for a block of this size."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        return self.settings.large_segment_size if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE

    @property
    def usage(self) -> Usage:
        return Usage(self.allocated_bytes, self.allocated_bytes, self.reserved_bytes)

    @property
    def segments(self) -> list[list[tuple[int, int, bool]]]:
        """Address, size and whether it is given out of each block that has memory, for each segment, by address."""
        blocks = {block.address: block for block in self._blocks.values()}
        for pool in (self._small, self._large):
            blocks.update({block.address: block for *_, block in pool.free})
            blocks.update({block.address: block for *_, block in pool.unmapped})
        found = []
        for _, first in sorted(blocks.items()):
            one = first if first.previous is None else None
            chain = []
            while one is not None:
                if one.mapped:
                    chain.append((one.address, one.size, one.allocated))
                one = one.next
            if chain:
                found.append(chain)
        return found

    @property
    def _allowed(self) -> int | None:
        """What the process may reserve; None unless a fraction of the device is set."""
        fraction = self.settings.per_process_memory_fraction
        return int(fraction * self.total_bytes) if fraction < 1.0 and self.total_bytes is not None else None

    def _has_room(self, num_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + num_bytes <= self.capacity_bytes

    def _find_free(self, pool: _Pool, size: int, stream: int) -> _Block | None:
        """The smallest free block of the stream that is large enough; it leaves the pool."""
        settings, free = self.settings, pool.free
        if settings.garbage_collection_threshold and self._allowed is not None:
            pool.num_searches += 1
        at = bisect_left(free, (stream, size))
        if at < len(free) and not settings.expandable_segments:
            while at < len(free) and free[at][0] == stream and free[at][3].base >= 0:
                at += 1
        if at == len(free) or free[at][0] != stream:
            return None
        if free[at][3].base >= 0:  # what it can grow to counts as its size
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
        """Cut what a block of this size does not need off its end, if that is worth a block."""
        rest = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            split = rest >= MIN_BLOCK
        else:
            split = rest > SMALL_SIZE and size < (self.settings.max_split_size or maxsize)
        if split:
            self._cut(block, size, mapped=True)

    def _cut(self, block: _Block, size: int, *, mapped: bool) -> None:
        """Make a free block of what lies behind the first bytes of a block."""
        rest = _Block(block.pool, block.stream, block.address + size, block.size - size, block.base)
        rest.previous, rest.next, rest.mapped = block, block.next, mapped
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        rest.pool.add(rest)

    def _take_segment(self, pool: _Pool, size: int, stream: int) -> _Block | None:
        num_bytes = self.segment_size(size)
        allowed = self._allowed
        if allowed is not None and self.reserved_bytes + num_bytes > allowed:
            return None
        if self.settings.expandable_segments:
            return self._grow(pool, size, stream)
        if not self._has_room(num_bytes):
            return None
        self.reserved_bytes += num_bytes
        block = _Block(pool, stream, self._next_address, num_bytes)
        self._next_address += num_bytes
        return block

    def _release(self, block: _Block) -> None:
        self.reserved_bytes -= block.size
        block.pool.remove(block)

    def _release_oversize(self, pool: _Pool, size: int, stream: int) -> bool:
        """Whether free blocks that are too large to be split made room: the next larger one, or the largest ones."""
        most = self.settings.max_split_size
        if most is None:
            return False
        size = max(size, most)
        at = bisect_left(pool.free, (stream, size))
        if at < len(pool.free) and pool.free[at][0] == stream and pool.free[at][3].base < 0:
            self._release(pool.free[at][3])
            return True
        released, largest = 0, [block for *_, block in reversed(pool.free[:at])]
        for block in largest:
            if released >= size or block.size < most or block.stream != stream:
                break
            if block.base < 0:
                released += block.size
                self._release(block)
        return released >= size

    def _collect_garbage(self) -> None:
        """Give free segments back that waited longest, if more is reserved than the threshold says."""
        allowed, threshold = self._allowed, self.settings.garbage_collection_threshold
        if allowed is None or not threshold or self.reserved_bytes <= int(threshold * allowed):
            return
        target = self.reserved_bytes - int(threshold * allowed)
        pool = self._large
        whole = [block for *_, block in pool.free if not block.is_split and block.base < 0]
        reclaimed = 0
        while whole and reclaimed < target:
            ages = [pool.num_searches - block.born for block in whole]
            mean = sum(ages) / len(ages)
            for block, age in zip(whole, ages, strict=True):
                if age >= mean:
                    reclaimed += block.size
                    self._release(block)
            whole = [block for block, age in zip(whole, ages, strict=True) if age < mean]

    def _page(self, pool: _Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self.settings.large_segment_size

    def _grow(self, pool: _Pool, size: int, stream: int) -> _Block | None:
        """A block at the lowest address of an expandable segment where pages can be put behind it."""
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
        page = self._page(pool)  # addresses for an eighth more than the device has
        num_bytes = _ENDLESS if self.total_bytes is None else self.total_bytes * 9 // 8
        num_bytes = -(-max(num_bytes, size) // page) * page
        block = _Block(pool, stream, self._next_address, num_bytes, self._next_address)
        self._next_address += num_bytes
        block.mapped = False
        pool.add(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Whether there was memory for the pages at the start of a block without any."""
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
        """Take the memory away from every page that lies wholly within a free block."""
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
    """The size of a block, and of what it can grow into."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _merge(block: _Block, other: _Block | None) -> None:
    """Make a neighbour part of a block, if it is free and both have memory, or neither."""
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

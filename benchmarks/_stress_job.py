"""One job of the stress benchmark: takes its memory as its kind says, holds it, reads it back and prints a checksum.

    python benchmarks/_stress_job.py --kind burst --size 64 --seed 3 --hold 1.0 [--file-mib 0] [--file PATH]
        [--journal PATH] [--tag NAME]

Sizes are MiB. The standard library alone, and little of it: 300 of these start in a benchmark that measures something
else. ``expected`` says what a job must print; ``neighbour`` is no job but the process that shares the group with them.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence

MIB = 1 << 20
#: A leak grows in about so many steps, with a rest after each.
LEAK_STEPS, LEAK_REST_SECONDS = 30, 0.03
#: The processes of a fork job: the parent, two children and a grandchild.
FORK_SHARES = 4


def block(seed: int) -> bytes:
    """The MiB that a job of this seed writes again and again; no page of it is zero."""
    page = b"".join((seed * 2654435761 + number & 0xFFFFFFFF | 1).to_bytes(4, "little") for number in range(1024))
    return page * 256


def filler(seed: int) -> bytes:
    """The MiB that a burst by one memset leaves behind: one byte, never zero."""
    return bytes([1 + seed % 255]) * MIB


def checksum(parts: Sequence[bytes | memoryview], start: int = 0) -> int:
    """The CRC over the CRCs of every MiB in the parts."""
    value = start
    for part in parts:
        for offset in range(0, len(part), MIB):
            value = zlib.crc32(zlib.crc32(part[offset : offset + MIB]).to_bytes(4, "little"), value)
    return value


def repeated(content: bytes, count: int, start: int = 0) -> int:
    """The checksum of ``count`` times the same MiB, without having them all."""
    one, value = zlib.crc32(content).to_bytes(4, "little"), start
    for _ in range(count):
        value = zlib.crc32(one, value)
    return value


def expected(kind: str, size: int, seed: int, file_mib: int = 0) -> str:
    """What a job must print as its result, worked out without its memory."""
    if kind == "fork":
        share = repeated(block(seed), size // FORK_SHARES)
        return f"{repeated(block(seed), size - size // FORK_SHARES * 3):08x}" + f"{share:08x}" * 3
    is_filled = way_of(kind, seed) == "burst" and seed % 2 == 0
    value = repeated(filler(seed) if is_filled else block(seed), size)
    return f"{repeated(block(0), file_mib, value):08x}" if kind == "map" else f"{value:08x}"


def way_of(kind: str, seed: int) -> str:
    """How a job takes its memory: as its kind says; half of the liars burst and half of them leak."""
    return kind if kind != "liar" else ("burst", "burst", "leak", "leak")[seed % 4]


def plain(size: int, seed: int, more: int = 0) -> memoryview:
    memory, content = mmap.mmap(-1, size * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | more), block(seed)
    for number in range(size):
        memory[number * MIB : (number + 1) * MIB] = content
    return memoryview(memory)


def run_burst(size: int, seed: int, options: Mapping[str, str]) -> str:
    """All at once: one memset, or one system call that touches every page (MAP_POPULATE) and a copy."""
    is_memset = seed % 2 == 0
    memory = (
        memoryview(bytearray(filler(seed)[:1]) * (size * MIB)) if is_memset else plain(size, seed, mmap.MAP_POPULATE)
    )
    hold(options)
    return f"{checksum([memory]):08x}"


def run_leak(size: int, seed: int, options: Mapping[str, str]) -> str:
    """Grows in small steps that no single one of gives it away."""
    step = max(1, size // LEAK_STEPS)
    parts = []
    for begin in range(0, size, step):
        parts.append(plain(min(step, size - begin), seed))
        time.sleep(LEAK_REST_SECONDS)
    hold(options)
    return f"{checksum(parts):08x}"


def run_fork(size: int, seed: int, options: Mapping[str, str]) -> str:
    """A parent, two children and a grandchild, each with memory of its own; the results come through pipes."""
    share = size // FORK_SHARES
    ends = [child(lambda: branch(share, seed, options)), child(lambda: leaf(share, seed, options))]
    memory = plain(size - 3 * share, seed)
    hold(options)
    return f"{checksum([memory]):08x}" + "".join(map(gather, ends))


def leaf(share: int, seed: int, options: Mapping[str, str]) -> str:
    memory = plain(share, seed)
    hold(options)
    return f"{checksum([memory]):08x}"


def branch(share: int, seed: int, options: Mapping[str, str]) -> str:
    end = child(lambda: leaf(share, seed, options))
    return leaf(share, seed, options) + gather(end)


def child(work: Callable[[], str]) -> tuple[int, int]:
    """Forks a process that does some work and writes its result; its pid and the pipe to read."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, work().encode())
            os._exit(0)
        except BaseException as error:
            os.write(2, f"a process of this job failed: {error!r}\n".encode())
            os._exit(1)
    os.close(writer)
    return pid, reader


def gather(end: tuple[int, int]) -> str:
    pid, reader = end
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise ChildProcessError(f"process {pid} of this job ended with status {status}")
    return text


def run_map(size: int, seed: int, options: Mapping[str, str]) -> str:
    """A little memory of its own, and a file of twice its declared size read through mmap: page cache, no need."""
    memory = plain(size, seed)
    num_bytes = int(options["--file-mib"]) * MIB
    with open(options["--file"], "rb") as source:
        os.posix_fadvise(source.fileno(), 0, num_bytes, os.POSIX_FADV_DONTNEED)
        view = memoryview(mmap.mmap(source.fileno(), num_bytes, prot=mmap.PROT_READ))
    hold(options)
    return f"{checksum([view], checksum([memory])):08x}"


def run_shm(size: int, seed: int, options: Mapping[str, str]) -> str:
    """A file in /dev/shm, half of it by write() and half by mmap, named as torch names its own; gone at its end."""
    path = f"/dev/shm/torch_{os.getpid()}_{options.get('--tag', 'stress')}{seed}_0"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        content, written = block(seed), size // 2
        for _ in range(written):
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.ftruncate(descriptor, size * MIB)
        memory = mmap.mmap(descriptor, size * MIB)
        for number in range(written, size):
            memory[number * MIB : (number + 1) * MIB] = content
        hold(options)
        return f"{checksum([memoryview(memory)]):08x}"
    finally:
        os.unlink(path)  # noqa: PTH108 - pathlib takes as long to import as all the rest


def neighbour(most: int, rate: float, seed: int) -> None:
    """Takes and gives back up to ``most`` MiB at up to ``rate`` MiB a second, until it is ended."""
    import random

    step = 4
    chance = random.Random(seed)
    parts: list[memoryview] = []
    while True:
        target = chance.randint(0, most // step)
        speed = rate * chance.uniform(0.25, 1.0)
        while len(parts) != target:
            if len(parts) < target:
                parts.append(plain(step, seed))
            else:
                parts.pop()
            time.sleep(step / speed)
        time.sleep(chance.uniform(0.0, 0.5))


def hold(options: Mapping[str, str]) -> None:
    time.sleep(float(options.get("--hold", "0")))


def note(options: Mapping[str, str], what: str) -> None:
    """One line into the journal that the benchmark reads: who began and who came through, told by the jobs."""
    if "--journal" in options:
        line = f"{what} {options['--seed']} {os.getpid()} {time.time():.3f}\n"
        descriptor = os.open(options["--journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def main() -> int:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    kind, size, seed = options["--kind"], int(options["--size"]), int(options["--seed"])
    if kind == "neighbour":
        neighbour(size, float(options["--rate"]), seed)
    runs = {"burst": run_burst, "leak": run_leak, "fork": run_fork, "map": run_map, "shm": run_shm}
    note(options, "start")
    try:
        result = runs[way_of(kind, seed)](size, seed, options)
    except BaseException:
        note(options, "fail")
        raise
    print(f"result {seed} {result}", flush=True)
    note(options, "done")
    return 0


if __name__ == "__main__":
    sys.exit(main())

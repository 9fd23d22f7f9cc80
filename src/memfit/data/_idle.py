"""A program: what a worker of a PyTorch DataLoader holds that does nothing, by start method, printed in bytes.

It is its own script, so that spawned workers import what it does: torch and the modules that are named, and no more.
``_idle.py <start method> <module>...``
"""

import importlib
import sys
from contextlib import suppress

if __name__ in ("__main__", "__mp_main__"):  # a spawned worker runs it by the second name
    from torch.utils.data import DataLoader

    for name in sys.argv[2:]:
        with suppress(Exception):  # one that a program of this form cannot import is left out
            importlib.import_module(name)


class Idle:
    """Its item is what the process holds for itself, in bytes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        with open("/proc/self/smaps_rollup") as file:
            lines = (line.split() for line in file)
            return sum(int(words[1]) for words in lines if words[0] in ("Private_Dirty:", "Swap:")) << 10


if __name__ == "__main__":
    print(max(DataLoader(Idle(), None, num_workers=1, multiprocessing_context=sys.argv[1])))  # type: ignore[arg-type]

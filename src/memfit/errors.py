"""Every error that memfit raises on purpose, in one tree.

An error has three parts: *what* happened, with numbers; *which* limit or rule says so, and where it comes from; and
what to *do*, as a command or a setting.

    MemfitError                  exit code 1
    ├── UsageError               2   bad usage, config or input
    │   ├── ConfigError          2   a key, flag or variable that is unknown or has a bad value
    │   ├── DataError            2   data that a panel cannot hold, or a panel that cannot be used
    │   │   └── DamagedError     2   a file whose content does not match its checksum
    │   ├── SplitError           2   a split that would be empty or would leak
    │   ├── MissingExtraError    2   an optional package that is not installed
    │   └── UntraceableError     2   a training step that cannot be run without its data
    │       └── OutOfTimeError   2   a trace that takes longer than its time
    ├── DoesNotFitError          3   refused before it starts, with the arithmetic
    │   └── SampleTooLargeError  3   the smallest part of a batch does not fit
    ├── JobFailedError           4   a job of the run failed
    │   └── HalfUpdatedError     4   memory ran out inside an optimizer step that cannot be undone
    ├── StoppedError            75   stopped after a checkpoint; run again to go on
    ├── PeerFailedError         79   another rank failed; this one left so that its group can begin again
    └── InterruptedRunError    130   interrupted
"""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Iterable
from typing import ClassVar


class MemfitError(Exception):
    """The root of the tree: what happened, which rule says so, and what to do.

    Args:
        what: What happened, with numbers.
        rule: Which limit or rule was met, and where it comes from.
        remedy: What to do, as a command, a setting or an argument.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, rule: str, remedy: str) -> None:
        super().__init__(what, rule, remedy)
        self.what = what
        self.rule = rule
        self.remedy = remedy

    def __str__(self) -> str:
        return "\n".join((self.what, f"  rule: {self.rule}", f"  do:   {self.remedy}"))

    def __reduce__(self) -> tuple[object, ...]:
        return (functools.partial(type(self), rule=self.rule, remedy=self.remedy), (self.what,))


class UsageError(MemfitError):
    """Bad usage, config or input."""

    exit_code = 2


class ConfigError(UsageError):
    """A key, flag or variable that is unknown or has a bad value."""


class DataError(UsageError):
    """Data that a panel cannot hold, or a panel that cannot be used."""


class DamagedError(DataError):
    """A file whose content does not match its checksum."""


class SplitError(UsageError):
    """A split that would be empty or would leak."""


class MissingExtraError(UsageError):
    """An optional package that is not installed."""

    @classmethod
    def of(cls, package: str, extra: str, purpose: str, distribution: str = "memfit") -> MissingExtraError:
        """An error that gives the pip line which installs ``package`` by the extra that holds it."""
        return cls(
            f"{package} is not installed, and {purpose} needs it.",
            rule=f"{package} belongs to the optional extra [{extra}].",
            remedy=f"pip install '{distribution}[{extra}]'",
        )


class UntraceableError(UsageError):
    """A training step does what cannot be followed without real data.

    Attributes:
        module: The path of the module in which it happened; empty if in none.
    """

    module = ""

    @classmethod
    def at(cls, module: str, reason: str) -> UntraceableError:
        """An error that says which operation it was, and of which module."""
        error = cls(
            f"{module or 'the training step'} cannot be traced: {reason}",
            rule="a step is run on tensors that have shapes and no values: what it does must not depend on values.",
            remedy="take shapes from the batch alone (a mask of one dimension counts as all its elements: "
            "torch.where((experts == 1).any(-1))), or measure a run: memfit run -- python train.py",
        )
        error.module = module
        return error


class OutOfTimeError(UntraceableError):
    """A trace of a training step takes longer than its time."""


class DoesNotFitError(MemfitError):
    """A job that cannot fit its budget: refused before it starts."""

    exit_code = 3


class SampleTooLargeError(DoesNotFitError):
    """The smallest part of a batch, a sample or a group, does not fit into memory by itself."""


class JobFailedError(MemfitError):
    """A job of a run failed."""

    exit_code = 4


class HalfUpdatedError(JobFailedError):
    """Memory ran out inside an optimizer step that cannot be undone: the weights are those of no step."""


class _EndsScript(SystemExit):
    """An error that ends a script which does not catch it with its message and its exit code."""

    exit_code: ClassVar[int]
    _said = False

    @property
    def code(self) -> int:  # type: ignore[override]
        """The script's exit status, asked for by the interpreter when nothing caught this: so it also says why."""
        if not self._said:
            self._said = True
            print(self, file=sys.stderr, flush=True)
        return self.exit_code


class StoppedError(MemfitError, _EndsScript):
    """A run that was stopped after a checkpoint and can go on.

    A script that does not catch it ends with its message and status 75; ``except Exception`` catches it.
    """

    exit_code = 75


class PeerFailedError(MemfitError, _EndsScript):
    """Another rank of the group failed; this one leaves so that the group can begin again.

    A script that does not catch it ends with its message and status 79.
    """

    exit_code = 79


class InterruptedRunError(MemfitError):
    """A run that was interrupted at once, without a checkpoint."""

    exit_code = 130


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the nearest known name, or lists them all when none is near."""
    import difflib

    names = sorted(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean '{match[0]}'?" if match else f"known: {', '.join(names)}"


def check_counts(error: type[MemfitError], least: int, **values: object) -> None:
    """Refuse arguments that are no whole numbers of at least ``least``; None is one that was left out."""
    for name, value in values.items():
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if value is not None and not (is_whole and value >= least):  # type: ignore[operator]
            raise error(
                f"{name} is {value!r}.",
                rule=f"{name} is a whole number of at least {least}.",
                remedy=f"pass {name}={least} or more",
            )

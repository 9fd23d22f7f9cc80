"""Settings from a file, ``MEMFIT_`` variables and ``--set``, checked against a pydantic model, each with its origin.

``resolve`` makes settings, ``resolve_nested`` checks a free section of them later against a model of its own, and
``fingerprint`` names a value by its content. Models derive from ``Settings``.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily
from memfit.config._problems import ARGUMENT, DEFAULT, OVERRIDE, Override, variable
from memfit.config._resolve import INTERNAL_VARIABLES, Resolved, read_file, resolve, resolve_nested
from memfit.config._scalars import read_plain
from memfit.config._types import ByteSize, Settings, differences, fingerprint, size_text, to_plain

if TYPE_CHECKING:
    from memfit.config._yaml import write_yaml

__all__ = [
    "ARGUMENT",
    "ByteSize",
    "DEFAULT",
    "INTERNAL_VARIABLES",
    "OVERRIDE",
    "Override",
    "Resolved",
    "Settings",
    "differences",
    "fingerprint",
    "read_file",
    "read_plain",
    "resolve",
    "resolve_nested",
    "size_text",
    "to_plain",
    "variable",
    "write_yaml",
]

__getattr__, __dir__ = load_lazily(__name__)

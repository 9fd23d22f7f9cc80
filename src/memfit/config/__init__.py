"""Settings from a file, ``MEMFIT_`` variables and ``--set``, checked against a pydantic model, each with its origin.

``resolve`` makes settings, ``resolve_nested`` checks a free section of them later against a model of its own, and
``fingerprint`` names a value by its content. Models derive from ``Settings``.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily
from memfit.config._problems import ARGUMENT as ARGUMENT
from memfit.config._problems import DEFAULT as DEFAULT
from memfit.config._problems import Override as Override
from memfit.config._resolve import INTERNAL_VARIABLES as INTERNAL_VARIABLES
from memfit.config._resolve import Resolved as Resolved
from memfit.config._resolve import read_file as read_file
from memfit.config._resolve import resolve as resolve
from memfit.config._resolve import resolve_nested as resolve_nested
from memfit.config._types import ByteSize as ByteSize
from memfit.config._types import Settings as Settings
from memfit.config._types import differences as differences
from memfit.config._types import fingerprint as fingerprint
from memfit.config._types import read_plain as read_plain
from memfit.config._types import to_plain as to_plain

if TYPE_CHECKING:
    from memfit.config._yaml import write_yaml as write_yaml

__all__ = ["Resolved", "Settings", "fingerprint", "read_file", "resolve", "resolve_nested", "to_plain"]

__getattr__, __dir__ = load_lazily(__name__)

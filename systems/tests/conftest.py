"""The fixtures of the library's tests serve these too."""

from fixtures import (
    _alone_on_the_host,
    _no_settings_from_outside,
    memfit,
    memory_group,
    one_thread,
    pytest_ignore_collect,
)

__all__ = [
    "_alone_on_the_host",
    "_no_settings_from_outside",
    "memfit",
    "memory_group",
    "one_thread",
    "pytest_ignore_collect",
]

"""The program: ``memfit``, and ``python -m memfit``."""

from __future__ import annotations

import gc
import os
import signal
import sys

_NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def main() -> None:
    """Load the command line and run it. A Ctrl-C while it still loads ends it with 130, and without a traceback."""
    try:
        # What loads stays to the end: nothing in it is garbage. Plugins of pydantic would be looked for in the entry
        # points of every installed package, and memfit's settings have no use for one.
        gc.disable()
        given = os.environ.get(_NO_PLUGINS)
        os.environ[_NO_PLUGINS] = "__all__"
        from memfit.cli import main as run

        del os.environ[_NO_PLUGINS]  # a job has its plugins
        if given is not None:
            os.environ[_NO_PLUGINS] = given
        gc.freeze()
        gc.enable()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    run()


if __name__ == "__main__":
    main()

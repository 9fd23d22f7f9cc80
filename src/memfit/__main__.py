"""The program: ``memfit``, and ``python -m memfit``."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

_NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
_SUPERVISORS = frozenset({"run", "resume"})


def enter_scope() -> None:
    """Start this program again in a control group of its own, where only that gives jobs their walls.

    An ordinary user's session lies in a group that only root may change. systemd's user manager gives a scope that the
    user may change. Nothing can be moved into it, so the supervisor itself must start there.
    """
    from memfit.memory import systemd_scope_command, why_no_walls

    if not why_no_walls() or (scope := systemd_scope_command()) is None:
        return
    check = "import sys; from memfit.memory import why_no_walls; sys.exit(bool(why_no_walls()))"
    tried = subprocess.run([*scope, sys.executable, "-P", "-c", check], capture_output=True, check=False)
    if tried.returncode == 0:
        os.execvp(scope[0], [*scope, sys.executable, *sys.orig_argv[1:]])


def main() -> None:
    """Load the command line and run it. A Ctrl-C while it still loads ends it with 130, and without a traceback."""
    try:
        if len(sys.argv) > 1 and sys.argv[1] in _SUPERVISORS:
            enter_scope()
        # What loads stays to the end: nothing in it is garbage. Plugins of pydantic would be looked for in the entry
        # points of every installed package, and memfit's settings have no use for one.
        gc.disable()
        given = os.environ.get(_NO_PLUGINS)
        os.environ[_NO_PLUGINS] = "__all__"
        from memfit.cli import load_verb
        from memfit.cli import main as run

        load_verb("".join(sys.argv[1:2]))
        del os.environ[_NO_PLUGINS]  # a job has its plugins
        if given is not None:
            os.environ[_NO_PLUGINS] = given
        gc.freeze()
        gc.enable()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    try:
        run()
    except SystemExit as end:
        if sys.argv[1:2] and sys.argv[1] in _SUPERVISORS:  # to free all that was imported takes 40 ms
            from memfit.jobs import leave

            leave(int(end.code or 0))
        raise


if __name__ == "__main__":
    main()

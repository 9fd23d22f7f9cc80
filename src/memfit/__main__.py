"""The program: ``memfit``, and ``python -m memfit``."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

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
        gc.disable()  # what loads stays to the end: nothing in it is garbage
        from memfit.cli import load_verb
        from memfit.cli import main as run

        load_verb("".join(sys.argv[1:2]))
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

"""Scores judged in the process of the tests, which load what that needs once."""

import contextlib
import io
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from memfit import config
from memfit.cli import main
from memfit.jobs import JobStatus
from memfit.jobs._child import load_target
from memfit.pipeline import _backtest
from memfit.pipeline._config import RunConfig
from memfit.pipeline._supervise import Supervisor
from memfit.rundir import read_json, write_json


@contextlib.contextmanager
def judged_here(folder, *, module=""):
    """Phases of workflows and ``memfit backtest`` take place in this process, and draw no pictures.

    Folds and the panel keep their jobs. That phases are jobs as well is for the tests without this to show.

    Args:
        folder: Of the config: a workload in a module beside it is found there.
        module: The name of that module, which another test may have loaded from its own folder.
    """
    schedule = Supervisor.schedule

    def here(self, jobs, **more):
        if not jobs or not str(jobs[0].target).startswith("memfit.pipeline._stages:"):
            return schedule(self, jobs, **more)
        (job,) = jobs
        folder = self.run.job_dir(job.id)
        folder.mkdir(exist_ok=True)
        before, other = (read_json(path / "outcome.json") or {} for path in (folder, self.run.job_dir("prepare")))
        result = load_target(job.target)(**job.arguments)
        ended = {"ended": time.time(), "attempt": before.get("attempt", 0) + 1}
        write_json(folder / "outcome.json", other | ended)
        write_json(folder / "result.json", {"result": result})
        return {job.id: JobStatus(job.id, "completed")}

    def alone(function, source, arguments, *, overrides, env):
        resolved = config.resolve(RunConfig, file=Path(source), env=env or os.environ, overrides=overrides)
        return load_target(function)(target=resolved.value.target, resolved=resolved.to_json(), **arguments)

    with (
        mock.patch.object(Supervisor, "schedule", here),
        mock.patch.object(_backtest, "call_alone", alone),
        mock.patch("memfit.evaluation._report.plot_backtest", lambda *_, **__: b"no picture"),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
    ):
        sys.modules.pop(module, None)
        try:
            yield
        finally:
            sys.modules.pop(module, None)


def command(folder, *words, module=""):
    """A command of memfit as the program does it, in a folder, its scores judged here: ``exit_code``, ``out``, ``err``."""
    out, err = io.StringIO(), io.StringIO()
    with (
        judged_here(folder, module=module),
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["memfit", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    return SimpleNamespace(exit_code=code, out=out.getvalue(), err=err.getvalue())

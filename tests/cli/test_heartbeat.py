"""A command that takes long says so."""

import threading

from memfit.rundir import RunDir


def test_after_a_silence_a_command_says_on_standard_error_that_it_goes_on(memfit, tmp_path, monkeypatch):
    run, wait, silences = RunDir.create(tmp_path, "demo", "0" * 64), threading.Event.wait, iter([False])

    def over(event, timeout=None):
        return next(silences, True) if timeout == 10.0 else wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", over)
    done = memfit("report", run.path)
    assert done.exit_code == 0 and done.out.startswith("wrote ")
    assert done.err.startswith("reading the run (0")
    assert memfit("report", run.path).err == ""

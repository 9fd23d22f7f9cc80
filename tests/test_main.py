"""The program starts itself again where only a scope of systemd's user manager gives jobs their walls."""

from types import SimpleNamespace

import pytest

import memfit.memory
from memfit import __main__ as program


@pytest.mark.parametrize(
    ("why", "scope", "tried", "enters"),
    [
        ("only root may change it", ["scope", "--"], 0, True),
        ("only root may change it", ["scope", "--"], 1, False),  # a user manager that starts nothing
        ("only root may change it", None, 0, False),
        ("", ["scope", "--"], 0, False),
    ],
)
def test_the_program_enters_a_scope_only_where_that_gives_walls(monkeypatch, why, scope, tried, enters):
    started = []
    monkeypatch.setattr(memfit.memory, "why_no_walls", lambda: why)
    monkeypatch.setattr(memfit.memory, "systemd_scope_command", lambda: scope)
    monkeypatch.setattr(program.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=tried))
    monkeypatch.setattr(program.os, "execvp", lambda name, words: started.append((name, words)))
    monkeypatch.setattr(program.sys, "orig_argv", ["python", "-m", "memfit", "run"])
    program.enter_scope()
    assert started == ([("scope", ["scope", "--", program.sys.executable, "-m", "memfit", "run"])] if enters else [])

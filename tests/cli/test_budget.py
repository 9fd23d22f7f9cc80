"""``memfit budget`` as a command."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from cli.conftest import check_refused
from memfit.memory import Budget, Device, DeviceProcess
from memfit.planning import Machine
from memfit.reports import to_text, view_budget


@pytest.fixture
def limited(memfit, monkeypatch):
    """Runs the verb under the limit of a setting."""
    monkeypatch.setenv("MEMFIT_MEMORY__LIMIT", "64MiB")
    return lambda *words: memfit("budget", *words)


def test_json_gives_the_cap_as_the_binding_limit_in_bytes(limited, monkeypatch):
    monkeypatch.setenv("MEMFIT_MEMORY__RESERVE", "1MiB")
    done = limited("--json")
    found = json.loads(done.out)
    assert done.exit_code == 0
    assert (found["binding"]["name"], found["limit_bytes"], found["lendable_bytes"]) == ("cap", 64 << 20, 63 << 20)


def test_the_text_says_which_limit_binds_and_shows_the_others(limited):
    done = limited()
    lines = done.out.splitlines()
    assert done.exit_code == 0
    assert lines[0] == "64.0 MiB free of 64.0 MiB. The smallest limit is cap, from the user."
    assert "4 % of 64.0 MiB" in lines[1] or "2 % of 64.0 MiB" in lines[1]
    for row in ("cap ", "MemAvailable ", "swap ", "/dev/shm ", "cores ", "jobs "):
        assert any(line.startswith(row) for line in lines), row


def test_this_machine_as_a_file_is_read_by_a_plan(limited, tmp_path):
    done = limited("--as-machine")
    assert done.exit_code == 0 and "node_memory: 64MiB\n" in done.out
    (tmp_path / "machine.yaml").write_text(done.out)
    assert Machine.read(tmp_path / "machine.yaml").node_memory == 64 << 20
    assert json.loads(limited("--as-machine", "--json").out)["node_memory"] == "64MiB"


def test_a_size_that_cannot_be_read_is_bad_usage(memfit, monkeypatch):
    monkeypatch.setenv("MEMFIT_MEMORY__RESERVE", "12")
    check_refused(memfit("budget"), "memory.reserve must be a size of 1MiB or more", "MEMFIT_MEMORY__RESERVE=12GiB")


def test_processes_of_others_on_a_gpu_are_named_in_the_text(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    found = Budget.read(root=tmp_path, env={})
    process = DeviceProcess(300, "jupyter [1]", 9 << 30, "ann")
    device = Device(0, "GPU-a", "NVIDIA H200", 80 << 30, 65 << 30, 11 << 30, (process,))
    output = io.StringIO()
    to_text(view_budget(dataclasses.replace(found, devices=(device,))), Console(width=200, file=output))
    assert "jupyter [1] (pid 300 of ann) 9.00 GiB" in output.getvalue()

"""``memfit budget`` as a command."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from memfit.memory import Budget, Device, DeviceProcess
from memfit.planning import Machine
from memfit.reports import print_budget


def test_json_gives_the_cap_as_the_binding_limit_in_bytes(memfit):
    done = memfit("budget", "--json", "--limit", "64MiB", "--reserve", "1MiB")
    found = json.loads(done.out)
    assert done.exit_code == 0
    assert (found["binding"]["name"], found["limit_bytes"], found["lendable_bytes"]) == ("cap", 64 << 20, 63 << 20)


def test_the_text_says_which_limit_binds_and_shows_the_others(memfit):
    done = memfit("budget", "--limit", "64MiB")
    lines = done.out.splitlines()
    assert done.exit_code == 0
    assert lines[0] == "64.0 MiB free of 64.0 MiB. The smallest limit is cap, from the user."
    assert "4 % of 64.0 MiB" in lines[1] or "2 % of 64.0 MiB" in lines[1]
    for row in ("cap ", "MemAvailable ", "swap ", "/dev/shm ", "cores ", "jobs "):
        assert any(line.startswith(row) for line in lines), row


def test_this_machine_as_a_file_is_read_by_a_plan(memfit, tmp_path):
    done = memfit("budget", "--limit", "64MiB", "--as-machine")
    assert done.exit_code == 0 and "node_memory: 64MiB\n" in done.out
    (tmp_path / "machine.yaml").write_text(done.out)
    assert Machine.read(tmp_path / "machine.yaml").node_memory == 64 << 20
    assert json.loads(memfit("budget", "--as-machine", "--limit", "64MiB", "--json").out)["node_memory"] == "64MiB"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--limit", "lots"), "'lots' is not a size"),
        (("--limit", "0"), "0"),
        (("--limit", "4"), "'4' is 4 B: less than 1 MiB"),
        (("--reserve", "12"), "'12' is 12 B"),
        (("--reserve", "x"), "'x' is not a size"),
    ],
)
def test_a_size_that_cannot_be_read_is_bad_usage(memfit, words, what):
    done = memfit("budget", *words)
    assert (done.exit_code, done.out, what in done.err) == (2, "", True)


def test_processes_of_others_on_a_gpu_are_named_in_the_text(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    found = Budget.read(root=tmp_path, env={})
    process = DeviceProcess(300, "jupyter [1]", 9 << 30, "ann")
    device = Device(0, "GPU-a", "NVIDIA H200", 80 << 30, 65 << 30, 11 << 30, (process,))
    output = io.StringIO()
    print_budget(dataclasses.replace(found, devices=(device,)), Console(width=200, file=output))
    assert "jupyter [1] (pid 300 of ann) 9.00 GiB" in output.getvalue()

"""``memfit budget`` as a command."""

import dataclasses
import io
import json
import subprocess
import sys

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from memfit.cli._budget import budget
from memfit.errors import ConfigError, UsageError
from memfit.memory import Budget, Device, DeviceProcess
from memfit.reports import print_budget


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(budget)
    return lambda *words: CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def test_json_gives_the_cap_as_the_binding_limit_in_bytes(command):
    done = command("--json", "--limit", "64MiB", "--reserve", "1MiB")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (found["binding"]["name"], found["limit_bytes"], found["lendable_bytes"]) == ("cap", 64 << 20, 63 << 20)


def test_the_text_says_which_limit_binds_and_shows_the_others(command):
    done = command("--limit", "64MiB")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert lines[0] == "64.0 MiB free of 64.0 MiB. The smallest limit is cap, from the user."
    assert "4 % of 64.0 MiB" in lines[1] or "2 % of 64.0 MiB" in lines[1]
    for row in ("cap ", "MemAvailable ", "swap ", "/dev/shm ", "cores ", "jobs "):
        assert any(line.startswith(row) for line in lines), row


@pytest.mark.parametrize(
    ("words", "kind"),
    [(("--limit", "lots"), ConfigError), (("--limit", "0"), UsageError), (("--reserve", "x"), ConfigError)],
)
def test_a_size_that_cannot_be_read_is_bad_usage(command, words, kind):
    done = command(*words)
    assert isinstance(done.exception, kind)
    assert done.exception.exit_code == 2


def test_the_command_exits_with_2_and_the_three_parts_of_the_error():
    words = [sys.executable, "-m", "memfit", "budget", "--limit", "lots"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'lots' is not a size" in done.stderr
    assert "Traceback" not in done.stderr


def test_processes_of_others_on_a_gpu_are_named_in_the_text(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    found = Budget.read(root=tmp_path, env={})
    process = DeviceProcess(300, "jupyter [1]", 9 << 30, "ann")
    device = Device(0, "GPU-a", "NVIDIA H200", 80 << 30, 65 << 30, 11 << 30, (process,))
    output = io.StringIO()
    print_budget(dataclasses.replace(found, devices=(device,)), Console(width=200, file=output))
    assert "jupyter [1] (pid 300 of ann) 9.00 GiB" in output.getvalue()


def test_the_command_loads_no_array_library():
    code = (
        "import sys\n"
        "from memfit.cli import app\n"
        "app(['budget', '--limit', '64MiB'], standalone_mode=False)\n"
        "print('loaded:', *sorted({'numpy', 'pyarrow', 'pandas', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].strip() == "loaded:"

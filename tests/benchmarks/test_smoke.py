"""Each benchmark runs with little to do, and says what it measured."""

import json
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")]


def test_loaders_deliver_the_same_batches_and_leave_nothing_behind(run, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ["--gib", "0.02", "--assets", "200", "--seconds", "0.1", "--examples", "200", "--rounds", "1"]
    done = run("loaders", "--part", "days", "--part", "tokens", *words, "--json", tmp_path / "figures.json")
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("met    ") and "batches are the same for all" in line for line in lines) == 3
    verdicts = [line[:6] for line in lines if line[:7] in ("met    ", "MISSED ")]
    assert len(verdicts) == 6 and done.returncode == ("MISSED" in verdicts)
    days = json.loads((tmp_path / "figures.json").read_text())["figures"]["days"]
    assert {"Parquet row groups", "memcpy"} <= days.keys()
    assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"]


def test_the_demo_names_programs_as_the_shell_finds_them(benchmark, monkeypatch):
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"/bin:{own}")
    assert benchmark("demo").find_program("memfit") == "memfit"
    monkeypatch.setenv("PATH", "/bin")
    assert benchmark("demo").find_program("memfit") == os.path.relpath(own / "memfit")


def test_the_demo_has_the_unchanged_script_under_memfit_as_a_column_of_its_own(benchmark, capsys):
    demo = benchmark("demo")
    plain = demo.Seen(finished=[1], killed=dict.fromkeys(range(2, 6), 3.0), num_kills=4, seconds=10, again_seconds=20)
    ways = {way.name: demo.Seen(finished=[*demo.FOLDS], num_restarts=2) for way in (demo.SCRIPT, demo.WORKLOAD)}
    assert "examples/images/plain.py" in demo.SCRIPT.words
    demo.report({"without memfit": plain} | ways, demo.Console(width=80))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "without memfit memfit, same script memfit, workload"
    assert lines[2:4] == ["killed by the kernel 4 0 0", "restarted by memfit - 2 2"]


def test_the_grid_of_estimates_has_every_row_and_its_verdicts(run, tmp_path):
    done = run("estimate", "--skip-traced", "--json", tmp_path / "figures.json")
    assert done.returncode == 0 and "MISSED" not in done.stdout, done.stdout + done.stderr
    grid = json.loads((tmp_path / "figures.json").read_text())["figures"]["grid"]
    assert len(grid) == 3 * 3 * 2 * 2
    key = ("gpu", "form", "checkpointing", "optimizer")
    verdicts = {tuple(row[name] for name in key): row["formula"]["verdict"] for row in grid}
    assert verdicts["RTX 4090", "fp32 masters", "full", "adamw8bit"] == "does not fit"
    assert verdicts["RTX 5090", "pure bf16", "full", "adamw"] == "fits"


def test_a_case_for_a_gpu_is_estimated_without_one(benchmark, monkeypatch, capsys):
    gpu = benchmark("gpu")

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        return gpu.main(), capsys.readouterr().out

    status, told = main("--trace", "lstm, 64 x 256")
    assert status == 0 and '"method": "traced"' in told and '"name": "H100-80GB"' in told
    if not torch.cuda.is_available():
        assert main("--part", "step") == (2, "there is no GPU here\n")

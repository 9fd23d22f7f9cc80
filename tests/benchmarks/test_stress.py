"""The stress benchmark measures what it says: right checksums, every kill, every lost attempt, the use of the jobs."""

import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

V1_MEMORY = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20

needs_groups = pytest.mark.skipif(
    os.geteuid() != 0 or not (V1_MEMORY / "memory.limit_in_bytes").exists(),
    reason="needs root and a cgroup v1 memory hierarchy at /sys/fs/cgroup/memory",
)


@pytest.fixture
def stress(benchmark):
    return benchmark("stress")


def jobs_of(stress, *kinds, size=16, hold=0.5):
    return [
        stress.StressJob(kind, size, seed, size + 16, 24 if kind == "map" else 0, hold)
        for seed, kind in enumerate(kinds, start=1)
    ]


@pytest.mark.parametrize(("kind", "seed"), [("burst", 1), ("fork", 2), ("map", 1), ("shm", 2)])
def test_each_kind_of_job_prints_the_checksum_that_is_expected_of_it(stress, tmp_path, kind, seed):
    job = replace(jobs_of(stress, kind, size=9, hold=0.0)[0], seed=seed)
    stress.write_jobs([job], tmp_path)
    words = [word.format(**job.row()) for word in stress.template(tmp_path, "test")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=True)
    assert stress.parse_results(done.stdout.splitlines()) == {seed: job.expected}
    assert [line.split()[0] for line in (tmp_path / "journal").read_text().splitlines()] == ["start", "done"]
    assert job.expected != replace(job, seed=seed + 2).expected != replace(job, size_mib=10).expected


def test_the_same_seed_makes_the_same_jobs_and_liars_are_wrong_by_ten(stress):
    jobs = stress.make_jobs(200, 3, 400)
    assert jobs == stress.make_jobs(200, 3, 400) != stress.make_jobs(200, 4, 400)
    assert {job.kind for job in jobs} == set(stress.KINDS)
    liars = [job.declared_mib / job.size_mib for job in jobs if job.kind == "liar"]
    assert min(liars) < 0.11 and max(liars) == 10
    assert all(job.declared_mib > job.size_mib for job in jobs if job.kind != "liar")
    assert max(job.declared_mib for job in jobs) <= 6 * 400


@pytest.mark.slow
@needs_groups
def test_a_killed_job_is_counted_and_its_result_is_missed(stress, tmp_path):
    small, large = jobs_of(stress, "leak", "burst")
    own = V1_MEMORY / f"memfit-test-{uuid.uuid4().hex[:8]}"  # beside it other tests may have groups of the same names
    own.mkdir()
    jobs = [small, replace(large, size_mib=200)]
    stress.write_jobs(jobs, tmp_path)
    words = stress.template(tmp_path, "test")
    lines = [" ".join([sys.executable, *words]).format(**job.row()) for job in jobs]
    setting = stress.Setting(jobs, 128 * MIB, 32 * MIB, own, timeout=60)
    trial = setting.try_out(["sh", "-c", "; ".join([*lines, "true"])], tmp_path, "test", os.environ)
    own.rmdir()  # which fails if a group is left in it
    figures = stress.figures_of(trial, jobs, stress.results_of([tmp_path / "out.log"]), setting.budget_bytes)
    assert figures["kills"]["groups"] == figures["kills"]["total"] == 1
    assert (figures["missing"], figures["num_wrong"]) == ([large.seed], 0)
    assert figures["lost_by_end"] == {"fail": 0, "killed": 1}
    assert 0 < figures["lost_seconds"] < figures["run_seconds"]
    assert not dict(stress.targets(figures | {"use_jobs": 1.0}))["1 kills (0 wanted)"]


@pytest.mark.core
@needs_groups
def test_memfit_runs_a_few_jobs_under_a_real_limit_without_a_kill(stress, tmp_path):
    jobs = stress.make_jobs(8, 2, 72)
    figures = stress.run_memfit(stress.Setting(jobs, 640 * MIB, 192 * MIB, V1_MEMORY, timeout=200), tmp_path)
    assert (figures["kills"]["groups"], figures["exit_code"]) == (0, 0), (tmp_path / "err.log").read_text()
    assert (figures["num_wrong"], figures["missing"]) == (0, [])
    assert figures["memfit_oom_kills"] == 0
    assert 0 < figures["use_jobs"] <= figures["use_all"] < 1
    assert figures["states"] == {"completed": 8}


@pytest.mark.long
@needs_groups
def test_two_runs_share_a_real_limit_without_a_kill_or_a_lost_attempt(run, tmp_path):
    words = ["--runs", "2", "--jobs", "20", "--hold", "0.7", "--limit", "1GiB", "--reserve", "192MiB"]
    done = run("stress", *words, "--work", tmp_path / "work", "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert (figures["kills"]["total"], figures["num_wrong"], figures["missing"]) == (0, 0, [])
    assert figures["states"] == {"completed": 20}
    assert len(list((tmp_path / "work/runs").glob("share_*/run_*"))) == 2

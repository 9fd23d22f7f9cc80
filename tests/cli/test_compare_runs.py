"""``memfit compare`` of runs: what differs comes first, then numbers, each with its n."""

import itertools
import json
import math

import pytest

from cli.conftest import check_refused
from memfit.files import write_json
from memfit.pipeline import config_of_command
from memfit.rundir import RunDir

PARAMS = {"lr": 0.1, "batch": 512, "train": {"decay": 0.0}}
NEW_CODE, NEW_DATA = {"code": {"train:fit": "c2"}}, {"parts": {"data": "d2"}}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a run directory: its config, the manifests of its folds, and how its jobs and the run ended."""
    monkeypatch.chdir(tmp_path)

    numbers = itertools.count(1)

    def run(experiment, values, *, state="completed", failed=0, made_by=None, **top):
        settings = {"experiment": experiment, "target": "train:RANKER", "seed": 0, "threads_per_job": 1, "stages": {}}
        settings |= {"memory": {"num_gpus": 0, "limit": None}, "slurm": {"nodes": 1}, "params": PARAMS} | top
        fingerprint = f"{next(numbers):08x}" * 8  # within a second, names sort by it
        made = RunDir.create(tmp_path / "runs", experiment, fingerprint, {"kind": "stages"})
        (made.path / "config.yaml").write_text(json.dumps(settings, sort_keys=True))
        write_json(made.path / "outcome.json", {"state": state})
        for number, value in enumerate(values, 1):
            parts = {"settings": repr(settings["params"]), "seed": str(settings["seed"]), "data": "d1"}
            manifest = {"stage": "fold", "job": f"fold_{number}", "parts": parts, "code": {"train:fit": "c1"}}
            manifest |= {"result": {"rank_ic": value, "name": "x"}, "digest": f"{value}", "versions": {}}
            for name, one in (made_by or {}).items():
                manifest[name] = manifest[name] | one
            write_json(made.path / "checkpoints" / f"fold_{number}.json", manifest)
        for number in range(1, len(values) + failed + 1):
            (made.path / "jobs" / f"fold_{number}").mkdir()
            ended = "completed" if number <= len(values) else "failed"
            known = {"state": ended, "started": 1.0, "ended": 2.0, "peak_bytes": 1, "cause": "", "attempt": 1}
            write_json(made.path / "jobs" / f"fold_{number}" / "outcome.json", known)
        return made

    return run


@pytest.fixture
def run(memfit):
    """Runs ``memfit compare``."""
    return lambda *words: memfit("compare", *words)


def rows(text):
    """The lines of a text as words."""
    return [line.split() for line in text.splitlines()]


# What differs


@pytest.mark.proves("S2-29")
def test_one_difference_is_the_change_and_the_table_of_before_and_after_follows(make, run):
    make("old", [0.02, 0.04])
    make("new", [0.05, 0.05, 0.08], params=PARAMS | {"lr": 0.2})
    done = run("new", "old")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out == (
        "change    params.lr: 0.1 -> 0.2   (B -> A)\n"
        "number                     before (B)              after (A)  A less B\n"
        "jobs completed                 2 of 2                 3 of 3          \n"
        "fold.rank_ic    0.0300 ± 0.0100 (n 2)  0.0600 ± 0.0100 (n 3)     +0.03\n"
        "One run each proves no difference: run both with five seeds or more.\n"
        "±: standard error over n units.\n"
    )


@pytest.mark.proves("S2-35")
def test_a_second_difference_is_refused_until_it_is_named(make, run):
    make("baseline", [0.1], params=PARAMS | {"batch": 512})
    make("search", [0.2], params=PARAMS | {"batch": 4096, "lr": 0.3})
    what = "differ in 2 things (B -> A): params.batch: 512 -> 4096; params.lr: 0.1 -> 0.3."
    check_refused(run("search", "baseline"), what, "--differs params.lr")
    done = run("search", "baseline", "--differs", "params.batch")
    assert done.exit_code == 0
    assert rows(done.out)[:2] == [
        ["change", "params.lr:", "0.1", "->", "0.3", "(B", "->", "A)"],
        ["named", "params.batch:", "512", "->", "4096"],
    ]
    both = run("search", "baseline", "--differs", "params.batch", "--differs", "params.lr", "--json")
    found = json.loads(both.out)
    assert (found["change"], [one["name"] for one in found["differences"]]) == (None, ["params.batch", "params.lr"])


@pytest.mark.parametrize("name", ["all", "params", "params.decay"])
def test_to_name_what_does_not_differ_is_refused(make, run, name):
    make("old", [0.1])
    make("new", [0.2], params=PARAMS | {"lr": 0.2})
    check_refused(run("new", "old", "--differs", name), f"A and B do not differ in {name}.")


@pytest.mark.parametrize(
    "top",
    [
        {"runs_dir": "elsewhere", "panels_dir": "cache"},
        {"max_parallel": 3, "retries": 0, "backend": "slurm", "on_failure": "stop"},
        {"notify": {"urls": ["mailto:x"]}, "track": {"tensorboard": True}},
        {"memory": {"num_gpus": 0, "limit": "8GiB"}, "slurm": {"nodes": 1, "partition": "gpu"}},
        {"stages": {"fold": {"memory": "2GiB", "gpu_memory": "1GiB"}}},
    ],
)
def test_settings_that_change_no_result_are_no_difference(make, run, top):
    make("old", [0.1])
    make("new", [0.1], **top)
    done = run("new", "old")
    assert (done.exit_code, done.out.splitlines()[0]) == (0, "change    none found in settings, code and data")


@pytest.mark.proves("S4-49")
@pytest.mark.parametrize(
    ("top", "name"),
    [
        ({"target": "train:OTHER"}, "target"),
        ({"seed": 1}, "seed"),
        ({"threads_per_job": 2}, "threads_per_job"),
        ({"memory": {"num_gpus": 2}}, "memory.num_gpus"),
        ({"slurm": {"nodes": 2}}, "slurm.nodes"),
        ({"stages": {"fold": {"needs": ["extra"]}}}, "stages.fold.needs"),
        ({"params": PARAMS | {"train": {"decay": 0.1}}}, "params.train.decay"),
        ({"made_by": NEW_CODE}, "code"),
        ({"made_by": NEW_DATA}, "data"),
    ],
)
def test_what_may_change_a_result_is_a_difference(make, run, top, name):
    make("old", [0.1])
    make("new", [0.1], **top)
    assert json.loads(run("new", "old", "--json").out)["change"] == name
    make("other", [0.1], **top | {"params": top.get("params", PARAMS) | {"lr": 0.9}})
    assert run("other", "old").exit_code == 2
    assert run("other", "old", "--differs", name).exit_code == 0


def test_code_and_data_are_named_by_what_they_are_of(make, run):
    make("old", [0.1])
    make("new", [0.1], made_by=NEW_CODE | NEW_DATA)
    assert "code of fold.train:fit; data of fold." in run("new", "old").err


def test_a_secret_is_neither_shown_nor_a_difference(make, run):
    make("old", [0.1], params=PARAMS | {"api_key": "abcdefgh1"})
    make("new", [0.1], params=PARAMS | {"api_key": "abcdefgh2"})
    done = run("new", "old", "--json")
    assert json.loads(done.out)["differences"] == []
    assert "abcdefgh" not in done.out


def test_what_else_may_explain_a_difference_is_noted(make, run):
    make("old", [0.1], made_by={"versions": {"torch": "2.12"}})
    make("new", [0.2], made_by={"versions": {"torch": "2.13"}})
    notes = json.loads(run("new", "old", "--json").out)["notes"]
    assert notes[0] == "torch 2.12 -> 2.13"
    assert notes[1].startswith("fold gave another result from equal settings, code and data")
    make("none", [])
    done = run("none", "old")
    assert "note      no stage has a result in both runs" in done.out
    assert "No number is in both runs." in done.out


@pytest.mark.parametrize(
    ("facts", "change"),
    [
        ({"words": ["echo", "b"]}, "stages.cmd.run"),
        ({"combinations": [{"x": "1"}]}, "combinations"),
        ({"threads_per_job": 2}, "threads_per_job"),
        ({"retries": 3}, None),
    ],
)
def test_runs_of_commands_differ_in_the_command_and_its_threads(tmp_path, run, monkeypatch, facts, change):
    monkeypatch.chdir(tmp_path)
    for name, more in (("old", {}), ("new", facts)):
        own = {"words": ["echo", "a"], "combinations": [{}], "threads_per_job": 1, "retries": 1} | more
        header = {"kind": "commands", "combinations": own["combinations"], "cwd": "/"}
        made = RunDir.create(tmp_path / "runs", name, "1" * 64, header)
        config = config_of_command(own["words"]) | {one: own[one] for one in ("threads_per_job", "retries")}
        (made.path / "config.yaml").write_text(json.dumps(config))
    assert json.loads(run("new", "old", "--json").out)["change"] == change


# One run each


@pytest.mark.proves("S2-52")
def test_the_rate_of_completed_jobs_has_its_n(make, run):
    make("old", [], failed=20)
    make("new", [0.1] * 20)
    jobs = json.loads(run("new", "old", "--json").out)["jobs"]
    assert jobs == {"before": {"completed": 0, "n": 20}, "after": {"completed": 20, "n": 20}}
    assert "0 of 20 20 of 20" in " ".join(run("new", "old").out.split())


def test_one_number_is_shown_alone_and_an_unknown_one_is_refused(make, run):
    make("old", [0.1])
    make("new", [0.2])
    assert list(json.loads(run("new", "old", "--metric", "fold.rank_ic", "--json").out)["numbers"]) == ["fold.rank_ic"]
    check_refused(run("new", "old", "--metric", "fold.rank_id"), "", "did you mean 'fold.rank_ic'?")


def test_a_number_that_is_not_finite_is_null_in_json(make, run):
    make("old", [math.nan, 0.1])
    make("new", [0.2, 0.3])
    before = json.loads(run("new", "old", "--json").out)["numbers"]["fold.rank_ic"]["before"]
    assert (before["mean"], before["n"]) == (None, 2)


def test_a_damaged_manifest_is_refused_by_name(make, run):
    make("old", [0.1])
    path = make("new", [0.2]).path / "checkpoints" / "fold_1.json"
    path.write_text("{}")
    check_refused(run("new", "old"), f"{path} has no stage")


# Real runs


FUNCTION = """
def scale(value):
    return 2 * value

def train(ctx, rate: float = 0.5):
    return {"loss": scale(rate), "draw": ctx.seed}
"""


@pytest.mark.proves("S2-21", "C-52")
@pytest.mark.slow
def test_a_baseline_is_made_again_from_its_stored_config_and_changed_code_is_seen(memfit, tmp_path):
    (tmp_path / "job.py").write_text(FUNCTION)
    (tmp_path / "config.yaml").write_text("experiment: job\ntarget: job:train\nseed: 7\n")
    assert memfit("run", "config.yaml", "--quiet").exit_code == 0
    [stored] = RunDir.all(tmp_path / "runs", "job")
    (tmp_path / "config.yaml").unlink()
    assert memfit("run", stored.path / "config.yaml", "--quiet", "--runs-dir", "again").exit_code == 0
    done = memfit("compare", "again/job", stored.path, "--json")
    found = json.loads(done.out)
    assert (found["differences"], found["notes"]) == ([], [])
    assert found["numbers"]["train.draw"]["before"] == found["numbers"]["train.draw"]["after"]
    [again] = RunDir.all(tmp_path / "again", "job")
    assert again.header["fingerprint"] == stored.header["fingerprint"]

    (tmp_path / "job.py").write_text(FUNCTION.replace("2 * value", "3 * value"))
    (tmp_path / "changed.yaml").write_text("experiment: changed\ntarget: job:train\nseed: 7\n")
    assert memfit("run", "changed.yaml", "--quiet").exit_code == 0
    changed = json.loads(memfit("compare", "changed", stored.path, "--json").out)
    assert changed["change"] == "code"
    assert any("scale" in name for name in changed["differences"][0]["before"])

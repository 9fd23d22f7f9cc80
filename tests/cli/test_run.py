"""``memfit run`` as a command: its flags, what it writes where, its exit codes."""

import json
import re

import pytest
import yaml

from memfit.rundir import RunDir

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


def three_parts(text):
    """An error's parts, when it has three of them, each at its place."""
    match = re.fullmatch(r"memfit: (?P<what>.+)\n  rule: (?P<rule>.+)\n  do:   (?P<remedy>.+)\n", text)
    assert match, text
    return match.groupdict()


def test_a_run_is_logged_summed_up_continued_and_started_anew(memfit, config):
    words = ["--max-parallel", 1, "--folds", "1-2", "--set", "params.hold_mib=2", "--set", "params.n_splits=3"]
    first = memfit("run", config(), *words, "--on-failure", "stop")
    assert (first.exit_code, first.err) == (0, "")
    head, _, summary = first.out.partition("\n\n")
    path, *lines = head.splitlines()
    assert path.startswith("Run ")
    assert all(re.match(STAMP, line) for line in lines)
    assert re.search(rf"^{STAMP}fold_2 completed \(\d+\.\ds\), peak [\d.]+ MiB", head, re.MULTILINE)
    assert re.search(r"^1 +completed +\d.*\n2 +completed", summary, re.MULTILINE)
    assert "mean of 2" in summary and "fold_3" not in first.out

    run = RunDir.open(next(iter(RunDir.all(config().parent / "runs", "tiny"))).path)
    effective = yaml.safe_load((run.path / "config.yaml").read_text())
    assert (effective["max_parallel"], effective["folds"], effective["on_failure"]) == (1, "1-2", "stop")
    assert effective["params"]["n_splits"] == 3
    assert [e["num_running"] for e in run.events() if e["kind"] == "admit"] == [1, 1, 1]

    # The same command goes on; with --json its log goes to stderr and stdout is JSON alone.
    second = memfit("run", config(), *words, "--json")
    found = json.loads(second.out)
    assert (second.exit_code, found["run"], found["state"]) == (0, str(run.path), "completed")
    assert [fold["attempt"] for fold in found["folds"]] == [1, 1]
    assert f"Run {run.path}" in second.err and "prepare completed" in second.err
    assert "fold_1 starts" not in second.err

    third = memfit("run", config(), *words, "--json", "--new")
    again = json.loads(third.out)
    assert again["run"] != found["run"]
    assert again["metrics"] == found["metrics"]


def test_a_failed_fold_gives_4_and_is_named_with_its_log_and_cause(memfit, config):
    done = memfit("run", config(fail_fold=1), "--on-failure", "stop")
    assert done.exit_code == 4
    assert re.search(r"^fold_1 failed: .*ValueError: a planted bug\n  log: runs/tiny/.*/jobs/fold_1/err\.log", done.out,
                     re.MULTILINE)  # fmt: skip
    assert "fold_2 starts" not in done.out


def test_what_does_not_fit_gives_3_with_the_arithmetic_and_runs_by_force(memfit, config):
    path = config("memory: {job: 900TiB}")
    refused = memfit("run", path, "--json", "--folds", 1)
    assert (refused.exit_code, refused.out) == (3, "")
    error = three_parts(refused.err[refused.err.rindex("memfit: ") :])
    assert error["what"].startswith("fold_1 needs 900.00 TiB of host memory (as declared); ")
    assert " may be lent = " in error["what"] and "--force" in error["remedy"]
    forced = memfit("run", path, "--force", "--folds", 1)
    assert forced.exit_code == 0
    assert "forced: not checked against the budget" in forced.out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--max-parallel", "0"], "--max-parallel"),
        (["--max-parallel", "some"], "--max-parallel"),
        (["--on-failure", "panic"], "--on-failure"),
        (["--set", "max_paralel=2"], "max_paralel"),
        (["--set", "nothing"], "nothing"),
        (["--set", "folds=1", "--folds", "2"], "given twice"),
    ],
)
def test_a_bad_value_gives_2_and_an_error_in_three_parts(memfit, config, tmp_path, words, what):
    done = memfit("run", config(), *words)
    assert (done.exit_code, done.out) == (2, "")
    assert what in three_parts(done.err)["what"]
    assert not (tmp_path / "runs").exists()


def test_a_config_that_is_not_there_gives_2(memfit, tmp_path):
    done = memfit("run", tmp_path / "absent.yaml")
    assert done.exit_code == 2
    assert "absent.yaml" in three_parts(done.err)["what"]


def test_an_unknown_flag_gives_2_and_the_nearest_one(memfit, config):
    done = memfit("run", config(), "--max-paralel", "2")
    assert (done.exit_code, done.out) == (2, "")
    assert "--max-paralel" in done.err and "--max-parallel" in done.err


@pytest.mark.parametrize("words", [["run"], ["fly"]])
def test_a_missing_argument_and_an_unknown_verb_give_2(memfit, words):
    assert memfit(*words).exit_code == 2


def test_every_flag_is_in_the_help_with_what_it_does(memfit):
    text = memfit("run", "--help").out
    for flag in ("--max-parallel", "--folds", "--set", "--on-failure", "--new", "--force", "--json"):
        assert re.search(rf"^ +{flag}\b.*  \w|^ +{flag}\b.*\n +\w", text, re.MULTILINE), flag
    assert re.sub(r"\s+", " ", text).count("Exit codes: 0 done, 2 bad config or input, 3 does not fit, 4") == 1

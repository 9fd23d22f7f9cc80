"""``memfit launch``: it prints a file, takes a measured run, and refuses what it should."""

import json
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/launch/recipes.yaml"
MIB = 1 << 20


def test_a_config_of_memfit_run_is_told_how_it_is_launched(memfit, config):
    done = memfit("launch", config())
    assert done.exit_code == 2 and "is a config of memfit run" in done.err
    assert f"command: memfit run {config()}" in done.err and "known:" not in done.err


def test_the_known_names_are_told_once(memfit, tmp_path):
    (tmp_path / "job.yaml").write_text("name: a\ncommand: python train.py\nfoo: 1\nqqq: 2\n")
    done = memfit("launch", "job.yaml")
    assert done.exit_code == 2 and done.err.count("known:") == 1
    assert "foo is no setting (job.yaml:3); qqq is no setting (job.yaml:4): known:" in done.err


def test_the_verb_prints_the_file_and_the_figures(memfit, tmp_path):
    before = [*tmp_path.iterdir()]
    found = json.loads(memfit("launch", EXAMPLE, "--format", "compose", "--json").out)
    assert "mem_limit: " in found["text"] and found["figures"]["memory_why"].startswith("1 x 28.00 GiB")
    large = memfit("launch", EXAMPLE, "--format", "compose", "--set", "memory.rank=900TiB")
    assert large.exit_code == 0 and "this host has" in large.err
    refused = memfit("launch", EXAMPLE, "--format", "env", "--submit")
    assert (refused.exit_code, refused.out) == (2, "")
    assert [*tmp_path.iterdir()] == before


def test_a_launch_that_is_tight_ends_with_3_unless_that_is_accepted(memfit, tmp_path):
    (tmp_path / "job.yaml").write_text('name: a\ncommand: ["true"]\nmemory: {node: 64GiB, slack: 0}\nimage: python\n')
    words = ("launch", "job.yaml", "--format", "compose")
    refused = memfit(*words)
    assert (refused.exit_code, refused.out) == (3, "")
    assert "a is tight: 64.1" in refused.err  # with what memfit takes in a container
    assert memfit(*words, "--accept-tight").exit_code == memfit(*words, "--set", "memory.slack=0.25").exit_code == 0


@pytest.mark.slow
def test_a_run_that_was_measured_stands_for_the_memory(memfit, tmp_path):
    (tmp_path / "job.yaml").write_text('name: trial\ncommand: ["true"]\nimage: python\n')
    code = "block = bytearray(300 << 20); import time; time.sleep(1)"
    assert memfit("run", "--name", "trial", "--", sys.executable, "-c", code).exit_code == 0
    words = ("launch", "job.yaml", "--format", "compose", "--json", "--set", "memory.slack=0")
    found = json.loads(memfit(*words, "--measured", "trial").out)["figures"]
    assert 300 * MIB < found["memory_bytes"] <= 512 * MIB and "measured in 'run_" in found["memory_why"]
    assert "memory of the training is not known" in memfit(*words).err

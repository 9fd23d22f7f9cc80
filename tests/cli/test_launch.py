"""``memfit launch``: it prints a file."""

import json
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/launch/recipes.yaml"
JOB = "experiment: a\nstages: {train: {run: 'true'}}\n"


def test_a_config_of_a_workload_is_launched_as_it_is(memfit, config):
    done = memfit("launch", config(), "--set", "memory.job=64MiB")
    assert done.exit_code == 0, done.err
    assert "--set memory.job=64MiB" in done.out and "#SBATCH --mem=256M" in done.out


def test_the_verb_prints_the_file_and_the_figures(memfit, tmp_path):
    (tmp_path / "recipes.yaml").write_text(EXAMPLE.read_text())
    before = [*tmp_path.iterdir()]
    found = json.loads(memfit("launch", "recipes.yaml", "--format", "kubernetes", "--json").out)
    assert "memory: 36Gi" in found["text"] and found["figures"]["memory_why"].startswith("28.00 GiB (declared: 1 x")
    assert found["notes"] == []
    assert [*tmp_path.iterdir()] == before


def test_a_launch_that_is_tight_ends_with_3_unless_that_is_accepted(memfit, tmp_path):
    (tmp_path / "job.yaml").write_text(f"{JOB}resources: {{memory: 64GiB}}\nmemory: {{slack: 0}}\n")
    words = ("launch", "job.yaml", "--format", "kubernetes")
    refused = memfit(*words)
    assert (refused.exit_code, refused.out) == (3, "")
    assert "a is tight: 64.1" in refused.err  # with what memfit takes in a container
    assert memfit(*words, "--accept-tight").exit_code == memfit(*words, "--set", "memory.slack=0.25").exit_code == 0

"""The incident report: the record of a death in Markdown, and nothing that was not read."""

import re
from dataclasses import replace

import pytest

from memfit.amounts import Amount
from memfit.diagnosis import Diagnosis, Evidence, Job, list_remedies, make_fix
from memfit.reports import write_incident
from memfit.units import GIB

NODE = Job(
    nodes=4, tasks_per_node=4, gpus_per_node=4, request=Amount(256 * GIB, "node"), batch=22, workers=2,
    task_peak=Amount(int(72.5 * GIB), "task"), task_mean=Amount(int(71.4 * GIB), "task"), samples=85109, epochs=40, epoch_seconds=23 * 60,
    limit_seconds=24 * 3600,
)  # fmt: skip
CARD = {"device_total": 24 * GIB, "free": 0, "reserved": 4 * GIB, "allocated": 3 * GIB, "tried": GIB}
SECTIONS = ("Symptom", "Hypothesis", "Experiment", "Result")


def diagnosis(kind="host_cgroup", cause="out_of_memory", phase="validate", **figures):
    line = Evidence("train.err", 7, "slurmstepd: error: Detected 4 oom_kill events in StepId=273202.0.")
    return Diagnosis(kind != "none", False, kind, cause, phase, "proved", figures, (line,))


def sections(text):
    parts = re.split(r"^## (\w+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def report(found, job=None, fix=None):
    return sections(write_incident(found, list_remedies(found, job), fix))


@pytest.mark.proves("S2-39")
def test_it_has_its_sections_in_order_below_the_verdict():
    text = write_incident(diagnosis(), [])
    assert text.startswith("# Incident: killed at a limit of host memory (proved)\n")
    assert tuple(sections(text)) == SECTIONS
    assert "kind host_cgroup, cause out_of_memory, phase validate\n" in text
    assert "train.err:7  slurmstepd: error: Detected 4 oom_kill" in sections(text)["Symptom"]


def test_the_experiment_has_each_remedy_with_its_arithmetic_and_cost_and_what_would_not_help_is_named():
    found = report(diagnosis(), NODE)["Experiment"]
    lines = found.splitlines()
    at = next(at for at, line in enumerate(lines) if "--mem=334G" in line)
    assert "(costs none, saves " in lines[at - 1] and ", enough by itself)" in lines[at - 1]
    assert "4 x 72.5 GiB (MaxRSS of a task) = 290.00 GiB of each node" in lines[at + 1]
    assert re.search(r"would change nothing here\n.*- a smaller batch.*\n +Activations", found, re.DOTALL)


def test_the_hypothesis_says_how_sure_it_is_and_the_result_is_left_to_fill_in():
    found = report(diagnosis(), NODE)
    assert "The job was killed at a limit of host memory. The lines above prove it." in found["Hypothesis"]
    assert "suggest it, and none proves it" in report(replace(diagnosis(), confidence="likely"), NODE)["Hypothesis"]
    assert "- Does the hypothesis hold?" in found["Result"]


def test_the_fix_shows_each_line_with_its_reason_and_the_diff(tmp_path):
    path = tmp_path / "train.slurm"
    path.write_text("#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=4\n#SBATCH --mem=256G\nsrun python a.py\n")
    fix = make_fix(path, diagnosis(), NODE).write()
    found = report(diagnosis(), NODE, fix)["Experiment"]
    assert "line 3: " in found and "+#SBATCH --mem=334G" in found


@pytest.mark.parametrize("kind", ["none", "host_cgroup", "gpu", "shm", "host_kernel", "pinned", "other_accelerator"])
def test_an_empty_diagnosis_claims_nothing(kind):
    cause = "unknown" if kind == "none" else "out_of_memory"
    text = write_incident(Diagnosis(kind != "none", False, kind, cause, "unknown", "not shown"), [])
    found = sections(text)
    assert not re.search(r"\d+(?:\.\d+)? (?:GiB|MiB)", text)
    assert "Not known. No line that was read shows a cause" in found["Hypothesis"]

"""The incident report: the record of a death in Markdown, and nothing that was not read."""

import re
from dataclasses import replace

import pytest

from memfit.amounts import Amount
from memfit.diagnosis import Diagnosis, Evidence, Job, list_remedies, make_fix, write_incident
from memfit.units import GIB

NODE = Job(
    nodes=4, tasks_per_node=4, gpus_per_node=4, request=Amount(256 * GIB, "node"), most_bytes=513 * GIB, batch=22, workers=2,
    task_peak_bytes=int(72.5 * GIB), task_mean_bytes=int(71.4 * GIB), samples=85109, epochs=40, epoch_seconds=23 * 60,
    limit_seconds=24 * 3600,
)  # fmt: skip
CARD = {"device_total": 24 * GIB, "free": 0, "reserved": 4 * GIB, "allocated": 3 * GIB, "tried": GIB}
SECTIONS = ("Symptom", "Timeline", "Memory", "Hypothesis", "Experiment", "Options", "Fix", "Next run", "Result")


def diagnosis(kind="host_cgroup", cause="out_of_memory", phase="validate", **figures):
    line = Evidence("train.err", 7, "slurmstepd: error: Detected 4 oom_kill events in StepId=273202.0.")
    return Diagnosis(kind != "none", False, kind, cause, phase, "proved", figures, (line,))


def sections(text):
    parts = re.split(r"^###? ([\w ]+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def report(found, job=None, fix=None):
    return sections(write_incident(found, list_remedies(found, job), job, fix))


def test_it_has_its_sections_in_order_below_the_verdict():
    text = write_incident(diagnosis(), [], NODE)
    assert text.startswith("# Incident: killed at a limit of host memory (proved)\n")
    assert tuple(sections(text)) == SECTIONS
    assert "kind host_cgroup, cause out_of_memory, phase validate." in text


def test_the_memory_of_a_node_is_a_sum_with_its_margin_and_never_added_to_a_device():
    host = report(diagnosis(), NODE)["Memory"]
    assert "4 x 72.5 GiB (MaxRSS of a task) = 290.00 GiB of each node" in host
    assert "| measured | 290.00 GiB |" in host and "| a node has | 513.00 GiB |" in host
    assert "Margin = request - measured = 44.00 GiB, 15%" in host
    both = report(diagnosis("gpu", phase="train", **CARD), NODE)["Memory"]
    assert both.count("|---|---:|") == 2
    assert "| other processes and the driver | 20.00 GiB |" in both


def test_options_come_with_their_cost_and_what_would_not_help_is_named():
    found = report(diagnosis(), replace(NODE, persistent_workers=False))["Options"]
    rows = [line for line in found.splitlines() if line.startswith("| ")]
    assert "--mem=334G" in rows[1] and "| none | yes |" in rows[1]
    assert "persistent_workers=False: No change" in found and "a smaller batch" in found


def test_the_next_run_is_told_its_steps_and_its_time():
    found = report(diagnosis(), NODE)["Next run"]
    assert "242 steps an epoch, 352 samples" in found
    assert "40 epochs x 23m 00s = 15h 20m" in found


def test_two_accounts_of_one_request_are_named():
    found = report(diagnosis(), replace(NODE, script_request=Amount(128 * GIB, "node")))["Memory"]
    assert "accounting has 256.00 GiB of each node, the script requests 128.00 GiB" in found
    assert (
        "accounting has" not in report(diagnosis(), replace(NODE, script_request=Amount(256 * GIB, "node")))["Memory"]
    )


def test_the_hypothesis_says_how_sure_it_is_and_the_result_is_left_to_fill_in():
    found = report(diagnosis(), NODE)
    assert "The job was killed at a limit of host memory. The lines above prove it." in found["Hypothesis"]
    assert "suggest it, and none proves it" in report(replace(diagnosis(), confidence="likely"), NODE)["Hypothesis"]
    assert "| Does the hypothesis hold? | |" in found["Result"]


def test_evidence_carries_file_and_line():
    assert "`train.err:7`" in report(diagnosis(), NODE)["Symptom"]


def test_the_fix_shows_each_line_with_its_reason_and_the_diff(tmp_path):
    path = tmp_path / "train.slurm"
    path.write_text("#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=4\n#SBATCH --mem=256G\nsrun python a.py\n")
    fix = make_fix(path, diagnosis(), NODE).write()
    found = report(diagnosis(), NODE, fix)
    assert "- line 3: `#SBATCH --mem=334G`" in found["Fix"] and "+#SBATCH --mem=334G" in found["Fix"]
    assert str(fix.new_path) in found["Next run"]


@pytest.mark.parametrize("kind", ["none", "host_cgroup", "gpu", "shm", "host_kernel", "pinned", "other_accelerator"])
def test_an_empty_diagnosis_claims_nothing(kind):
    cause = "unknown" if kind == "none" else "out_of_memory"
    text = write_incident(Diagnosis(kind != "none", False, kind, cause, "unknown", "not shown"), [])
    found = sections(text)
    assert not re.search(r"\d+(?:\.\d+)? (?:GiB|MiB)", text)
    assert all("Nothing in what was read." in found[name] for name in ("Timeline", "Memory", "Options", "Fix"))
    assert "Not known. No line that was read shows a cause" in found["Hypothesis"]


def test_a_cell_of_the_table_cannot_break_it():
    found = report(diagnosis("gpu", phase="train", **CARD))["Options"]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in found.splitlines() if line.startswith("|")}
    assert widths == {7}

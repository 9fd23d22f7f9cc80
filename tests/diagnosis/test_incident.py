"""The incident report: every section, from the diagnosis and its figures alone."""

import re
from dataclasses import replace

import pytest

from memfit.diagnosis._circumstances import Moment, arithmetic, checks
from memfit.diagnosis._diagnose import Diagnosis, Evidence
from memfit.diagnosis._fix import make_fix
from memfit.diagnosis._incident import SECTIONS, write_incident
from memfit.diagnosis._job import Job
from memfit.diagnosis._remedies import list_remedies
from memfit.diagnosis._signatures import Sign
from memfit.diagnosis._text import Line
from memfit.units import GIB

NODE = Job(
    nodes=4, tasks_per_node=4, gpus_per_node=4, request_bytes=256 * GIB, most_bytes=513 * GIB, batch=22, workers=2,
    task_peak_bytes=int(72.5 * GIB), task_mean_bytes=int(71.4 * GIB), samples=85109, epochs=40, epoch_seconds=23 * 60,
    limit_seconds=24 * 3600,
)  # fmt: skip
CARD = {"total_bytes": 24 * GIB, "free_bytes": 0, "reserved_bytes": 4 * GIB, "allocated_bytes": 3 * GIB,
        "tried_bytes": GIB}  # fmt: skip


def diagnosis(kind="host_cgroup", cause="out_of_memory", phase="validate", **values):
    line = Line("train.err", 7, "slurmstepd: error: Detected 4 oom_kill events in StepId=273202.0.")
    figures = {"device_total": "total", "allocated": "allocated", "reserved": "reserved", "tried": "tried"}
    return Diagnosis(
        kind != "none", False, kind, cause, phase, "proved",
        figures={name: values[f"{key}_bytes"] for name, key in figures.items() if f"{key}_bytes" in values},
        evidence=(Evidence(line.file, line.number, line.text),),
        timeline=(Moment("failure", "14:34:04", line.file, line.number, line.text),),
        findings=(Sign("cgroup_kill", (line,), values, of=kind),),
    )  # fmt: skip


def sections(text):
    parts = re.split(r"^## (\w+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def report(found, job=None, fix=None):
    return sections(write_incident(found, list_remedies(found, job), job, fix))


def test_it_has_the_ten_sections_in_order():
    assert tuple(report(diagnosis(), NODE)) == SECTIONS


def test_the_node_was_over_its_limit_in_steady_state_and_validation_at_most_the_last_straw():
    found = report(diagnosis(), NODE)
    assert "4 x 72.5 GiB (MaxRSS of a task) = 290.00 GiB, 34.00 GiB over the 256.00 GiB" in found["Memory"]
    assert "285.60 GiB, already over the limit in steady state" in found["Memory"]
    assert "What validate added is at most the last straw" in found["Memory"]


def test_the_budget_states_its_margin_and_never_adds_host_to_device():
    found = report(diagnosis(), NODE)
    assert "| measured | 290.00 GiB |" in found["Budget"] and "| a node has | 513.00 GiB |" in found["Budget"]
    assert "44.00 GiB, 15% of what was measured" in found["Budget"]
    both = report(diagnosis("gpu", phase="train", **CARD), NODE)["Budget"]
    assert both.count("|---|---:|") == 2
    assert "| others and the driver | 20.00 GiB |" in both


def test_options_come_with_their_cost_and_what_would_not_help_is_named():
    found = report(diagnosis(), replace(NODE, persistent_workers=False))["Options"]
    rows = [line for line in found.splitlines() if line.startswith("| ")]
    assert "--mem=334G" in rows[1] and "| none | yes |" in rows[1]
    assert "persistent_workers=False: no change" in found and "a smaller batch" in found


def test_verification_says_how_many_steps_to_expect_and_how_to_watch_memory():
    found = report(diagnosis(), NODE)["Verification"]
    assert "242 steps an epoch, 352 samples" in found
    assert "sstat" in found and "squeue shows no memory" in found
    assert "40 epochs x 23m 00s = 15h 20m" in found


def test_the_lesson_comes_from_the_figures_or_is_not_drawn():
    assert "72.50 GiB of one task looked small beside 256.00 GiB" in report(diagnosis(), NODE)["Lesson"]
    assert "20.00 GiB of the device were not this process's" in report(diagnosis("gpu", **CARD))["Lesson"]
    assert "teach none" in report(diagnosis("shm"))["Lesson"]


def test_a_sum_below_the_limit_and_a_single_task_teach_what_maxrss_is():
    below = replace(NODE, task_peak_bytes=60 * GIB)
    assert "60.00 GiB is the MaxRSS of one task; the limit of 256.00 GiB" in report(diagnosis(), below)["Lesson"]
    alone = Job(request_bytes=64 * GIB, task_peak_bytes=20 * GIB)
    assert "MaxRSS showed 20.00 GiB" in report(diagnosis(), alone)["Lesson"]


def test_the_problem_is_no_sentence_about_an_end_and_two_accounts_of_one_request_are_named():
    found = report(diagnosis(), replace(NODE, script_bytes=128 * GIB))
    assert found["Problem"].strip().splitlines()[0] == "Killed at a limit of host memory, in phase validate."
    assert "accounting has 256.00 GiB of each node, the script asks for 128.00 GiB" in found["Memory"]
    assert "accounting has" not in report(diagnosis(), replace(NODE, script_bytes=256 * GIB))["Memory"]


def test_figures_below_a_limit_and_an_unnamed_killer_make_a_whole_sentence():
    values = {"who": "", "used_bytes": GIB // 2, "limit_bytes": 2 * GIB}
    [line] = arithmetic(Sign("host_refused", (), values))
    assert line == "The limit: 0.50 GiB used of 2.00 GiB (per limit)."
    [over] = arithmetic(Sign("cgroup_kill", (), values | {"used_bytes": 3 * GIB}))
    assert over.endswith("(per limit), 1.00 GiB over.")


def test_a_job_that_completed_has_nothing_to_check():
    assert checks([], None, completed=True) == [] and "names a cause" in checks([], None)[0]


def test_evidence_and_timeline_carry_file_and_line():
    found = report(diagnosis(), NODE)
    assert "`train.err:7`" in found["Evidence"] and "14:34:04: failure, `train.err:7`" in found["Timeline"]


def test_the_fix_shows_each_line_with_its_reason_and_the_diff(tmp_path):
    path = tmp_path / "train.slurm"
    path.write_text("#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=4\n#SBATCH --mem=256G\nsrun python a.py\n")
    fix = make_fix(path, diagnosis(), NODE).write()
    found = report(diagnosis(), NODE, fix)
    assert "- line 3: `#SBATCH --mem=334G`" in found["Fix"] and "+#SBATCH --mem=334G" in found["Fix"]
    assert str(fix.new_path) in found["Verification"]


@pytest.mark.parametrize("kind", ["none", "host_cgroup", "gpu", "shm", "host_kernel", "pinned", "other_accelerator"])
def test_an_empty_diagnosis_claims_nothing(kind):
    cause = "unknown" if kind == "none" else "out_of_memory"
    bare = Diagnosis(kind != "none", False, kind, cause, "unknown", 0.0)
    text = write_incident(bare, [])
    found = sections(text)
    assert "None." in found["Evidence"]
    assert not re.search(r"\d+(?:\.\d+)? (?:GiB|MiB)", text)
    assert "None follows" in found["Options"] and "None follows" in found["Fix"]


def test_a_cell_of_the_table_cannot_break_it():
    found = report(diagnosis("gpu", phase="train", **CARD))["Options"]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in found.splitlines() if line.startswith("|")}
    assert widths == {7}

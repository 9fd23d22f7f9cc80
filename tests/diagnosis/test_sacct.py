"""What sacct, scontrol and sinfo print, in every form; most texts are of a real Slurm 22.05 that killed jobs."""

import random

import pytest

from memfit.amounts import Amount
from memfit.diagnosis import parse_sacct, read_ran
from reading import look

MIB, GIB = 1 << 20, 1 << 30
# Job 2 ran two steps of four tasks on two nodes with --mem=300M; the second met that limit on both.
PARSABLE = """\
JobID|JobIDRaw|JobName|State|ExitCode|DerivedExitCode|ReqMem|MaxRSS|MaxRSSNode|AveRSS|NTasks|NNodes|AllocCPUS|Elapsed|Timelimit|NodeList|AllocTRES|TRESUsageInTot
2|2|ranks|FAILED|1:0|0:125|600M|||||2|4|00:00:12|01:00:00|n[1-2]|billing=4,cpu=4,mem=600M,node=2|
2.batch|2.batch|batch|FAILED|1:0|||3744K|n1|3744K|1|1|2|00:00:12||n1|cpu=2,mem=300M,node=1|cpu=00:00:00,mem=3744K
2.0|2.0|python3|COMPLETED|0:0|||146220K|n1|73108K|4|2|4|00:00:07||n[1-2]|cpu=4,mem=600M,node=2|cpu=00:00:00,mem=292432K
2.1|2.1|python3|OUT_OF_MEMORY|0:125|||258908K|n1|99804K|4|2|4|00:00:05||n[1-2]|cpu=4,mem=600M,node=2|cpu=00:00:00,mem=399216K
3_2|8|arr|OUT_OF_MEMORY|0:125|0:0|120M|||||1|1|00:00:01|01:00:00|n2|billing=1,cpu=1,mem=120M,node=1|
3_2.batch|8.batch|batch|OUT_OF_MEMORY|0:125|||0|n2|0|1|1|1|00:00:01||n2|cpu=1,mem=120M,node=1|mem=0
11|11|cancelled|CANCELLED by 0|0:0|0:0|60M|||||1|1|00:00:00|01:00:00|n2|mem=60M|
11.batch|11.batch|batch|CANCELLED|0:15|||108K|n2|108K|1|1|1|00:00:01||n2|mem=60M|mem=108K
"""
WIDE = """\
JobID           JobName      State ExitCode     ReqMem     MaxRSS     AveRSS   NTasks    Elapsed 
------------ ---------- ---------- -------- ---------- ---------- ---------- -------- ---------- 
2                 ranks     FAILED      1:0       600M                                  00:00:12 
2.batch           batch     FAILED      1:0                 3744K      3744K        1   00:00:12 
2.0             python3  COMPLETED      0:0               146220K     73108K        4   00:00:07 
2.1             python3 OUT_OF_ME+    0:125               258908K     99804K        4   00:00:05 
11           cancelled+ CANCELLED+      0:0        60M                                  00:00:00 
12.bat+           batch OUT_OF_ME+    0:125                     0          0        1   00:00:01 
"""  # noqa: W291
REQUEUED = """\
JobID|State|ExitCode|ReqMem|NNodes
9|REQUEUED|0:0|60M|1
9.batch|CANCELLED|0:15||1
10|TIMEOUT|0:0|60M|1
10.batch|CANCELLED|0:15||1
9|COMPLETED|0:0|60M|1
9.batch|COMPLETED|0:0||1
"""


def cause(accounting):
    """What a diagnosis by the accounting alone says."""
    found = look("hello\n", sacct=accounting)
    return found.kind, found.cause


def by_id(rows):
    return {row.id: row for row in rows}


@pytest.mark.proves("S3-03")
def test_a_parsable_listing_is_read_with_the_scope_of_each_number():
    rows = by_id(parse_sacct(PARSABLE))
    step = rows["2.1"]
    assert (step.state, step.exit_code, step.signal) == ("OUT_OF_MEMORY", 0, 125)
    assert (step.max_rss_bytes, step.ave_rss_bytes) == (258908 << 10, 99804 << 10)
    assert (step.num_tasks, step.num_nodes) == (4, 2)
    assert (rows["2"].request, rows["2"].allocated_bytes) == (Amount(600 * MIB, "job"), 600 * MIB)
    assert (rows["2"].derived_signal, rows["2"].limit_seconds) == (125, 3600)
    assert step.number == 5


def test_a_wide_table_with_cut_columns_says_the_same():
    wide, parsable = by_id(parse_sacct(WIDE)), by_id(parse_sacct(PARSABLE))
    for name in ("2", "2.batch", "2.0", "2.1"):
        for field in ("state", "exit_code", "signal", "request", "max_rss_bytes", "ave_rss_bytes"):
            assert getattr(wide[name], field) == getattr(parsable[name], field), (name, field)
    assert wide["11"].state == "CANCELLED"
    assert (wide["12.batch"].state, wide["12.batch"].max_rss_bytes) == ("OUT_OF_MEMORY", 0)


@pytest.mark.parametrize("delimiter", ["|", ",", ";", "\t"])
def test_any_delimiter_and_one_at_the_end_are_read(delimiter):
    text = (
        delimiter.join(["JobID", "State", "ReqMem", "MaxRSS", ""])
        + "\n"
        + delimiter.join(["7.0", "OUT_OF_MEMORY", "", "2.5G", ""])
    )
    assert parse_sacct(text)[0].max_rss_bytes == int(2.5 * GIB)


def test_a_requeued_job_has_attempts_and_its_last_one_speaks():
    rows = parse_sacct(REQUEUED)
    assert [(row.state, row.attempt) for row in rows if row.id == "9"] == [("", 1), ("COMPLETED", 2)]
    assert cause("\n".join(line for line in REQUEUED.splitlines() if not line.startswith("10"))) == (
        "none",
        "completed",
    )


def test_a_task_of_an_array_keeps_the_number_that_the_daemons_use():
    row = by_id(parse_sacct(PARSABLE))["3_2"]
    assert (row.job, row.raw_job) == ("3_2", "8")  # slurmstepd says StepId=8.batch


@pytest.mark.parametrize("job", ["2", "3_2"])
def test_a_step_out_of_memory_is_told_though_its_job_says_failed(job):
    header, *rows = PARSABLE.splitlines()
    own = [row for row in rows if row.startswith((f"{job}|", f"{job}."))]
    assert cause("\n".join([header, *own])) == ("host_cgroup", "out_of_memory")
    by_derived_code = [row for row in own if row.startswith(f"{job}|")]
    assert cause("\n".join([header, *by_derived_code])) == ("host_cgroup", "out_of_memory")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("6|FAILED|3:0|1:0\n6.0|FAILED|1:0|", "unknown"),
        ("6.0|FAILED|0:9|", "killed"),
        ("11|CANCELLED by 0|0:0|0:0\n11.batch|CANCELLED|0:15|", "cancelled"),
        ("11.batch|CANCELLED|0:15|", "unknown"),
        ("10|TIMEOUT|0:0|0:0\n10.batch|CANCELLED|0:15|", "walltime"),
    ],
)
def test_a_job_without_the_signal_of_memory_has_another_cause(rows, expected):
    assert cause(f"JobID|State|ExitCode|DerivedExitCode\n{rows}\n") == ("none", expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("256Gn", (256 * GIB, "node")),
        ("4000Mc", (4000 * MIB, "cpu")),
        ("1T", (1024 * GIB, "job")),
        ("0n", (0, "node")),
        ("16?", (16 * MIB, "job")),
    ],
)
def test_a_request_says_of_what_it_is(text, expected):
    request = parse_sacct(f"JobID|ReqMem\n7|{text}")[0].request
    assert (request.bytes, request.per) == expected


def test_rows_amid_a_log_are_found_and_its_other_lines_are_none():
    log = [
        "Epoch 3 | loss 2.0 | FAILED to improve",
        "7 | PENDING thoughts"[:3],
        *PARSABLE.splitlines(),
        "done | COMPLETED | yes",
    ]
    rows = parse_sacct(log)
    assert len(rows) == 8


def test_nothing_is_read_from_what_is_none():
    assert parse_sacct("") == parse_sacct('{"jobs": [') == parse_sacct("[1, 2]") == []


@pytest.mark.parametrize("text", [PARSABLE, WIDE, REQUEUED])
def test_torn_text_is_never_a_fault(text):
    chance = random.Random(1)
    for _ in range(60):
        torn = list(text)
        for _ in range(40):
            torn[chance.randrange(len(torn))] = chance.choice("0123456789|:,.+-[]=\n KMGnc")
        lines = "".join(torn).split("\n")
        rows = parse_sacct("".join(torn))
        look("hello\n", sacct="\n".join(lines))
        assert len(rows) <= len(lines)


RANKS = """\
JobID|State|ExitCode|ReqMem|MaxRSS|AveRSS|NTasks|NNodes
273202|OUT_OF_MEMORY|0:125|{}||||4
273202.batch|OUT_OF_MEMORY|0:125||3G|3G|1|1
273202.extern|COMPLETED|0:0||0|0|4|4
273202.0|OUT_OF_MEMORY|0:125||72.50G|71.40G|16|4
"""
FEW = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n"


def of_node(gib):
    return Amount(int(gib * GIB), "node")


@pytest.mark.proves("C-11", "S3-22", "S3-39")
@pytest.mark.parametrize(
    ("accounting", "asked", "tasks", "said"),
    [
        # sixteen ranks that were over their nodes' limit long before the validation
        *((RANKS.format(text), of_node(256), 4, "4 tasks x 71.40 GiB = 285.60 GiB on average, over the 256.00 GiB of a node")
          for text in ("256Gn", "1024G", "1T")),
        # one task is never held against the node
        (RANKS.format("2T"), of_node(512), 4, "4 tasks x 72.50 GiB = 290.00 GiB at most, below the 512.00 GiB of a node"),
        ("JobID|State|ReqMem|AveRSS|MaxRSS|NTasks|NNodes|AllocCPUS\n7|OUT_OF_MEMORY|2Gc|||||\n"
         "7.0|OUT_OF_MEMORY||9G|10G|2|2|16\n", of_node(16), 1, "below the 16.00 GiB of a node (requested of a CPU x 8 CPUs)"),
        # uneven tasks count on the fullest node
        (FEW + "7|FAILED|30Gn||||3\n7.0|OUT_OF_MEMORY||9G|9G|10|3\n", of_node(30), 4, "4 tasks x 9.00 GiB"),
        # real: two tasks of a node took 156 MiB each when the kernel killed one; the mean counts tasks without a sample
        (FEW + "2|FAILED|600M||||2\n2.1|OUT_OF_MEMORY||258908K|99804K|4|2\n", Amount(300 * MIB, "node"), 2,
         "when all are as large as the largest"),
        # killed before its first sample
        (FEW + "1|OUT_OF_MEMORY|200M||||1\n1.batch|OUT_OF_MEMORY||0|0|1|1\n", Amount(200 * MIB, "node"), 1, None),
        # without the number of nodes a node's tasks are not known, and a job's total is held against all
        (FEW + "7|OUT_OF_MEMORY|256Gn||||\n7.0|OUT_OF_MEMORY||72G|71G|16|\n", of_node(256), None,
         "how many tasks share them is not known"),
        (FEW + "7|OUT_OF_MEMORY|256G||||\n7.0|OUT_OF_MEMORY||72G|71G|16|\n", None, None,
         "16 tasks x 71.00 GiB = 1.11 TiB on average, over the 256.00 GiB of the job"),
        # a total that is less than one task held may have been meant as a node's: it is no limit
        (RANKS.format("256G"), None, 4, "64.00 GiB of each node as the job's total, and one task held 72.50 GiB"),
        (RANKS.format("512G"), of_node(128), 4, "over the 128.00 GiB of a node"),
        # the killed step comes first, and the last attempt counts
        (FEW + "7|REQUEUED|1Gn||||1\n7.0|OUT_OF_MEMORY||9G|9G|1|1\n7|FAILED|1Gn||||1\n7.0|COMPLETED||3G|3G|1|1\n"
         "7.1|OUT_OF_MEMORY||2G|2G|1|1\n", of_node(1), 1, "1 task x 2.00 GiB"),
    ],
)  # fmt: skip
def test_memory_is_added_up_over_the_tasks_that_share_a_limit(accounting, asked, tasks, said):
    job = read_ran([], accounting).job
    assert (job.node_request, job.tasks_per_node) == (asked, tasks)
    sums = [one for one in look("Killed\n", sacct=accounting).arithmetic if " x " in one or "as the job's" in one]
    assert (said in " ".join(sums)) if said else not sums

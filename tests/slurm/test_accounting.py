"""What sacct, scontrol and sinfo print, in every form; most texts are of a real Slurm 22.05 that killed jobs."""

import random

import pytest

from memfit.slurm import parse_node_limits, parse_request, parse_sacct, parse_shapes
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


def test_a_parsable_listing_is_read_with_the_scope_of_each_number():
    rows = by_id(parse_sacct(PARSABLE))
    step = rows["2.1"]
    assert (step.state, step.exit_code, step.signal) == ("OUT_OF_MEMORY", 0, 125)
    assert (step.max_rss_bytes, step.ave_rss_bytes, step.total_rss_bytes) == (258908 << 10, 99804 << 10, 399216 << 10)
    assert (step.num_tasks, step.num_nodes, step.nodes) == (4, 2, "n[1-2]")
    assert (rows["2"].request.bytes, rows["2"].request.per, rows["2"].allocated_bytes) == (
        600 * MIB,
        "job",
        600 * MIB,
    )
    assert (rows["2"].derived_signal, rows["2"].limit_seconds, rows["2"].seconds) == (125, 3600, 12)
    assert step.number == 5


def test_a_wide_table_with_cut_columns_says_the_same():
    wide, parsable = by_id(parse_sacct(WIDE)), by_id(parse_sacct(PARSABLE))
    for name in ("2", "2.batch", "2.0", "2.1"):
        for field in ("state", "exit_code", "signal", "request", "max_rss_bytes", "ave_rss_bytes", "seconds"):
            assert getattr(wide[name], field) == getattr(parsable[name], field), (name, field)
    assert wide["11"].state == "CANCELLED"
    assert (wide["12.batch"].state, wide["12.batch"].max_rss_bytes) == ("OUT_OF_MEMORY", 0)


def test_a_table_whose_columns_were_pasted_askew_keeps_what_is_whole():
    askew = "\n".join(line.strip() for line in WIDE.splitlines()).replace("2.1             python3", "2.1 python3")
    rows = by_id(parse_sacct(askew))
    assert rows["2.1"].state == "OUT_OF_MEMORY"
    assert rows["2.1"].signal == 125


@pytest.mark.parametrize("delimiter", ["|", ",", ";", "\t"])
def test_any_delimiter_and_one_at_the_end_are_read(delimiter):
    text = (
        delimiter.join(["JobID", "State", "ReqMem", "MaxRSS", ""])
        + "\n"
        + delimiter.join(["7.0", "OUT_OF_MEMORY", "", "2.5G", ""])
    )
    assert parse_sacct(text)[0].max_rss_bytes == int(2.5 * GIB)


def test_without_a_header_states_and_codes_are_still_read():
    text = "2.1|OUT_OF_MEMORY||258908K\n4|COMPLETED|100M|\n3_3.bat+      batch               root          1 OUT_OF_ME+    0:125 \n"
    rows = by_id(parse_sacct(text))
    assert rows["2.1"].state == "OUT_OF_MEMORY"
    assert rows["4"].state == "COMPLETED"
    assert rows["3_3.batch"].signal == 125


def test_a_requeued_job_has_attempts_and_its_last_one_speaks():
    rows = parse_sacct(REQUEUED)
    assert [(row.id, row.state, row.attempt) for row in rows if row.job == "9" and not row.step] == [
        ("9", "REQUEUED", 1),
        ("9", "COMPLETED", 2),
    ]
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
    request = parse_request(text)
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


SHOWN = """\
JobId=2 JobName=two words
   JobState=OUT_OF_MEMORY Reason=OutOfMemory Dependency=(null)
   Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:125
   RunTime=00:00:12 TimeLimit=1-00:00:00 TimeMin=N/A
   Partition=lab AllocNode:Sid=localhost:27174
   NodeList=n[1-2]
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,mem=600M,node=2,billing=4
   Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=*
   MinCPUsNode=2 MinMemoryNode=300M MinTmpDiskNode=0
   StdErr=/home/user/out.err
"""


def test_scontrol_shows_a_jobs_shape():
    shape = parse_shapes(SHOWN.split("\n"))[0]
    assert (shape.state, shape.num_nodes, shape.num_tasks, shape.tasks_per_node) == ("OUT_OF_MEMORY", 2, 4, 2)
    assert (shape.request.bytes, shape.request.per, shape.limit_seconds) == (300 * MIB, "node", 86400)
    assert (shape.job, shape.partition, shape.allocated_bytes) == ("2", "lab", 600 * MIB)


def test_limits_of_nodes_and_partitions_are_read_from_all_three_tools():
    text = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   RealMemory=525312 AllocMem=360 FreeMem=14314 Sockets=4 Boards=1
   State=IDLE

PartitionName=gpu
   MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0
   State=UP TotalCPUs=8448 TotalNodes=66 SelectTypeParameters=NONE
   DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED

PARTITION TIMELIMIT NODES MEMORY STATE
gpu*      2-00:00:00   66 525312+ mixed
"""
    found = [(limit.name, limit.bytes) for limit in parse_node_limits(text.split("\n"))]
    assert found == [("n1", 513 * GIB), ("gpu", 513 * GIB)]  # an unlimited partition limits nothing
    least = text.replace("MaxMemPerNode=UNLIMITED", "MaxMemPerNode=1024")
    assert ("gpu", GIB) in [(limit.name, limit.bytes) for limit in parse_node_limits(least.split("\n"))]


def test_nothing_is_read_from_what_is_none():
    assert parse_sacct("") == parse_sacct('{"jobs": [') == parse_sacct("[1, 2]") == []
    assert parse_shapes([]) == parse_node_limits([]) == []


@pytest.mark.parametrize("text", [PARSABLE, WIDE, REQUEUED, SHOWN])
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
        parse_shapes(lines), parse_node_limits(lines)

"""What programs print when they die, as a table: the lines, and what is said of them.

The lines of ``signatures.jsonl`` are written in the formats of the programs that print them. A figure is in GiB.
"""

import io
import json
import re
from pathlib import Path

import pytest

from memfit.diagnosis import SIGNATURES, diagnose, find_signs, read_streams
from reading import look

CASES = [json.loads(line) for line in (Path(__file__).parent / "signatures.jsonl").read_text().splitlines()]
GIB = 1 << 30


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_lines_are_told_for_what_they_are(case):
    found = look(case["text"]).to_dict()
    wanted = {name: pytest.approx(size) if isinstance(size, float) else size for name, size in case["want"].items()}
    assert {name: found[name] for name in wanted} == wanted
    assert found["oom"] == (found["kind"] != "none")


[HARMLESS] = read_streams("log", io.BytesIO(b"a line of a program at work\n" * 200))


@pytest.mark.core
def test_each_line_is_found_among_harmless_ones():
    missed = []
    for case in CASES:
        for stream in read_streams("log", io.BytesIO(case["text"].encode())):
            among = type(stream)([*HARMLESS.lines, *stream.lines, *HARMLESS.lines])
            alone, found = ([(one.name, one.values, one.kind) for one in find_signs(each)] for each in (stream, among))
            missed += [case["name"]] if alone != found else []
    assert missed == []


@pytest.mark.slow
def test_a_verdict_does_not_depend_on_the_length_of_the_log():
    harmless = "a line of a program at work\n" * 600
    of_each_kind = {(case["want"].get("kind"), case["want"].get("cause")): case for case in CASES}
    for case in of_each_kind.values():  # that each line is found is proved above
        alone, among = look(case["text"]), look(f"{harmless}{case['text']}\n{harmless}")
        same = among.cause == alone.cause or case["name"].startswith("mention")
        assert among.kind == alone.kind and same, case["name"]


@pytest.mark.slow
def test_of_a_log_of_many_pieces_each_kind_of_line_is_found_at_the_head_the_middle_and_the_end():
    said = "\n".join(case["text"] for case in CASES).encode()
    block = "".join(f"epoch {at % 90} loss 0.{at * 7919 % 99991:05} all is well\n" for at in range(100_000)).encode()
    block *= (9 << 20) // len(block)  # a piece has 4 MiB
    small, large = (
        [sign for stream in read_streams("log", io.BytesIO(text)) for sign in find_signs(stream)]
        for text in (said, b"\n".join([said, block, said, block, said]))
    )
    small, large = ([one for one in signs if not one.meaning.last_resort] for signs in (small, large))
    last, length = said.count(b"\n") + 1, said.count(b"\n") + block.count(b"\n") + 2
    for begin in (0, length, 2 * length):
        assert {one.name for one in small} == {one.name for one in large if begin < one.number <= begin + last}


def alternatives(pattern):
    """Return the parts of a regular expression between the bars that are in no group."""
    parts, depth = [""], 0
    for token in re.findall(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", pattern):
        depth += (token == "(") - (token == ")")
        parts = [*parts, ""] if token == "|" and not depth else [*parts[:-1], parts[-1] + token]
    return parts


def test_each_message_that_the_table_knows_has_a_line():
    streams = [stream for case in CASES for stream in read_streams("-", io.BytesIO(case["text"].encode()))]
    lines = [stream.lines[place].text for stream in streams for place in range(len(stream.lines))]
    texts = [stream.squeezed for stream in streams]
    patterns = [
        (row, re.compile(part, row.regex.flags)) for row in SIGNATURES for part in alternatives(row.regex.pattern)
    ]
    assert [
        f"{row.name}: {regex.pattern}"
        for row, regex in patterns
        if not any(map(regex.search, lines if row.by_line else texts))
    ] == []


def torch_says(*, tried, allocated, reserved, total, free):
    return look(
        f"RuntimeError: CUDA out of memory. Tried to allocate {tried} GiB (GPU 0; {total} GiB total capacity; "
        f"{allocated} GiB already allocated; {free} GiB free; {reserved} GiB reserved in total by PyTorch)"
    )


def test_cache_that_would_have_been_enough_is_fragmentation_worth_a_remedy_only_when_it_is_a_share_of_the_card():
    broken = torch_says(tried=1, allocated=15, reserved=21, total=24, free=0.2)
    full = torch_says(tried=0.1, allocated=23, reserved=23.5, total=24, free=0.1)
    assert (broken.kind, full.kind) == ("gpu_fragmentation", "gpu_fragmentation")
    assert "a noticeable share" in broken.arithmetic[1]
    assert "too little of the card to matter" in full.arithmetic[1]
    assert (broken.happened, full.happened) == (
        "out of the GPU's memory, although its cache had room (fragmentation)",
        "out of the GPU's memory",
    )


@pytest.mark.parametrize(
    ("figures", "is_told"),
    [
        ({"tried": 1, "allocated": 6.3, "reserved": 6.4, "total": 10.8, "free": 0.1}, True),
        ({"tried": 1, "allocated": 9.8, "reserved": 10.3, "total": 10.8, "free": 0.1}, False),
        ({"tried": 1, "allocated": 17, "reserved": 19, "total": 8, "free": 0}, False),
        ({"tried": 1, "allocated": 7, "reserved": 7.5, "total": 8, "free": 17179869183.0}, False),
    ],
)
def test_memory_of_others_is_the_card_less_what_is_free_and_what_this_process_holds(figures, is_told):
    assert any("Memory of others" in text for text in torch_says(**figures).arithmetic) == is_told


def test_the_first_of_equals_is_the_cause_and_what_others_ran_into_is_a_consequence():
    refused = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes"
    waited = "Watchdog caught collective operation timeout: WorkNCCL ran for 600 milliseconds before timing out"
    found = look("\n".join([waited, refused.format(2 * GIB), refused.format(3 * GIB)]))
    assert (found.cause, found.figures["tried"]) == ("out_of_memory", 2 * GIB)


KILL = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg={group},task_memcg={group},task=python,pid={pid}\n"
    "Memory cgroup out of memory: Killed process {pid} (python) total-vm:8kB, anon-rss:4kB, file-rss:0kB\n"
)


@pytest.mark.parametrize(
    ("group", "pid", "cause"),
    [
        ("/job", 4260, "out_of_memory"),
        ("/job", 777, "killed"),
        ("/docker/" + "ab" * 32, 777, "out_of_memory"),
        ("/lxc/train", 777, "out_of_memory"),
    ],
)
def test_a_kernels_kill_of_another_process_is_not_the_jobs_but_in_a_container_numbers_differ(
    tmp_path, group, pid, cause
):
    (tmp_path / "log").write_text("epoch 1 step 3 loss 0.1\ntrain.sh: line 2:  4260 Killed   python train.py\n")
    (tmp_path / "kernel").write_text(KILL.format(group=group, pid=pid))
    found = diagnose(tmp_path / "log", kernel_log=tmp_path / "kernel")
    assert (found.cause, found.phase) == (cause, "train")


def test_where_the_kernels_log_decides_phase_and_rank_are_those_of_the_jobs_own_log(tmp_path):
    steps = "".join(f"epoch 1 step {step} loss 0.1\n" for step in range(50))
    (tmp_path / "log").write_text(
        f"{steps}torch/distributed/elastic/api.py failed (exitcode: -9) local_rank: 1 (pid: 777) of binary: python\n"
    )
    (tmp_path / "kernel").write_text(KILL.format(group="/job", pid=777))
    found = diagnose(tmp_path / "log", kernel_log=tmp_path / "kernel")
    assert (found.cause, found.phase, found.where["rank"], found.where["pid"]) == ("out_of_memory", "train", 1, 777)


def test_the_jobs_own_line_is_cited_beside_the_accountings_row(tmp_path):
    (tmp_path / "log").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some tasks\n")
    (tmp_path / "sacct").write_text("JobID|State|ExitCode\n9|OUT_OF_MEMORY|0:125\n")
    files = {one.file for one in diagnose(tmp_path / "log", sacct=tmp_path / "sacct").evidence}
    assert files == {str(tmp_path / "log"), str(tmp_path / "sacct")}

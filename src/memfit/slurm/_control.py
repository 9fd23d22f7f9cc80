"""Submits batch scripts and asks what became of them: ``sbatch``, ``squeue``, ``sacct``, ``scancel``, ``sinfo``.

Each call raises NoAnswerError if the controller or its database does not answer now, and UsageError if Slurm refuses.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from memfit.amounts import Amount
from memfit.errors import UsageError

#: A call that takes longer counts as no answer; Slurm's own tools give up after 9 to 18 s. A user waits longer.
_MOST_SECONDS, _PATIENCE_SECONDS = 10.0, 30.0
#: The columns that are asked of Slurm's accounting.
_COLUMNS = (
    "JobID,JobIDRaw,JobName,Partition,State,ExitCode,DerivedExitCode,ReqMem,MaxRSS,MaxRSSNode,AveRSS,NTasks,NNodes,"
    "NCPUS,AllocTRES,Elapsed,Timelimit,Start,End,NodeList"
)
#: What the tools print when the controller or its database cannot be asked now.
_NO_ANSWER = ("unable to contact", "connection refused", "socket timed out", "communication", "slurmdbd", "timed out")


class NoAnswerError(Exception):
    """The controller or its database does not answer now; ask again later."""


class Element(NamedTuple):
    state: str  # such as ``PENDING``, ``RUNNING``, ``OUT_OF_MEMORY``
    reason: str = ""  # why it waits, such as ``Resources``; empty for others
    nodes: str = ""  # where it runs


class LargestNode(NamedTuple):
    partition: str
    memory: Amount
    num_gpus: int


def submit_script(path: Path) -> str:
    """Submit a batch script; return the number of its job. Without an answer, look for its name: it may be there."""
    return _call("sbatch", "--parsable", str(path)).strip().partition(";")[0]


def read_queue(names: Iterable[str]) -> dict[str, Element]:
    """Return the elements of these jobs, by number such as ``1234_5``; ended ones too, as long as Slurm shows them."""
    words = ("squeue", "-h", "-r", "-t", "all", f"--name={','.join(names)}", "-o", "%i|%T|%r|%N")
    return parse_queue(_call(*words).splitlines())


def parse_queue(lines: Sequence[str]) -> dict[str, Element]:
    """Return what ``squeue -o "%i|%T|%r|%N"`` printed.

    >>> parse_queue(["41_0|PENDING|Resources|", "41_1|RUNNING|None|n1"])["41_0"]
    Element(state='PENDING', reason='Resources', nodes='')
    """
    found = {}
    for line in lines:
        number, state, reason, nodes = (*line.strip().split("|"), "", "", "")[:4]
        if state:
            found[number] = Element(state, reason if state == "PENDING" else "", nodes)
    return found


def find_job(name: str) -> str:
    return next((number.partition("_")[0] for number in read_queue([name])), "")


def read_ends(numbers: Iterable[str]) -> dict[str, str]:
    """Return the states of the elements of these arrays by the accounting, each by its last attempt."""
    arrays = ",".join(sorted({number.partition("_")[0] for number in numbers}))  # thousands of elements are too long
    lines = _call("sacct", "-n", "-P", "-X", "-D", "-j", arrays, "-o", "JobID,State").splitlines()
    return {number: state.split()[0] for number, _, state in (line.partition("|") for line in lines) if state}


def cancel_elements(numbers: Iterable[str]) -> None:
    """End elements: pending ones never start, others get SIGTERM and, later, SIGKILL."""
    _call("scancel", *numbers)


def release_element(number: str) -> None:
    """Let an element wait for its turn that Slurm holds, as after a controller's crash."""
    _call("scontrol", "release", number)


def read_largest_node(partition: str = "") -> LargestNode:
    where = ("-p", partition) if partition else ()
    return parse_nodes(_call("sinfo", "-h", *where, "-o", "%P|%m|%G").splitlines(), partition)


def parse_nodes(lines: Sequence[str], partition: str = "") -> LargestNode:
    """Return the most that a node has, by what ``sinfo -o "%P|%m|%G"`` printed: MiB there, and generic resources.

    >>> parse_nodes(["main*|2048|(null)", "main*|4096+|gpu:a100:2(S:0-1),gpu:t4:1,nic:4", "big|9000|gpu:8"])
    LargestNode(partition='main', memory=Amount(bytes=4294967296, per='node', place='host'), num_gpus=3)
    """
    rows = [line.strip().split("|") for line in lines if line.count("|") == 2]
    wanted = [(name.rstrip("*"), size, gres) for name, size, gres in rows if partition or name.endswith("*")]
    if not wanted:
        raise UsageError(
            f"Slurm has no partition {partition}." if partition else "Slurm has no default partition.",
            rule="the largest node of the partition is the most that one job can ask for.",
            remedy="name one that sinfo shows: --set slurm.partition=NAME",
        )
    gpus = [sum(map(int, re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))) for _, _, gres in wanted]
    largest = Amount(max(int(size.rstrip("+")) for _, size, _ in wanted) << 20, "node")
    return LargestNode(wanted[0][0], largest, max(gpus))


def format_time(seconds: int) -> str:
    """Return seconds as ``sbatch --time`` takes them.

    >>> format_time(135_000)
    '1-13:30:00'
    """
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def read_accounting(given: str) -> str:
    """Return what sacct printed: from a file, or asked of Slurm for a job's number."""
    path = Path(given)
    if path.is_file():
        return path.read_text(encoding="utf-8-sig", errors="replace")
    rule = "--sacct takes a file that sacct wrote, or a job's number where sacct is installed."
    by_hand = f"where Slurm is: sacct -j JOBID -P --format={_COLUMNS} > sacct.txt; then --sacct sacct.txt"
    if not re.fullmatch(r"\d+(?:_\d+)?", given):
        raise UsageError(f"--sacct {given} is neither a file nor a job's number.", rule=rule, remedy=by_hand)
    asked = ("-j", given, "-P", "--duplicates", f"--format={_COLUMNS}")
    try:
        text = _call("sacct", *asked, seconds=_PATIENCE_SECONDS)
    except (NoAnswerError, UsageError) as error:
        why = error.what if isinstance(error, UsageError) else f"{error}."
        raise UsageError(f"job {given} cannot be asked for: {why}", rule=rule, remedy=by_hand) from error
    if len(text.splitlines()) < 2:
        raise UsageError(f"sacct knows no job {given}.", rule=rule, remedy=by_hand)
    return text


def _call(*words: str, seconds: float = _MOST_SECONDS) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"{words[0]} is not installed here.",
            rule="--backend slurm submits jobs with Slurm's own tools.",
            remedy="start it on a login node of the cluster, or leave --backend out",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{words[0]} gave no answer in {seconds:g} s") from error
    if done.returncode == 0:
        return done.stdout
    said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1][:200]
    if any(text in done.stderr.lower() for text in _NO_ANSWER):
        raise NoAnswerError(said)
    raise UsageError(
        f"{words[0]} says: {said}.",
        rule="Slurm decides which requests it takes.",
        remedy="change the settings below slurm:, such as partition, account or time",
    )

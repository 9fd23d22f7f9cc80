"""Asks Slurm about a job, where its tools are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from memfit.errors import UsageError

#: The columns that are asked of Slurm's accounting.
_COLUMNS = (
    "JobID,JobIDRaw,JobName,Partition,State,ExitCode,DerivedExitCode,ReqMem,MaxRSS,MaxRSSNode,AveRSS,NTasks,NNodes,"
    "NCPUS,AllocTRES,Elapsed,Timelimit,Start,End,NodeList"
)


def read_accounting(given: str) -> str:
    """Return what sacct printed: from a file, or asked of Slurm for a job's number.

    Raises:
        UsageError: The file cannot be read, or there is no sacct, or it refuses.
    """
    path = Path(given)
    if path.is_file():
        return path.read_text(encoding="utf-8-sig", errors="replace")
    rule = "--sacct takes a file that sacct wrote, or a job's number where sacct is installed."
    by_hand = f"where Slurm is: sacct -j JOBID -P --format={_COLUMNS} > sacct.txt; then --sacct sacct.txt"
    if not re.fullmatch(r"\d+(?:_\d+)?", given):
        raise UsageError(f"--sacct {given} is neither a file nor a job's number.", rule=rule, remedy=by_hand)
    if shutil.which("sacct") is None:
        raise UsageError(f"job {given} cannot be asked for: sacct is not installed here.", rule=rule, remedy=by_hand)
    try:
        done = _ask("sacct", "-j", given, "-P", "--duplicates", f"--format={_COLUMNS}")
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"sacct gave no answer about job {given} in 30 s.", rule=rule, remedy=by_hand) from error
    if done.returncode or len(done.stdout.splitlines()) < 2:
        said = (done.stderr.strip() or "it knows no such job").splitlines()[0][:200]
        raise UsageError(f"sacct says of job {given}: {said}.", rule=rule, remedy=by_hand)
    text = done.stdout
    # The job's shape, and what the partitions' nodes have, as long as Slurm knows.
    for words in (["scontrol", "show", "job", given], ["sinfo", "-o", "%P %m %l"]):
        with suppress(OSError, subprocess.TimeoutExpired):
            done = _ask(*words)
            text += f"\n{done.stdout}" if done.returncode == 0 else ""
    return text


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=30, check=False)

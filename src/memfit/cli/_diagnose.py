"""``memfit diagnose``: what killed a job, the line that proves it, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli._settings import Text, flag, with_flags
from memfit.cli._terminal import AsJson, answer, console, heartbeat
from memfit.errors import UsageError
from memfit.files import check_owner, write_atomic
from memfit.rundir import RunDir
from memfit.slurm import read_accounting

UNKNOWN_EXIT_CODE = 5
_LOGS = (".out", ".err", ".log", ".txt", ".gz")

_READS = "it reads run directories, logs, folders of logs, and - for standard input."


@dataclass(frozen=True)
class Flags:
    """The flags of this verb."""

    sacct: Text = flag("The job's number, or a file that sacct printed.", "FILE|JOBID", "", "--sacct", "--job")
    script: Path | None = flag("The job's batch script.", "FILE", exists=True)
    kernel_log: Path | None = flag("A file with the output of dmesg or journalctl -k.", "FILE", exists=True)
    fix: bool = flag("Write a corrected copy of --script beside it.")
    report: Path | None = flag("Write an incident report in Markdown.", "FILE")
    verify: Path | None = flag("Check whether this run used the fixed script.", "RUN", exists=True)
    against: Path | None = flag("The fixed script.", "FIXED", exists=True)
    verbose: bool = flag("Also print timeline, arithmetic and every remedy.")
    as_json: AsJson = False


@with_flags
def diagnose(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Logs, folders of logs, run directories, names of experiments, or - for standard input.",
            metavar="PATH...",
        ),
    ] = None,
    *,
    flags: Flags,
) -> None:
    """Say what killed a job, which line proves it, and what to do.

    \b
    memfit diagnose runs/demo
    memfit diagnose --job 123
    memfit diagnose slurm-123.err --job 123 --script train.slurm --fix

    --fix writes NAME.fixed.EXT with a reason for each changed line. After the next run, --verify RUN --against
    NAME.fixed.EXT says whether its settings were in force.

    Exit codes: 0 diagnosed, or all settings were in force, 2 bad input, 4 a setting was not in force, 5 not known.
    """
    if (flags.verify is None) != (flags.against is None):
        raise UsageError(
            "--verify and --against go together.",
            rule="a run is held against the fixed script that it should have used.",
            remedy="memfit diagnose --verify RUN --against train.fixed.slurm",
        )
    named, verify = [_find(path) for path in paths or ()], flags.verify and _find(flags.verify)
    accounting = read_accounting(flags.sacct) if flags.sacct is not None else ""
    if verify is not None and flags.against is not None:
        _verify(verify, flags.against, named, accounting, as_json=flags.as_json)
    if flags.fix and flags.script is None:
        raise UsageError(
            "--fix has no file to correct.",
            rule="it writes a corrected copy of a batch script.",
            remedy="add --script train.slurm",
        )
    if not named and not accounting and flags.kernel_log is None:
        raise UsageError("nothing to diagnose.", rule=_READS, remedy="memfit diagnose slurm-123.err")
    _diagnose(named, accounting, flags)


def _find(path: Path) -> Path:
    """Return the log or run that a word means: a path, an experiment, whose newest run it is, a run or a job."""
    if not path.is_dir() or not any(one.suffix in _LOGS for one in path.iterdir()):
        if runs := RunDir.all(path.parent, path.name):
            console(stderr=True).say(f"{path}: the newest run of {len(runs)}, {runs[0].path.name}")
            return runs[0].path
        for other in path.glob("run_*/run.json"):
            check_owner(other.parent)
    if str(path) == "-" or path.exists():
        return path
    from memfit.reports import find_target

    remedy = f"memfit diagnose --job {path} asks sacct" if str(path).isdigit() else "check its name"
    try:
        found = find_target(str(path))
    except UsageError:
        raise UsageError(f"path '{path}' does not exist.", rule=_READS, remedy=remedy) from None
    return found.run.path / "jobs" / found.job_id if found.job_id else found.run.path


def _diagnose(named: list[Path], accounting: str, flags: Flags) -> None:
    from memfit.diagnosis import diagnose as diagnose_paths
    from memfit.diagnosis import job_of, list_remedies, make_fix, read_ran
    from memfit.reports import view_diagnosis, view_fix, write_incident

    script, report = flags.script, flags.report
    with heartbeat("reading the logs"):
        found = diagnose_paths(named, accounting=accounting, kernel_log=flags.kernel_log)
    job = job_of(read_ran(named, accounting), script)
    remedies = list_remedies(found, job)
    fixed = make_fix(script, found, job) if flags.fix and script is not None else None
    if fixed is not None and fixed.edits:
        fixed = fixed.write()
    if report is not None:
        try:
            write_atomic(report, write_incident(found, remedies, fixed))
        except OSError as error:  # it names the file that is written aside
            raise UsageError(
                f"--report {report} cannot be written: {error.strerror or error}.",
                rule="--report names a file in a folder that exists and may be written to.",
                remedy="--report incident.md",
            ) from None
    found = replace(found, remedies=tuple(one.to_dict() for one in remedies))
    parts = [*view_diagnosis(found, remedies, verbose=flags.verbose), *(view_fix(fixed) if fixed is not None else ())]
    parts += [] if report is None else [f"\nwrote {report}"]
    answer(found.to_dict() | ({} if fixed is None else {"fix": fixed.to_dict()}), flags.as_json, parts)
    raise typer.Exit(UNKNOWN_EXIT_CODE if found.cause == "unknown" else 0)


def _verify(verify: Path, against: Path, named: list[Path], accounting: str, *, as_json: bool) -> None:
    from memfit.diagnosis import is_any_shown, read_ran, verify_fix
    from memfit.reports import view_verification

    before = read_ran(named, "") if named else None
    checks = verify_fix(read_ran([verify], accounting), against, before=before)
    answer([check.to_dict() for check in checks], as_json, view_verification(checks))
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(4)
    raise typer.Exit(0 if is_any_shown(checks) else UNKNOWN_EXIT_CODE)

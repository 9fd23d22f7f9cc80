"""``memfit diagnose``: what killed a job, the lines that prove it, what to do, and the corrected script."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli._terminal import console
from memfit.errors import UsageError
from memfit.rundir import write_atomic

if TYPE_CHECKING:
    from memfit.diagnosis import Diagnosis, Fix, Ran

UNKNOWN_EXIT_CODE = 5
#: The columns that are asked of Slurm's accounting.
_COLUMNS = (
    "JobID,JobIDRaw,JobName,Partition,State,ExitCode,DerivedExitCode,ReqMem,MaxRSS,MaxRSSNode,AveRSS,NTasks,NNodes,"
    "NCPUS,AllocTRES,Elapsed,Timelimit,Start,End,NodeList"
)
_LOGS = (".out", ".err", ".log", ".txt", ".gz")
_RULE = "PATH is a run directory, a log, a folder of logs, or - for standard input."


def diagnose(  # noqa: PLR0913 - one each for what a job left, and for what is made of it
    paths: Annotated[
        list[str] | None, typer.Argument(help="Run directories, logs, folders of logs, or -.", metavar="PATH...")
    ] = None,
    sacct: Annotated[
        str | None,
        typer.Option(help="What sacct printed of the job; of a job's number it is asked.", metavar="FILE|JOBID"),
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="The batch script or Compose file that started it.", metavar="FILE")
    ] = None,
    kernel_log: Annotated[
        Path | None, typer.Option("--kernel-log", help="What dmesg or journalctl -k printed.", metavar="FILE")
    ] = None,
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="The model's config.json: remedies come with their bytes.", metavar="FILE"),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Write the corrected --script beside the old one.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write an incident report in Markdown.", metavar="FILE")] = None,
    verify: Annotated[
        Path | None, typer.Option(help="A run that should have used a fixed script.", metavar="RUN")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="The fixed script.", metavar="FIXED")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what killed a job, with the lines that prove it, or that it is not known.

    memfit diagnose slurm-123.err --sacct 123 --script train.slurm --fix

    It says whether memory ran out and of which kind, where, in which phase, how the figures add up, and what to do,
    the cheapest in speed first. --fix writes NAME.fixed.EXT with a reason for each line; later --verify RUN --against
    NAME.fixed.EXT says whether its settings were really in force, and PATH may then be the run before.

    Exit codes: 0 diagnosed, or all that is shown was in force; 2 bad input; 4 a setting was not in force; 5 not known.
    """
    if (verify is None) != (against is None):
        raise UsageError(
            "--verify and --against go together.",
            rule="a run is held against the fixed script that it should have used.",
            remedy="memfit diagnose --verify RUN --against train.fixed.slurm",
        )
    named, verify = [_newest_run(Path(path)) for path in paths or ()], verify and _newest_run(verify)
    _check_files(
        {"": named, "--script": [script], "--kernel-log": [kernel_log], "--hf-config": [hf_config],
         "--verify": [verify], "--against": [against]}, report
    )  # fmt: skip
    accounting = _accounting(sacct) if sacct is not None else ""
    if verify is not None and against is not None:
        _verify(verify, against, named, accounting, as_json)
    if fix and script is None:
        raise UsageError(
            "--fix has no file to correct.",
            rule="it writes a corrected copy of a batch script or a Compose file.",
            remedy="add --script train.slurm",
        )
    if not named and not accounting and kernel_log is None:
        raise UsageError("nothing to diagnose.", rule=_RULE, remedy="memfit diagnose slurm-123.err")
    _diagnose(named, accounting, kernel_log, (script, hf_config), (fix, report, as_json))


_RULES = {
    "": _RULE,
    "--script": "--script takes the batch script or the Compose file that the job was started with.",
    "--kernel-log": "--kernel-log takes a file with what dmesg or journalctl -k printed.",
    "--hf-config": "--hf-config takes the model's config.json.",
    "--verify": "--verify takes a run's directory, its log, or a folder of logs.",
    "--against": "--against takes the fixed script that the run should have used.",
}


def _check_files(given: Mapping[str, Sequence[Path | None]], report: Path | None) -> None:
    """Whether every file is there that is read, and the folder of the one that is written."""
    for option, paths in given.items():
        for path in paths:
            if path is not None and str(path) != "-" and not path.exists():
                said = f"{option} {path}".strip()
                remedy = "check its name" if option else "check its name; --sacct takes a job's number"
                raise UsageError(f"{said} is not there.", rule=_RULES[option], remedy=remedy)
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        what = "it is a folder" if report.is_dir() else f"there is no folder {report.parent}"
        raise _no_report(report, what)


def _no_report(report: Path, what: str) -> UsageError:
    return UsageError(
        f"--report {report} cannot be written: {what}.",
        rule="--report names a file in a folder that exists and may be written to.",
        remedy="--report incident.md",
    )


def _newest_run(path: Path) -> Path:
    """The newest run of an experiment's folder, of which it tells; any other path as it is."""
    if not path.is_dir() or any(one.suffix in _LOGS for one in path.iterdir()):
        return path
    runs = sorted(one.parent for one in path.glob("run_*/run.json"))
    if not runs or (path / "run.json").is_file():
        return path
    typer.echo(f"{path}: the newest run of {len(runs)}, {runs[-1].name}", err=True)
    return runs[-1]


def _diagnose(
    named: list[Path],
    accounting: str,
    kernel_log: Path | None,
    of_job: tuple[Path | None, Path | None],
    wanted: tuple[bool, Path | None, bool],
) -> None:
    from memfit.cli._estimate import read_config
    from memfit.diagnosis import job_of, job_of_compose, list_remedies, make_fix, write_incident
    from memfit.reports import print_diagnosis, print_fix

    script, hf_config = of_job
    wants_fix, report, as_json = wanted
    found = _found(named, accounting, kernel_log)
    job = job_of(_ran(named, accounting), script)
    if script is not None and script.suffix.lower() in (".yml", ".yaml"):
        job = job_of_compose(script, found).with_known(job)
    config = read_config(hf_config) if hf_config is not None else None
    remedies = list_remedies(found, job, config=config)
    fixed: Fix | None = None
    if wants_fix and script is not None:
        fixed = make_fix(script, found, job, config=config)
        fixed = fixed.write() if fixed.edits else fixed
    if report is not None:
        text = write_incident(found, remedies, job, fixed)
        try:
            write_atomic(report, text)
        except OSError as error:  # it names the file that is written aside
            raise _no_report(report, error.strerror or str(error)) from None
    found = replace(found, remedies=tuple(one.to_dict() for one in remedies))
    if as_json:
        answer: dict[str, Any] = found.to_dict()
        if fixed is not None:
            answer["fix"] = fixed.to_dict()
        typer.echo(json.dumps(answer, indent=2))
    else:
        out = console()
        print_diagnosis(found, remedies, out)
        if fixed is not None:
            print_fix(fixed, out)
        if report is not None:
            out.print(f"\nwrote {report}", markup=False)
    raise typer.Exit(UNKNOWN_EXIT_CODE if found.cause == "unknown" else 0)


def _found(named: list[Path], accounting: str, kernel_log: Path | None) -> Diagnosis:
    from memfit.diagnosis import diagnose as diagnose_paths

    with ExitStack() as stack:
        file = None
        if accounting:  # it is read as a file is, under a name that says what it is
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memfit-"))
            file = Path(folder, "sacct.txt")
            file.write_text(accounting, encoding="utf-8")
        found = diagnose_paths(named, sacct=file, kernel_log=kernel_log)
    if file is None:
        return found
    evidence = tuple(replace(one, file="sacct") if one.file == str(file) else one for one in found.evidence)
    moments = tuple(replace(one, file="sacct") if one.file == str(file) else one for one in found.timeline)
    return replace(found, evidence=evidence, timeline=moments)


def _ran(named: list[Path], accounting: str) -> Ran:
    from memfit.diagnosis import read_ran

    return read_ran(named, accounting)


def _verify(verify: Path, against: Path, named: list[Path], accounting: str, as_json: bool) -> None:
    from memfit.diagnosis import is_any_shown, verify_fix
    from memfit.reports import print_verification

    before = _ran(named, "") if named else None
    checks = verify_fix(_ran([verify], accounting), against, before=before)
    if as_json:
        typer.echo(json.dumps([check.to_dict() for check in checks], indent=2))
    else:
        print_verification(checks, console())
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(4)
    raise typer.Exit(0 if is_any_shown(checks) else UNKNOWN_EXIT_CODE)


def _accounting(given: str) -> str:
    """What sacct printed: from a file, or asked of Slurm for a job's number.

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
    program = shutil.which("sacct")
    if program is None:
        raise UsageError(f"job {given} cannot be asked for: sacct is not installed here.", rule=rule, remedy=by_hand)
    words = [program, "-j", given, "-P", "--duplicates", f"--format={_COLUMNS}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"sacct gave no answer about job {given} in 30 s.", rule=rule, remedy=by_hand) from error
    if done.returncode or len(done.stdout.splitlines()) < 2:
        said = (done.stderr.strip() or "it knows no such job").splitlines()[0][:200]
        raise UsageError(f"sacct says of job {given}: {said}.", rule=rule, remedy=by_hand)
    return done.stdout + _of_nodes(given)


def _of_nodes(job: str) -> str:
    """The job's shape and what the partitions' nodes have, of which Slurm tells as long as it knows; else empty."""
    found = ""
    for words in (["scontrol", "show", "job", job], ["sinfo", "-o", "%P %m %l"]):
        program = shutil.which(words[0])
        with suppress(OSError, subprocess.TimeoutExpired):
            if program is not None:
                done = subprocess.run(
                    [program, *words[1:]], capture_output=True, text=True, errors="replace", timeout=30, check=False
                )
                found += f"\n{done.stdout}" if done.returncode == 0 else ""
    return found

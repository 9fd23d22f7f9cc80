"""Diagnosis: what is wrong with a place or a command before anything runs, and what killed a job that ran."""

from memfit.diagnosis._case import Setup
from memfit.diagnosis._check import VERDICTS, Check, Verdict
from memfit.diagnosis._diagnose import Diagnosis, diagnose, diagnose_logs
from memfit.diagnosis._doctor import examine
from memfit.diagnosis._fix import Fix, make_fix
from memfit.diagnosis._fix_compose import job_of_compose
from memfit.diagnosis._incident import what_happened, write_incident
from memfit.diagnosis._interpreter import Interpreter
from memfit.diagnosis._ran import Ran, job_of, read_ran
from memfit.diagnosis._remedies import list_remedies
from memfit.diagnosis._remedy import Remedy
from memfit.diagnosis._verify import is_any_shown, verify_fix

__all__ = [
    "VERDICTS",
    "Check",
    "Diagnosis",
    "Fix",
    "Interpreter",
    "Ran",
    "Remedy",
    "Setup",
    "Verdict",
    "diagnose",
    "diagnose_logs",
    "examine",
    "is_any_shown",
    "job_of",
    "job_of_compose",
    "list_remedies",
    "make_fix",
    "read_ran",
    "verify_fix",
    "what_happened",
    "write_incident",
]

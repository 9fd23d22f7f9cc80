"""Diagnosis: what killed a job, from what it left, and what to do about it."""

from memfit.diagnosis._diagnose import Diagnosis, Evidence, diagnose, diagnose_logs, find_shortage
from memfit.diagnosis._fix import Fix, make_fix
from memfit.diagnosis._granted import Ran, is_any_shown, job_of, read_ran, verify_fix
from memfit.diagnosis._growth import explain_growth
from memfit.diagnosis._headline import facts_of, headline_of, what_happened
from memfit.diagnosis._job import Job
from memfit.diagnosis._remedies import list_remedies
from memfit.diagnosis._remedy_table import Remedy

__all__ = [
    "Diagnosis",
    "Evidence",
    "Fix",
    "Job",
    "Ran",
    "Remedy",
    "diagnose",
    "diagnose_logs",
    "explain_growth",
    "facts_of",
    "find_shortage",
    "headline_of",
    "is_any_shown",
    "job_of",
    "list_remedies",
    "make_fix",
    "read_ran",
    "verify_fix",
    "what_happened",
]

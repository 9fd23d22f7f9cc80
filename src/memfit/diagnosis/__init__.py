"""Diagnosis: what killed a job, from what it left, and what to do about it."""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.diagnosis._diagnose import diagnose as diagnose
    from memfit.diagnosis._diagnose import diagnose_logs as diagnose_logs
    from memfit.diagnosis._diagnose import find_shortage as find_shortage
    from memfit.diagnosis._figures import Figures as Figures
    from memfit.diagnosis._find import find_signs as find_signs
    from memfit.diagnosis._fix import Fix as Fix
    from memfit.diagnosis._fix import make_fix as make_fix
    from memfit.diagnosis._granted import Ran as Ran
    from memfit.diagnosis._granted import is_any_shown as is_any_shown
    from memfit.diagnosis._granted import job_of as job_of
    from memfit.diagnosis._granted import read_ran as read_ran
    from memfit.diagnosis._granted import verify_fix as verify_fix
    from memfit.diagnosis._job import Job as Job
    from memfit.diagnosis._progress import last_counter as last_counter
    from memfit.diagnosis._record import Diagnosis as Diagnosis
    from memfit.diagnosis._record import Evidence as Evidence
    from memfit.diagnosis._remedies import list_remedies as list_remedies
    from memfit.diagnosis._remedy_table import REMEDIES as REMEDIES
    from memfit.diagnosis._remedy_table import Remedy as Remedy
    from memfit.diagnosis._sacct import parse_sacct as parse_sacct
    from memfit.diagnosis._signatures import SIGNATURES as SIGNATURES
    from memfit.diagnosis._text import read_streams as read_streams

__all__ = ["Diagnosis", "Fix", "Job", "Remedy", "diagnose", "job_of", "make_fix", "verify_fix"]

__getattr__, __dir__ = load_lazily(__name__)

"""What is gone, and what takes its place: one table for verbs, flags, config keys and Python names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gone:
    """One thing that an earlier memfit had, what to use now, and the first version without it."""

    kind: Literal["verb", "flag", "key", "name", "argument"]
    old: str
    new: str
    since: str = "0.2"


GONE = (
    Gone("verb", "workflow", "memfit run"),
    Gone("flag", "run --folds", "--units"),
    Gone("flag", "map --dry-run", "--plan"),
    Gone("flag", "compare --common-assets", "memfit.evaluation.evaluate_folds on the assets that both scored"),
    Gone("flag", "panel --order", "panels that lie by date, the only kind now"),
    Gone("flag", "panel --new-assets", "memfit panel build with the whole source"),
    Gone("key", "folds", "units"),
    Gone("key", "workflow", "params"),
    Gone("name", "memfit.rundir.mark_phase", "memfit.phase"),
    Gone("name", "memfit.memory.Claim", "memfit.memory.rooms_of(budget, unused={place: bytes})"),
    Gone("name", "memfit.memory.lendable_on_devices", "memfit.memory.rooms_of"),
    Gone("name", "memfit.jobs.Request", "memfit.jobs.Submission(job, limit_bytes)"),
    Gone("name", "memfit.jobs.Grant", "the limit in bytes: backend.enforcer.grant(job_id, wall_bytes)"),
    Gone("name", "memfit.pipeline.FoldWorkload", "memfit.pipeline.Workload"),
    Gone("name", "memfit.pipeline.FoldContext", "memfit.pipeline.Context"),
    Gone("name", "memfit.pipeline.PrepareContext", "memfit.pipeline.Context"),
    Gone("name", "memfit.pipeline.ScoreContext", "memfit.pipeline.Context"),
    Gone("name", "memfit.pipeline.Prepared", "outputs that a stage saves: context.save('panel', panel)"),
    Gone("name", "memfit.pipeline.workflow", "memfit.run"),
    Gone("name", "memfit.pipeline.parse_folds", "memfit.pipeline.Choice(units='2-5')"),
    Gone("name", "memfit.evaluation.summarize_ic", "memfit.evaluation.summarize, whose Summary has icir"),
    Gone("name", "memfit.evaluation.lift_at_k", "precision_at_k(...) - positive_rate(...)"),
    Gone("name", "memfit.evaluation.generalization_gap", "the mean of each fold's training less validation metric"),
    Gone("name", "memfit.evaluation.common_days", "memfit.evaluation.evaluate_folds on the assets that both scored"),
    Gone("name", "memfit.diagnosis.examine", "memfit.doctor.examine"),
    Gone("name", "memfit.diagnosis.Setup", "memfit.doctor.Setup"),
    Gone("name", "memfit.diagnosis.Interpreter", "memfit.doctor.Interpreter"),
    Gone("name", "memfit.diagnosis.job_of_compose", "memfit launch --format compose"),
    Gone("name", "memfit.diagnosis.Check", "memfit.checks.Check"),
    Gone("name", "memfit.training.CleanupPolicy", "memfit.training.clean_up, from Trainer(on_step=, on_epoch=)"),
    Gone("name", "memfit.training.FrozenHeap", "gc.freeze()"),
    Gone("name", "memfit.training.freeze_startup_heap", "gc.freeze()"),
    Gone("name", "memfit.training.OomEvent", "the events oom, microbatch and retry of a run"),
    Gone("argument", "memfit.training.SafeStep(on_oom=)", "the outcome's num_ooms, or the events of a run"),
    Gone("argument", "memfit.training.SafeStep(weight=)", "the weight that the loss returns"),
    Gone("name", "memfit.pipeline.backtest_checkpoints", "memfit_workloads.finance"),
    Gone("name", "memfit.data.WorkerPool", "Loader(num_workers=2): threads make batches ahead"),
    Gone("name", "memfit.data.ModeChoice", "memfit.data.Choice"),
    Gone("argument", "memfit.data.Loader(pool=)", "num_workers=2"),
    Gone("argument", "memfit.data.SequenceLoader(pool=)", "num_workers=2"),
    Gone("name", "memfit.estimation.estimate_program", "memfit.estimation.estimate_step"),
    Gone("name", "memfit.estimation.simulate_batches", "memfit.estimation.describe_batches"),
    Gone("name", "memfit.estimation.AllocatorFault", "memfit.checks.Check"),
)


def find_gone(kind: str, old: str) -> Gone | None:
    """Return the row of something that is gone; None for what never was.

    >>> find_gone("flag", "run --folds").new
    '--units'
    """
    return next((one for one in GONE if (one.kind, one.old) == (kind, old)), None)


def missing_name(module: str, name: str) -> Exception:
    """Return the error for a name that a module does not have: of a name that is gone, what takes its place.

    >>> missing_name("memfit.pipeline", "workflow")
    ImportError('memfit.pipeline.workflow is gone since memfit 0.2: use memfit.run')
    """
    gone = find_gone("name", f"{module}.{name}")
    if gone is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    # No AttributeError: `from module import name` would put another text in its place.
    return ImportError(f"{gone.old} is gone since memfit {gone.since}: use {gone.new}")

"""What ``memfit backtest`` does: checkpoints judged in an interpreter of its own, outside of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit import config
from memfit.pipeline._alone import call_alone


def backtest_checkpoints(
    source: Path | str,
    checkpoints: Sequence[Path],
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Judge checkpoints of one run, each on the dates that its model was not trained on.

    Args:
        source: The config that they were trained with; its section ``workflow`` says how they are judged.
        checkpoints: One for each fold, averages among them.
        overrides: Settings such as ``"workflow.start_date=2020-01-01"``.
        env: Where ``MEMFIT_…`` variables are read; ``os.environ`` when None.
        output: A JSON file; the scores, days, trades and a plot go beside it.

    Returns:
        ``verdict``, ``summary``, ``metrics``, ``findings``, ``controls``, ``tried``, ``folds`` and ``files``.

    Raises:
        UsageError: If the config is bad, its workload gives no scores, a checkpoint does not belong to the others or to
            the data, or none may score any of the dates.
    """
    arguments = {
        "checkpoints": [str(path.absolute()) for path in checkpoints],
        "output": None if output is None else str(output.absolute()),
    }
    return call_alone("memfit.pipeline._stages:backtest_in_child", source, arguments, overrides=overrides, env=env)

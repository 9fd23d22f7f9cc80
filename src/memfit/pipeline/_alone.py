"""A config's workload at work outside of a run, in an interpreter of its own with a job's threads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit import config
from memfit.jobs import call_in_child, limit_threads
from memfit.pipeline._config import RunConfig


def call_alone(
    function: str,
    source: Path | str,
    arguments: Mapping[str, Any],
    *,
    overrides: Sequence[config.Override],
    env: Mapping[str, str] | None,
) -> dict[str, Any]:
    """What a function gives that takes ``target``, ``resolved`` (the config) and further arguments.

    Raises:
        UsageError: If the config is bad; and what the function raises.
    """
    env = os.environ if env is None else env
    file = Path(source)
    resolved = config.resolve(RunConfig, file=file, env=env, overrides=overrides)
    folders = [str(file.resolve().parent), str(Path.cwd()), *filter(None, [env.get("PYTHONPATH")])]
    child_env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    limit_threads(resolved.value.threads_per_job, env=child_env, modules=())
    order = {"target": resolved.value.target, "resolved": resolved.to_json(), **arguments}
    found: dict[str, Any] = call_in_child(function, order, env=child_env)
    return found

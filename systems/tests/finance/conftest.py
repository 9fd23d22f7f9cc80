"""The workload that remembers its training dates, its stages run in this process, and commands in it."""

import importlib.util
import sys
from pathlib import Path

import pytest

from memfit import config as settings_of
from memfit.jobs import load_target
from memfit.pipeline import RunConfig
from stages_here import StagesHere

MEMORISER = Path(__file__).parents[3] / "tests/pipeline/memoriser.py"
FOLDS = (1, 2, 3, 4)


@pytest.fixture(scope="session")
def memoriser():
    """The workload's module."""
    spec = importlib.util.spec_from_file_location("memoriser", MEMORISER)
    module = sys.modules["memoriser"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def stages(memoriser):
    """Makes a run of the workload's stages in a folder, with settings of its params."""

    def make(folder, **params):
        judged = {"backtest": {"k_min": 2, "cost_bps": 0}} | params
        return StagesHere(folder, memoriser.MEMORISER, memoriser.MemoriserParams.model_validate(judged))

    return make


@pytest.fixture(scope="session")
def blended(stages, tmp_path_factory):
    """A run whose folds are trained and blended."""
    here = stages(tmp_path_factory.mktemp("blended"))
    for fold in FOLDS:
        here.run("fold", fold)
        here.run("blend", fold)
    return here


@pytest.fixture
def memfit(memfit, memoriser, monkeypatch):
    """Judges in this process what a command of ``memfit`` names."""

    def alone(function, source, arguments, *, overrides):
        resolved = settings_of.resolve(RunConfig, file=Path(source), overrides=overrides)
        return load_target(function)(target=resolved.value.target, resolved=resolved.to_json(), **arguments)

    monkeypatch.setattr("memfit_workloads.finance._verb.call_alone", alone)
    return memfit

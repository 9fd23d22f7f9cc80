"""The workload that remembers its training dates, its stages run in this process, and commands in it."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit import config as settings_of
from memfit.cli import main
from memfit.jobs import load_target
from memfit.pipeline import RunConfig
from stages_here import StagesHere

MEMORISER = Path(__file__).parents[1] / "pipeline" / "memoriser.py"
FOLDS = (1, 2, 3, 4)


@pytest.fixture(scope="session")
def memoriser():
    """The workload's module."""
    spec = importlib.util.spec_from_file_location("memoriser", MEMORISER)
    module = sys.modules["memoriser"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def _no_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memfit_workloads.finance._report.plot_backtest", lambda *_, **__: b"no picture")
        yield


@pytest.fixture(scope="session")
def stages(memoriser, _no_pictures):
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
def memfit(memoriser, tmp_path, monkeypatch, capsys, _no_pictures):
    """Runs a command as the program does, and what it judges in this process: its exit code and what it wrote."""
    monkeypatch.chdir(tmp_path)

    def alone(function, source, arguments, *, overrides):
        resolved = settings_of.resolve(RunConfig, file=Path(source), overrides=overrides)
        return load_target(function)(target=resolved.value.target, resolved=resolved.to_json(), **arguments)

    def command(*words):
        monkeypatch.setattr("memfit_workloads.finance._verb.call_alone", alone)
        monkeypatch.setattr(sys, "argv", ["memfit", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        written = capsys.readouterr()
        return SimpleNamespace(exit_code=caught.value.code or 0, out=written.out, err=written.err)

    return command

"""What is light stays light: a login node needs no torch, and nothing heavy is loaded before it is used."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "pandas", "optuna", "ray", "transformers", "matplotlib", "scipy", "sklearn", "skfolio", "plotly")

_REPORT = """
import json, sys
modules = {name.partition(".")[0] for name in sys.modules}
packages = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("memfit.")}
print("\\nLOADED " + json.dumps(sorted(modules | packages)))
"""
_COMMAND = """
import sys
from memfit.cli import main
sys.argv = ["memfit", *{arguments!r}]
try:
    main()
except SystemExit as exit:
    assert exit.code in (0, None), exit.code
"""


def loaded(code: str) -> set[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MEMFIT_", "PYTHON", "COV"))}
    done = subprocess.run(
        [sys.executable, "-c", code + _REPORT], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(json.loads(done.stdout.rpartition("LOADED ")[2]))


@pytest.mark.slow
def test_the_report_of_loaded_modules_sees_a_heavy_one() -> None:
    assert "pandas" in loaded("import pandas")


@pytest.mark.core
@pytest.mark.parametrize(
    "code",
    [
        "import memfit",
        "import memfit; memfit.Budget, memfit.Footprint, memfit.Job, memfit.measure, memfit.plan, memfit.run",
        "import memfit; memfit.Panel",
        "import memfit.config, memfit.rundir, memfit.data, memfit.splits, memfit.jobs",
        "import memfit.pipeline, memfit.reports, memfit.cli",
        _COMMAND.format(arguments=["--help"]),
        _COMMAND.format(arguments=["--version"]),
        _COMMAND.format(arguments=["budget"]),
        _COMMAND.format(arguments=["budget", "--json"]),
        _COMMAND.format(arguments=["run", "--help"]),
    ],
    ids=["memfit", "names", "panel", "packages", "upper", "help", "version", "budget", "budget-json", "run-help"],
)
def test_memfit_loads_nothing_heavy(code: str) -> None:
    assert loaded(code).isdisjoint(HEAVY)


@pytest.mark.parametrize(("words", "most"), [(["--version"], 6), (["ps"], 12), (["stop", "--help"], 12)])
def test_a_verb_loads_what_it_needs_and_no_other_verbs_packages(words: list[str], most: int) -> None:
    packages = {name for name in loaded(_COMMAND.format(arguments=words)) if name.startswith("memfit.")}
    others = {"data", "diagnosis", "estimation", "pipeline", "planning", "training"}
    assert packages.isdisjoint({f"memfit.{name}" for name in others})
    assert len(packages) <= most, packages


def test_help_lists_every_verb_with_its_line_also_those_of_other_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from memfit.cli import app

    app(["--help"], standalone_mode=False)
    listed = capsys.readouterr().out.partition("Commands:")[2]
    found = dict(line.split(maxsplit=1) for line in listed.splitlines() if line.strip())
    assert found["ps"] == "List your live runs on this host and their jobs."
    others = {one.name: one.load().__doc__ for one in importlib.metadata.entry_points(group="memfit.verbs")}
    assert {name: found[name] for name in others} == {
        name: text.partition(".")[0] + "." for name, text in others.items()
    }
    assert len(found) == 15 + len(others)


def test_every_public_name_is_there() -> None:
    import memfit

    for name in memfit.__all__:
        assert getattr(memfit, name).__name__ == name


def test_torchvision_is_not_installed() -> None:
    names = {(distribution.metadata["Name"] or "").lower() for distribution in importlib.metadata.distributions()}
    assert {"torch", "memfit"} <= names
    assert names.isdisjoint({"torchvision", "timm", "torchcodec", "composer", "mosaicml-streaming"})

"""``make lines``: the lines of each package."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "lines.py"


def _tool():
    spec = importlib.util.spec_from_file_location("lines_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lines_of_each_package_are_counted_and_tests_are_one_sum():
    texts = {
        "src/memfit/jobs/_local.py": "a\nb\n",
        "src/memfit/jobs/_job.py": "a\n",
        "src/memfit/units.py": "a\n",
        "src/memfit_workloads/ranker/model.py": "a\n",
        "tests/jobs/test_job.py": "a\nb\n",
        "tests/test_units.py": "a\n",
        "tools/lines.py": "a\n",
    }
    counted = _tool().count(texts)
    assert counted == {"memfit/jobs": 3, "memfit/*.py": 1, "memfit_workloads": 1, "tests": 3}


@pytest.mark.skipif(not (TOOL.parents[1] / ".git").exists(), reason="not in a git checkout")
def test_the_last_commit_has_the_packages_of_the_working_tree():
    tool = _tool()
    assert {"memfit/jobs", "memfit/memory", "tests"} <= set(tool.count(tool.texts_at("HEAD")))

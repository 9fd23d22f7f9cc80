"""The tools that look at the tests: where their seconds go, which module is changed beside which tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_seconds_are_summed_by_file_or_told_by_test(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="x[1]" time="0.5"/>'
        '<testcase classname="tests.a" name="y" time="1.5"/><testcase classname="tests.b" name="z" time="0.25"/>'
        "</testsuite></testsuites>"
    )
    tool = _tool("times")
    assert tool.seconds_of(report, by_test=False) == {"tests.a": 2.0, "tests.b": 0.25}
    assert tool.seconds_of(report, by_test=True).most_common(1) == [("tests.a::y", 1.5)]


def test_each_module_that_is_changed_and_its_tests_exist():
    modules = _tool("mutants").MODULES
    assert len(modules) == 11
    assert [name for name in modules if not (ROOT / "src/memfit" / f"{name}.py").exists()] == []
    assert [test for tests in modules.values() for test in tests if not (ROOT / test).exists()] == []


@pytest.mark.slow
def test_what_is_made_once_for_a_file_is_made_by_one_worker(tmp_path):
    """The groups of the scheduler hold with the versions of pytest and xdist that are installed."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "tests/test_once.py").write_text(
        "import os, time\nfrom pathlib import Path\nimport pytest\n\n"
        '@pytest.fixture(scope="module")\ndef made():\n    Path(f"made_{os.getpid()}").touch()\n\n'
        "def test_one(made):\n    time.sleep(0.3)\n\ndef test_two(made):\n    time.sleep(0.3)\n\ndef test_three(made):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "-c", "/dev/null", "--rootdir", ".", "tests"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("made_*"))) == 1

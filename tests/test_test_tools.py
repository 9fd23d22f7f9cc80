"""The tools that look at the tests: where their seconds go, which module is changed beside which tests."""

import importlib.util
from pathlib import Path

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
    assert len(modules) == 10
    assert [name for name in modules if not (ROOT / "src/memfit" / f"{name}.py").exists()] == []
    assert [test for tests in modules.values() for test in tests if not (ROOT / test).exists()] == []

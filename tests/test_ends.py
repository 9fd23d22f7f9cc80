"""The ends of the support matrix: the page names the versions of pyproject.toml, and the tests that CI runs are there."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def ends():
    spec = importlib.util.spec_from_file_location("ends_tool", ROOT / "tools/ends.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(text):
    """Return the oldest allowed version of each package in the page's first table, by its name in small letters."""
    found = {}
    for line in text.partition("## Machines")[0].splitlines():
        parts, oldest, *_ = [cell.strip() for cell in line.strip("|").split("|")] + [""]
        names, versions = parts.lower().split(", "), oldest.split(", ")
        if re.fullmatch(r"[\d., ]+", oldest) and len(names) == len(versions):
            found |= dict(zip(names, versions, strict=True))
    return found


def test_the_page_names_the_lowest_version_of_each_requirement(ends):
    page = table((ROOT / "docs/support.md").read_text())
    assert page.pop("python") == ends.PYTHONS["oldest"]
    assert page == ends.floors()


def test_each_requirement_is_installed_at_its_lowest_version(ends):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={ends.PYTHONS['oldest']}"
    extras = [one for extra in ends.EXTRAS for one in project["optional-dependencies"][extra]]
    names = {re.split(r"\W*[>=\[]", one)[0] for one in project["dependencies"] + extras} - {"memfit"}
    assert names == set(ends.floors())
    light, whole = (ends.requirements("oldest", light) for light in (True, False))
    assert {one.partition("==")[0] for one in light} == names - {"torch"} and set(light) < set(whole)


def test_the_tests_that_ci_runs_are_there(ends):
    for name in {name for names in ends.LIGHT.values() for name in names.split()}:
        path, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / "tests" / path).read_text(), name

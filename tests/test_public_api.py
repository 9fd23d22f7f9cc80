"""The public names: few, documented, each with an example that runs."""

import doctest
import inspect
import re
import runpy
import tomllib
from pathlib import Path

import pytest

import memfit

ROOT = Path(__file__).resolve().parents[1]
NAMES = [
    "Budget",
    "Footprint",
    "Job",
    "Panel",
    "SafeStep",
    "Trainer",
    "diagnose",
    "estimate",
    "measure",
    "phase",
    "plan",
    "run",
]


def test_the_public_names_are_these_and_each_is_listed():
    assert sorted(memfit.__all__) == NAMES
    assert set(NAMES) <= set(dir(memfit))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_imported_from_memfit_and_is_that_of_its_package(name):
    found = getattr(memfit, name)
    assert found.__name__ == name
    assert found.__module__.startswith("memfit.")


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_is_and_has_an_example_that_shows_a_result(name):
    text = inspect.getdoc(getattr(memfit, name))
    assert text and text.splitlines()[0].endswith(".")
    examples = doctest.DocTestParser().get_examples(text)
    assert any(example.want for example in examples)
    assert "Example:" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_suite_runs_the_example_of_a_public_name(name):
    # The suite runs what this finder finds in each module; an object behind a decorator must not hide its example.
    found = getattr(memfit, name)
    tests = doctest.DocTestFinder(recurse=False).find(found, name)
    assert any(test.examples for test in tests)
    assert inspect.getmodule(inspect.unwrap(found)).__name__ == found.__module__


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(getattr(memfit, name))])
def test_every_public_method_of_a_public_class_is_documented(name):
    kind = getattr(memfit, name)
    members = [part for part in vars(kind) if not part.startswith("_") and callable(getattr(kind, part))]
    assert [part for part in members if not inspect.getdoc(getattr(kind, part))] == []


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'Buget'"):
        _ = memfit.Buget


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools/list_names.py"))


@pytest.mark.slow
def test_a_change_of_public_names_is_seen_in_a_file(tool):
    names = "".join(f"{name}\n" for name in tool["public_names"]())  # here most of it has been imported
    assert names == (ROOT / "tests/public_names.txt").read_text(), (
        "write it anew: python tools/list_names.py --names > tests/public_names.txt"
    )
    page = tool["page"]()
    assert [name for name in names.split() if f"`{name.rpartition('.')[2]}`" not in page] == []


def test_each_package_has_a_promise(tool):
    promised = {name for _, modules in tool["PROMISES"].values() for name in modules.split()}
    packages = {f"memfit.{path.parent.name}" for path in (ROOT / "src/memfit").glob("*/__init__.py")}
    assert packages - promised == set()


def test_the_changelog_begins_with_what_is_not_released_or_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert first in ("Unreleased", version)

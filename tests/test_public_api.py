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


@pytest.mark.slow
def test_the_page_of_public_names_is_as_the_packages_are(capsys):
    runpy.run_path(str(ROOT / "tools/list_names.py"), run_name="__main__")  # here most of it has been imported
    assert capsys.readouterr().out == (ROOT / "docs/api.md").read_text(), (
        "write it anew: python tools/list_names.py > docs/api.md"
    )


def test_each_package_has_a_promise():
    page = (ROOT / "docs/api.md").read_text()
    packages = [path.parent.name for path in (ROOT / "src/memfit").glob("*/__init__.py")]
    assert [name for name in packages if f"### `memfit.{name}`" not in page] == []


def test_the_changelog_begins_with_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version

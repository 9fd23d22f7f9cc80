"""The error tree, as it is drawn and as it is."""

import pickle
import re

import pytest

from memfit import errors
from memfit.errors import MemfitError, MissingExtraError, nearest


def descendants(kind):
    return [kind, *(below for child in kind.__subclasses__() for below in descendants(child))]


def drawn():
    """The tree in the docstring: per class its parent's name and its exit code."""
    found, path = {}, []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^    (?P<lines>[ │├└─]*)(?P<name>[A-Z]\w+Error)\s+(?:exit code )?(?P<code>\d+)", line)
        if match:
            depth = len(match["lines"]) // 4
            path[depth:] = [match["name"]]
            found[match["name"]] = (path[depth - 1] if depth else "Exception", int(match["code"]))
    return found


def real_errors():
    return [kind for kind in descendants(MemfitError) if kind.__module__ == "memfit.errors"]


def test_the_tree_in_the_docstring_is_the_real_one_with_its_exit_codes():
    assert drawn() == {kind.__name__: (kind.__bases__[0].__name__, kind.exit_code) for kind in real_errors()}
    assert len(drawn()) == 16


def test_every_error_is_defined_in_this_module_so_that_a_childs_error_can_be_rebuilt_by_its_name():
    assert [kind for kind in descendants(MemfitError) if getattr(errors, kind.__name__, None) is not kind] == []


@pytest.mark.parametrize("kind", real_errors())
def test_pickling_keeps_the_kind_and_the_three_parts(kind):
    error = kind("9 GiB needed.", rule="8 GiB (cgroup).", remedy="raise it")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.rule, again.remedy) == ("9 GiB needed.", "8 GiB (cgroup).", "raise it")
    assert str(again) == "9 GiB needed.\n  rule: 8 GiB (cgroup).\n  do:   raise it"


def test_every_error_says_what_it_is_for():
    assert [kind.__name__ for kind in real_errors() if not kind.__doc__] == []


def test_an_error_without_its_rule_or_remedy_cannot_be_made():
    with pytest.raises(TypeError):
        MemfitError("what")


def test_a_missing_package_gives_the_line_that_installs_it():
    error = MissingExtraError.of("torch", "torch", "training")
    assert error.remedy == "pip install 'memfit[torch]'"
    assert "training needs it" in error.what


@pytest.mark.parametrize(
    ("name", "hint"), [("max_paralel", "did you mean 'max_parallel'?"), ("qqqq", "known: folds, max_parallel")]
)
def test_the_nearest_known_name_is_hinted_at_or_all_are_listed(name, hint):
    assert nearest(name, ["max_parallel", "folds"]) == hint

"""Flags have their names with every release of typer that memfit accepts."""

import inspect

import pytest
from typer.models import OptionInfo

from memfit.cli import _VERBS, load_verb


@pytest.mark.parametrize("verb", [name for name in _VERBS if name != "panel"])
def test_no_metavar_becomes_the_name_of_a_flag(verb):
    parameters = inspect.signature(load_verb(verb), eval_str=True).parameters.values()
    options = [
        (one.name, part)
        for one in parameters
        for part in getattr(one.annotation, "__metadata__", ())
        if isinstance(part, OptionInfo)
    ]
    unnamed = [(name, one) for name, one in options if not str(one.default).startswith("--")]  # a name is given first
    wrong = [name for name, one in unnamed if (one.metavar or "").lower() == name]  # typer 0.27 takes it as the flag
    assert not wrong

"""What is gone is answered by what takes its place, row by row."""

import importlib
import inspect
import sys

import pytest

from memfit.cli import main
from memfit.errors import ConfigError, UsageError
from memfit.pipeline import run
from memfit.successors import GONE, missing_name


def said(capsys, *words):
    sys.argv = ["memfit", *words]
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("gone", GONE, ids=lambda gone: gone.old)
def test_what_is_gone_names_its_successor(gone, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    if gone.kind in ("verb", "flag"):
        assert f"use {gone.new}" in said(capsys, *gone.old.split(), "x")
    elif gone.kind == "key":
        with pytest.raises(ConfigError, match=f"use '{gone.new}'"):
            run({"experiment": "demo", "target": "workload:LINEAR", gone.old: 1})
    elif gone.kind == "argument":
        where, _, name = gone.old.removesuffix("=)").partition("(")
        module, _, owner = where.rpartition(".")
        with pytest.raises(UsageError, match=f"{owner} has no argument {name} since memfit") as caught:
            given = inspect.signature(getattr(importlib.import_module(module), owner)).parameters.values()
            needed = {one.name: None for one in given if one.default is one.empty and one.kind is not one.VAR_KEYWORD}
            getattr(importlib.import_module(module), owner)(**needed, **{name: 1})
        assert gone.new in caught.value.remedy
    else:
        module, _, name = gone.old.rpartition(".")
        with pytest.raises(ImportError) as caught:
            getattr(importlib.import_module(module), name)
        assert gone.new in str(caught.value)
        with pytest.raises(ImportError) as caught:
            exec(f"from {module} import {name}")
        assert gone.new in str(caught.value)


def test_a_name_that_never_was_is_an_ordinary_attribute_error():
    assert isinstance(missing_name("memfit.pipeline", "wrokload"), AttributeError)
    assert not hasattr(importlib.import_module("memfit.pipeline"), "wrokload")

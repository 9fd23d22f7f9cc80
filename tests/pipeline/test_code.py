"""What counts as the code of a stage: a change of it makes the stage run again, and no other change does."""

import contextlib
import itertools
import os
import time
from pathlib import Path

import pytest

import memfit
from memfit.errors import UsageError
from memfit.pipeline import plan_run

pytestmark = pytest.mark.slow

CONFIG = {"experiment": "flow", "target": "flow:FLOW"}
COUNTED = CONFIG | {"target": "flow:COUNTED"}
#: A workload whose stages reach their code in other ways than by a plain function.
FILES = {
    "flow.py": """
import functools
import re
from typing import ClassVar

from pydantic import BaseModel, PrivateAttr

import parts
import registry
import short
import tools
from memfit.pipeline import Stage, Workload


class Params(BaseModel):
    rate: float = 0.1


class Counted(Params):
    size: int = 1
    FACTOR: ClassVar[int] = 2
    _hidden: int = PrivateAttr(3)


class Fit:
    def __init__(self, **kept):
        self.kept = kept

    def __call__(self, context, params):
        return {"rate": 1}


def bound(context, params, score, names):
    return {"score": score()}


def timed(function):
    @functools.wraps(function)
    def wrapper(*values):
        print("begins")
        return function(*values)
    return wrapper


@timed
def plain(context, params):
    return {"plain": 1}


def looked_up(context, params):
    return {"found": registry.MODELS["first"]()()}


def whole(context, params):
    return {"found": getattr(tools, "in" + "ner")()}


STAGES = (
    Stage("object", Fit(path=parts.PATH, pattern=re.compile("a+"), names={"a", "b", "c"}), reads=()),
    Stage("partial", functools.partial(bound, score=parts.score, names=frozenset("xyz")), reads=()),
    Stage("lamb", short.LAMBDA, reads=()),
    Stage("plain", plain, reads=()),
    Stage("looked_up", looked_up, reads=()),
    Stage("whole", whole, reads=()),
)
FLOW = Workload(Params, STAGES)
COUNTED = Workload(Counted, (Stage("plain", plain, reads=()),))
""",
    "parts.py": """
from pathlib import Path

PATH = Path("here")


def score():
    return 1


def unused():
    return 1
""",
    "short.py": "LAMBDA = lambda context, params: {'one': 1}\n",
    "tools.py": "from inside import inner\n",
    "inside.py": "def inner():\n    return 1\n",
    "registry/__init__.py": """
from .base import MODELS
from .first import First

import importlib, pathlib
for path in sorted(pathlib.Path(__file__).parent.glob("found_*.py")):
    importlib.import_module(f"registry.{path.stem}")
""",
    "registry/base.py": """
MODELS = {}


def register(name):
    def keep(model):
        MODELS[name] = model
        return model
    return keep
""",
    "registry/first.py": """
from .base import register


@register("first")
class First:
    def __init__(self):
        self.layers = 1

    def __call__(self):
        return self.layers


def beside():
    return 1
""",
    "registry/found_later.py": "VALUE = 1\n",
}
#: Times of files.
SECONDS = itertools.count(int(time.time()))
ALL = {"object", "partial", "lamb", "plain", "looked_up", "whole"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which both workloads have run once."""
    folder = tmp_path_factory.mktemp("finished")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with contextlib.chdir(folder):
        assert [memfit.run(config).exit_code for config in (CONFIG, COUNTED)] == [0, 0]
    return folder


@pytest.fixture
def flow(finished, monkeypatch):
    """Makes the folder of the finished runs the current one; no test leaves anything in it."""
    monkeypatch.chdir(finished)


def write(file, text):
    """Write a file that is a second younger than the last: of two within a second Python would load the bytecode of one."""
    Path(file).write_text(text)
    os.utime(file, (next(SECONDS),) * 2)


def reruns(*edits, config=CONFIG):
    """The stages that would run after edits (file, before, after), which are then taken back."""
    before = {file: Path(file).read_text() for file, *_ in edits}
    try:
        for file, old, new in edits:
            text = Path(file).read_text()
            assert old in text
            write(file, text.replace(old, new))
        return {stage.name for stage in plan_run(config).stages if stage.num_runs}
    finally:
        for file, text in before.items():
            write(file, text)


#: Edits together, each of another stage, and the stages that run after them.
EDITS = [
    ([], set()),  # sets and functions have another order and address in each process
    (
        [
            ("flow.py", '"rate": 1', '"rate": 2'),
            ("parts.py", "score():\n    return 1", "score():\n    return 2"),
            ("short.py", "'one': 1", "'one': 2"),
        ],
        {"object", "partial", "lamb"},
    ),
    ([("flow.py", '"a+"', '"b+"'), ("flow.py", '{"plain": 1}', '{"plain": 2}')], {"object", "plain"}),
    ([("parts.py", 'Path("here")', 'Path("there")'), ("flow.py", '"begins"', '"it begins"')], {"object", "plain"}),
    ([("flow.py", '{"a", "b", "c"}', '{"a", "b", "d"}'), ("inside.py", "return 1", "return 2")], {"object", "whole"}),
    (
        [
            ("flow.py", '"xyz"', '"xyw"'),
            ("parts.py", "unused():\n    return 1", "unused():\n    return 2"),
            ("registry/first.py", "return 1", "return 2"),
        ],
        {"partial"},
    ),
    ([("registry/first.py", "self.layers = 1", "self.layers = 2")], ALL),
    ([("registry/found_later.py", "VALUE = 1", "VALUE = 2")], ALL),  # by its name alone, in a loop
]


@pytest.mark.parametrize(("edits", "expected"), EDITS)
def test_what_a_stage_is_bound_to_or_registers_when_it_is_imported_counts_and_nothing_else(flow, edits, expected):
    assert reruns(*edits) == expected


def test_constants_of_the_params_count_and_fields_do_not(flow):
    field = ("flow.py", "size: int = 1", "size: int = 2\n    newer: int = 0")
    assert reruns(field, config=COUNTED) == set()
    assert reruns(("flow.py", "FACTOR: ClassVar[int] = 2", "FACTOR: ClassVar[int] = 4"), config=COUNTED) == {"plain"}
    assert reruns(("flow.py", "PrivateAttr(3)", "PrivateAttr(4)"), config=COUNTED) == {"plain"}


def test_an_object_without_content_is_refused(flow):
    with pytest.raises(UsageError, match="is bound to a lock, which has no content") as caught:
        reruns(("flow.py", "names=frozenset", "lock=__import__('threading').Lock(), names=frozenset"))
    assert "inside of the function" in caught.value.remedy

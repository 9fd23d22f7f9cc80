"""What counts as the code of a stage: a change of it makes the stage run again, and no other change does."""

from pathlib import Path

import pytest

import memfit
from memfit.errors import UsageError
from memfit.pipeline import plan_run

pytestmark = pytest.mark.slow

CONFIG = {"experiment": "flow", "target": "flow:FLOW"}
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
ALL = {"object", "partial", "lamb", "plain", "looked_up", "whole"}


@pytest.fixture
def flow(tmp_path, monkeypatch):
    """The workload, run once, in the current folder."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert memfit.run(CONFIG).exit_code == 0


def reruns(file="", before="", after="", config=CONFIG):
    """The stages that would run after an edit, which is then taken back."""
    path = Path(file or "flow.py")
    text = path.read_text()
    assert before in text
    try:
        path.write_text(text.replace(before, after))
        return {stage.name for stage in plan_run(config).stages if stage.num_runs}
    finally:
        path.write_text(text)


def test_what_a_stage_is_bound_to_counts_and_is_the_same_in_each_process(flow):
    assert reruns() == set()  # sets and functions have another order and address in each process
    assert reruns("flow.py", '"rate": 1', '"rate": 2') == {"object"}
    assert reruns("flow.py", '"a+"', '"b+"') == {"object"}
    assert reruns("parts.py", 'Path("here")', 'Path("there")') == {"object"}
    assert reruns("flow.py", '{"a", "b", "c"}', '{"a", "b", "d"}') == {"object"}
    assert reruns("parts.py", "score():\n    return 1", "score():\n    return 2") == {"partial"}
    assert reruns("flow.py", '"xyz"', '"xyw"') == {"partial"}
    assert reruns("parts.py", "unused():\n    return 1", "unused():\n    return 2") == set()
    assert reruns("short.py", "'one': 1", "'one': 2") == {"lamb"}
    assert reruns("flow.py", '{"plain": 1}', '{"plain": 2}') == {"plain"}
    assert reruns("flow.py", '"begins"', '"it begins"') == {"plain"}


def test_code_that_is_registered_when_it_is_imported_counts(flow):
    assert reruns("registry/first.py", "self.layers = 1", "self.layers = 2") == ALL
    assert reruns("registry/first.py", "return 1", "return 2") == set()
    assert reruns("registry/found_later.py", "VALUE = 1", "VALUE = 2") == ALL  # by its name alone, in a loop
    assert reruns("inside.py", "return 1", "return 2") == {"whole"}


def test_constants_of_the_params_count_and_fields_do_not(flow):
    config = CONFIG | {"target": "flow:COUNTED"}
    memfit.run(config)
    assert reruns("flow.py", "size: int = 1", "size: int = 2\n    newer: int = 0", config) == set()
    assert reruns("flow.py", "FACTOR: ClassVar[int] = 2", "FACTOR: ClassVar[int] = 4", config) == {"plain"}
    assert reruns("flow.py", "PrivateAttr(3)", "PrivateAttr(4)", config) == {"plain"}


def test_an_object_without_content_is_refused(flow):
    with pytest.raises(UsageError, match="is bound to a lock, which has no content") as caught:
        reruns("flow.py", "names=frozenset", "lock=__import__('threading').Lock(), names=frozenset")
    assert "inside of the function" in caught.value.remedy

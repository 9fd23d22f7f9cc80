"""What counts as the code of a stage: a change of it makes the stage run again, and no other change does."""

import contextlib
import importlib
import itertools
import os
import time
from pathlib import Path

import pytest

import memfit
from memfit.pipeline import code_of, plan_run
from stages_here import runs_here

CONFIG = {"experiment": "flow", "target": "flow:FLOW"}
COUNTED = CONFIG | {"target": "flow:COUNTED"}
#: A workload whose stages reach their code in other ways than by a plain function.
FILES = {
    "flow.py": """
import functools
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


def bound(context, params, score):
    return {"score": score()}


def plain(context, params):
    return {"plain": 1}


def looked_up(context, params):
    return {"found": registry.MODELS["first"]()()}


def whole(context, params):
    return {"found": getattr(tools, "in" + "ner")()}


STAGES = (
    Stage("object", Fit(path=parts.PATH), reads=()),
    Stage("partial", functools.partial(bound, score=parts.score), reads=()),
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
    with contextlib.chdir(folder), runs_here():
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
    ([], set()),
    (
        [("flow.py", '"rate": 1', '"rate": 2'), ("short.py", "'one': 1", "'one': 2")],
        {"object", "partial", "lamb"},
    ),  # the whole file
    ([("flow.py", '{"plain": 1}', '{"plain": 2}')], {"object", "partial", "plain"}),
    ([("parts.py", 'Path("here")', 'Path("there")')], {"object", "partial"}),  # another module counts whole
    ([("inside.py", "return 1", "return 2")], {"object", "partial", "whole"}),
    ([("registry/first.py", "self.layers = 1", "self.layers = 2")], ALL),
    ([("registry/found_later.py", "VALUE = 1", "VALUE = 2")], ALL),  # by its name alone, in a loop
]


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "expected"), EDITS)
def test_what_a_stage_reaches_or_registers_when_it_is_imported_counts_and_nothing_else(flow, edits, expected):
    assert reruns(*edits) == expected


@pytest.mark.slow
def test_constants_of_the_params_count_and_fields_do_not(flow):
    field = ("flow.py", "size: int = 1", "size: int = 2\n    newer: int = 0")
    assert reruns(field, config=COUNTED) == set()
    assert reruns(("flow.py", "FACTOR: ClassVar[int] = 2", "FACTOR: ClassVar[int] = 4"), config=COUNTED) == {"plain"}
    assert reruns(("flow.py", "PrivateAttr(3)", "PrivateAttr(4)"), config=COUNTED) == {"plain"}


#: Files, the file that changes, a text in it and what it becomes, and whether the stage ``stage`` of one.py depends on it.
READ = [
    ({"one": "import two\ndef stage(): return two.first()", "two": "def first(): return 1"}, "two", "1", "2", True),
    ({"one": "import two\ndef stage(): return 0", "two": "def first(): return 1"}, "two", "1", "2", False),
    ({"one": "def stage(): return 0", "nets": "class Net:\n  size = 1"}, "nets", "1", "2", True),  # a setting names it
    ({"one": "def stage(): return 0\ndef other(): return 1", "two": ""}, "one", "1", "2", False),
    ({"one": "class Of:\n  a = 1\ndef stage(one: Of): return 0"}, "one", "a = 1", "a = 2", False),  # which no call reads
    # what an import does: by a decorator, a statement, a base class, or in the body of a class
    ({"one": "ALL = {}\ndef keep(x):\n  ALL[1] = x\n  return x\n@keep\ndef kept(): return 1\ndef stage(): ALL[1]()"},
     "one", "return 1", "return 2", True),
    ({"one": "import functools\n@functools.cache\ndef other(): return 1\ndef stage(): return 0"}, "one", "1", "2", False),
    ({"one": "ALL = []\ndef kept(): return 1\nALL.append(kept)\ndef stage(): ALL[0]()"}, "one", "return 1", "return 2", True),
    ({"one": "class Base:\n  ALL = []\n  def __init_subclass__(cls): Base.ALL.append(cls)\nclass Kept(Base):\n  def f(self): "
      "return 1\ndef stage(): return Base.ALL[0]().f()"}, "one", "return 1", "return 2", True),
    ({"one": "class Meta(type):\n  def __init__(cls, *_): Meta.kept = cls\nclass Kept(metaclass=Meta):\n  def f(self): return 1\n"
      "def stage(): return Meta.kept().f()"}, "one", "return 1", "return 2", True),
    ({"one": "from two import keep\n@keep\ndef kept(): return 1\ndef stage(): return keep.all()", "two": "from three import *",
      "three": "def keep(x): keep.all = x"}, "one", "return 1", "return 2", True),
    ({"one": "class Base: pass\nclass Other(Base):\n  def f(self): return 1\ndef stage(): return 0"}, "one", "1", "2", False),
    ({"one": "ALL = {}\ndef kept(): return 1\nclass Keeper:\n  ALL[1] = kept\ndef stage(): ALL[1]()"}, "one", "return 1", "return 2",
     True),
    ({"one": "import two\nfrom three import ALL\ndef stage(): return ALL[0]()", "three": "ALL = []",
      "two": "from three import ALL\ndef kept(): return 1\nALL += [kept]"}, "two", "return 1", "return 2", True),
    ({"one": "if __name__ == '__main__':\n  print(1)\ndef other(): return 2\ndef stage(): return 0"}, "one", "return 2", "3", False),
    ({"one": "import two\ndef other(): return 1\ndef stage(): return other() + two.f()", "two": "import one\ndef f(): return one"},
     "one", "1", "2", True),  # whole, as two names it
    # what a name stands for
    ({"one": "from math import sin as f\ndef stage(): return f(0)"}, "one", "sin", "cos", True),
    ({"one": "from two import f\ndef stage(): return f(0)", "two": "from math import sin as f"}, "two", "sin", "cos", True),
    ({"one": "from two import f\ndef stage(): return f(0)", "two": "from three import *", "three": "def f(x): return 1"},
     "three", "1", "2", True),
    ({"one": "try:\n  import none\nexcept ImportError:\n  import two as none\ndef stage(): return none.f()",
      "two": "def f(): return 1"}, "two", "1", "2", True),
    ({"one": "import sys\nif sys.platform:\n  def f(): return 1\nelse:\n  f = None\ndef stage(): return f()"}, "one", "return 1",
     "return 2", True),
    ({"one": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  f = None\nelse:\n  def f(): return 1\ndef stage(): return f()"},
     "one", "return 1", "return 2", True),
    ({"one": "import importlib\nimport two\ndef stage(): return importlib.import_module('tw' + 'o').f()", "two": "def f(): return 1"},
     "two", "1", "2", False),  # found by a text alone
    ({"one": "import functools\ndef wrap(f):\n  @functools.wraps(f)\n  def inner(): return f() + 1\n  return inner\n"
      "def base(): return 1\nSTAGES = [wrap(base)]\nstage = STAGES[0]"}, "one", "f() + 1", "f() + 2", True),
]  # fmt: skip


@pytest.mark.parametrize(("files", "file", "before", "after", "expected"), READ)
def test_code_is_found_by_what_its_files_say(tmp_path, monkeypatch, files, file, before, after, expected):
    package = f"read_{next(SECONDS)}"  # a name of its own: places of modules are looked up once
    for name, text in files.items():
        for other in ("one", "two", "three"):
            text = text.replace(f"import {other}", f"import {package}_{other} as {other}")
            text = text.replace(f"as {other} as", "as").replace(f"from {other} ", f"from {package}_{other} ")
        write(tmp_path / f"{package}_{name}.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    asked = importlib.import_module(f"{package}_one").stage, f"{package}_one:stage", None, [f"{package}_nets:Net"]
    first, _ = code_of(*asked)
    path = tmp_path / f"{package}_{file}.py"
    assert before in path.read_text()
    write(path, path.read_text().replace(before, after))
    assert (code_of(*asked)[0] != first) == expected


DEFAULTS = """
from pydantic import BaseModel, Field

class Params(BaseModel):
    size: int = 1
    hidden: int = Field(2, exclude=True)
    inner: "list[Params]" = []

def stage(context, params):
    return {}

def making(context, params):
    return {"size": Params().size}
"""


def test_fields_count_where_no_setting_holds_their_value(tmp_path, monkeypatch):
    name = f"read_{next(SECONDS)}"
    path = tmp_path / f"{name}.py"
    write(path, DEFAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)

    def codes():
        return [code_of(one, f"{name}:stage", module.Params)[0] for one in (module.stage, module.making)]

    first = codes()
    write(path, DEFAULTS.replace("int = 1", "int = 3"))
    assert [then == now for then, now in zip(first, codes(), strict=True)] == [True, False]
    write(path, DEFAULTS.replace("Field(2", "Field(3"))
    assert [then == now for then, now in zip(first, codes(), strict=True)] == [False, False]

"""A plain function that is run for several values of its settings."""

import re
from pathlib import Path

import pytest

import memfit
from memfit.errors import UsageError
from memfit.files import read_json
from memfit.pipeline import Choice, Workload
from memfit.rundir import RunDir

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: 0, "no context"),
        (lambda *, c: 0, "no context"),
        (lambda c, *more: 0, "*more"),
        (lambda c, n, /: 0, "n"),
    ],
)
def test_a_function_takes_a_context_first_and_then_named_settings(function, said):
    with pytest.raises(UsageError, match=re.escape(f"<lambda> takes {said}.")):
        Workload.of(function)
    fields = Workload.of(lambda c, /, n=2, *, more: 0).params.model_fields
    assert {name: one.is_required() for name, one in fields.items()} == {"n": False, "more": True}


def test_a_units_seed_depends_on_its_values_and_not_on_its_place_in_the_list():
    Path("draws.py").write_text("def draw(ctx, n: int = 0):\n    return {'n': n, 'seed': ctx.seed}\n")

    def seeds(*values):
        choice = Choice(combinations=tuple({"n": value} for value in values))
        found = memfit.run("draws:draw", choice=choice, new=True).metrics.values()
        return {result["n"]: result["seed"] for result in found}

    first, second = seeds("1", "2"), seeds("2")
    newest = RunDir.all(Path("runs"), "draw")[0]
    told = [event["why"] for event in newest.events() if event["kind"] == "stage" and event["state"] == "running"]
    assert not any("unit changed" in why for why in told)
    assert len(set(first.values())) == 2
    assert second == {2: first[2]}
    [planned] = Path("runs/draw").glob("*/plan.json")  # one alone needs none
    assert read_json(planned)["num_jobs"] == 2


def test_a_module_that_a_function_loads_unforeseen_is_code_of_it():
    Path("loads.py").write_text("def load(ctx):\n    return {'n': __import__('la' + 'ter').N}\n")
    for number in (1, 2):
        Path("later.py").write_text(f"N = {number}\n")
        assert memfit.run("loads:load").metrics == {"load": {"n": number}}

"""What runs, what is kept, and why: a workload of five stages without torch, NumPy or a panel."""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from pyarrow import feather

import memfit
from memfit.errors import ConfigError, UsageError
from memfit.files import replacing
from memfit.pipeline import Choice, Context, fingerprint_files, plan_run
from memfit.rundir import RunDir
from stages_here import runs_here

pytestmark = pytest.mark.usefixtures("here")

ALL = ["gate", "last", "listed", "square_1", "square_2", "square_3", "summed"]
HERE = Path(__file__).parent
CONFIG = {"experiment": "chain", "target": "chain:CHAIN"}


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Runs the chain in a folder of its own; gives the result and the jobs that ran."""
    for name in ("chain.py", "chain_help.py"):
        shutil.copy(HERE / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return run_chain


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the chain in which it has run once."""
    folder = tmp_path_factory.mktemp("finished")
    for name in ("chain.py", "chain_help.py"):
        shutil.copy(HERE / name, folder)
    with contextlib.chdir(folder), runs_here():
        assert run_chain()[1] == ALL
    return folder


@pytest.fixture
def first(finished, tmp_path, monkeypatch):
    """The finished run of the chain, in a folder of its own, which is the current one."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return RunDir(next(tmp_path.glob("runs/chain/run_*")))


def run_chain(*overrides, choice=None):
    known = {path.resolve() for path in Path("runs").glob("chain/*/events/*")}
    result = memfit.run(CONFIG, overrides=overrides, choice=choice or Choice())
    new = [path for path in (result.path / "events").glob("*") if path.resolve() not in known]
    told = [json.loads(line) for path in new for line in path.read_text().splitlines()]
    result_of = {job: event for event in told if event["kind"] == "stage" for job in event["jobs"]}
    ran = sorted(event["job"] for event in told if event["kind"] == "admit")
    return result, ran, result_of


def why(result, job):
    events = [event for event in RunDir(result.path).events() if event["kind"] == "stage" and job in event["jobs"]]
    return [event["why"] for event in events if event["state"] == "running"][-1]


def reasons(result):
    """Why each job of a run ran, for the message of an assertion."""
    events = RunDir(result.path).events()
    return [(event["jobs"], event["state"], event["why"]) for event in events if event["kind"] == "stage"]


def edit(name, before, after):
    text = Path(name).read_text()
    assert before in text
    Path(name).write_text(text.replace(before, after))


def check_settings(first, *cases):
    """Change one setting after another, each against the first run: its jobs run, all others are reused."""
    for override, expected, *reason in cases:
        result, ran, states = run_chain(override)
        assert result.path != first.path
        assert ran == expected, reasons(result)
        assert {states[job]["state"] for job in states if job not in ran} <= {"reused"}
        assert [why(result, job) for job in expected[-1:]] == reason
    return result


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.proves("S1-17")
def test_stages_run_once_in_order_and_the_result_of_another_run_stays_when_that_is_deleted(first):
    order = [event["job"] for event in first.events() if event["kind"] == "admit"]
    assert order.index("gate") < order.index("square_2")
    again, ran, states = run_chain()
    assert (again.path, again.exit_code, ran) == (first.path, 0, [])
    assert (again.metrics["summed"], again.metrics["gate"]) == ({"sum": 4 + 9 + 16, "all": 3}, {"seen": 1})
    assert {states[job]["state"] for job in ALL} == {"kept"}
    second = check_settings(first, ("params.offset=5", ["last", "summed"], "offset 0 -> 5"))
    manifest = json.loads((second.path / "checkpoints/square_2.json").read_text())
    assert manifest["reused_from"] == str(first.path / "checkpoints/square_2.json")
    assert (second.path / "checkpoints/square_2/file.txt").stat().st_nlink == 2
    tables = [feather.read_table(run.path / "square_results.feather") for run in (first, second)]
    assert [one["peak_private_bytes"].to_pylist() for one in tables] == [[32 << 20] * 3, [None] * 3]  # it measured none
    shutil.rmtree(first.path)
    again, ran, _ = run_chain("params.offset=5")
    assert (again.path, ran, again.metrics) == (second.path, [], second.metrics)
    assert (second.path / "checkpoints/square_2/file.txt").read_text() == "9"


@pytest.mark.core
def test_a_changed_setting_runs_what_depends_on_it_and_says_why(first):
    guessed = {one.name: one for one in plan_run(CONFIG, overrides=["params.count=5"]).stages}["square"]
    assert (guessed.num_runs, guessed.waits_for) == (3, ["listed", "gate"])  # as many as that run had
    check_settings(
        first,
        ("params.limit=999", ["gate"], "limit 1000 -> 999"),
        ("params.unused=1", []),
        ("seed=3", ["last"], "seed 0 -> 3"),
        ("params.count=4", ["last", "listed", "square_4", "summed"], "listed and square gave another result"),
    )
    planned = {one.name: one for one in plan_run(CONFIG, overrides=["params.scale=2"]).stages}
    assert {name: dict(one.states) for name, one in planned.items()} == {
        "listed": {"reused": 1}, "square": {"ready": 1, "waiting": 2}, "gate": {"waiting": 1},
        "summed": {"waiting": 1}, "last": {"waiting": 1},
    }  # fmt: skip
    assert planned["square"].why == "scale 1 -> 2"


#: A file, a change in it, and the jobs that run after it.
EDITS = [
    ("chain_help.py", "value**2", "value**2 + 0 * value", ["square_1", "square_2", "square_3"]),
    ("chain.py", "list(range(params.count))", "[*range(params.count)]", ["listed"]),
]
#: The same for changes that run nothing.
IDLE_EDITS = [
    ("chain.py", "# a comment", "# another comment"),
    ("chain_help.py", '"""The square."""', '"""A square, of a number."""'),
    ("chain.py", "    unused: int = 0\n", "    unused: int = 0\n    newer: int = 0\n"),
]


@pytest.mark.core
def test_changed_code_or_data_runs_the_stages_that_use_it_and_nothing_else(first):
    for edited in IDLE_EDITS:
        edit(*edited)
    assert run_chain()[1] == []
    for file, before, after, _ in EDITS:
        edit(file, before, after)
    result, ran, _ = run_chain()
    assert ran == sorted(job for *_, jobs in EDITS for job in jobs)  # the same results: nothing after them runs
    assert result.path != first.path
    assert why(result, "listed").endswith("chain:listed changed")
    Path("data.txt").write_text("another")
    result, ran, _ = run_chain()
    assert (ran, why(result, "summed")) == (["summed"], "the data changed")  # the same sum: last is kept


@pytest.mark.core
def test_a_red_gate_ends_with_its_code_skips_the_rest_and_can_be_skipped_itself(chain):
    settings = ("params.limit=1", "params.count=2")
    result, ran, states = chain(*settings)
    assert (result.state, result.exit_code, ran) == ("stopped", 11, ["gate", "listed", "square_1"])
    assert [states[job]["state"] for job in ("square_2", "summed", "last")] == ["skipped"] * 3
    assert states["square_2"]["why"] == "gate stopped the run: 4 is above 1"
    outcome = json.loads((result.path / "outcome.json").read_text())
    assert (outcome["state"], outcome["exit_code"], outcome["why"]) == ("stopped", 11, "4 is above 1")
    again, ran, _ = chain(*settings)
    assert (again.exit_code, ran, again.path) == (11, [], result.path)
    skipped, ran, states = chain(*settings, "skip=[gate]")
    assert (skipped.exit_code, ran) == (0, ["last", "square_2", "summed"])
    assert states["gate"]["state"] == "passed"
    with pytest.raises(UsageError, match="stage listed cannot be skipped: summed reads it"):
        chain("skip=[listed]")


@pytest.mark.core
def test_until_stage_from_and_units_choose_what_runs(first):
    begun, ran, _ = run_chain("params.scale=7", "units=1", choice=Choice(until="square"))
    assert ran == ["gate", "square_1"]
    assert RunDir(begun.path).state == "completed"
    assert run_chain("params.scale=7", "units=1", choice=Choice(until="summed"))[1] == ["summed"]
    result, ran, _ = run_chain("params.scale=7", "units=1-2")
    assert ran == ["last", "square_2", "summed"]
    assert result.metrics["summed"]["sum"] == 7 * (4 + 9)
    assert run_chain("params.scale=7", "units=1-2", choice=Choice(anew="summed"))[1] == ["last", "summed"]
    with pytest.raises(UsageError, match="there is no stage 'sumed'") as caught:
        run_chain(choice=Choice(until="sumed"))
    assert "summed" in caught.value.remedy


@pytest.mark.slow
@pytest.mark.proves("S1-15")
def test_what_is_torn_and_what_a_new_stage_comes_before_is_made_anew_beside_the_finished_run(first):
    folder = first.path / "checkpoints"
    (folder / "square_1.json").write_text('{"schema_version": 1, "sta')
    (folder / "square_2/file.txt").unlink()
    second, ran, _ = run_chain()
    assert (ran, second.metrics["summed"]) == (["square_1", "square_2"], {"sum": 4 + 9 + 16, "all": 3}), reasons(second)
    assert second.path != first.path  # what builds on them may become another
    before = {path.name: path.read_text() for path in (second.path / "checkpoints").glob("*.json")}
    edit("chain.py", 'Stage("listed", listed, reads=("count",))', 'Stage("zero", zero, reads=()),\n'
         '        Stage("listed", listed, reads=("count",), needs=("zero",))')  # fmt: skip
    edit("chain.py", "def square", "def zero(context, params):\n    return {}\n\n\ndef square")
    third, ran, _ = run_chain()
    assert (ran, third.metrics["summed"]) == (["listed", "zero"], second.metrics["summed"])
    assert third.path != second.path and RunDir(second.path).state == "completed"
    assert {path.name: path.read_text() for path in (second.path / "checkpoints").glob("*.json")} == before


LAZY = """
import importlib, sys
from pathlib import Path
from memfit.pipeline import Context, Stage, Workload
from pydantic import BaseModel

class Params(BaseModel):
    pass

def train(context: Context, params: Params) -> dict:
    found = importlib.import_module("".join(["later", "_loaded"])).VALUE
    steps = context.dir / "steps"
    steps.write_text((steps.read_text() if steps.exists() else "") + found)
    return {"steps": steps.read_text()}

def check(context: Context, params: Params) -> dict:
    if not Path("ok").exists():
        raise ValueError("not yet")
    return {}

def lost(context: Context, params: Params) -> dict:
    return {}

LAZY = Workload(params=Params, stages=(
    Stage("train", train), Stage("check", check, needs=("train",)), Stage("lost", lost, needs=("check",)),
))
"""


@pytest.mark.slow
def test_code_that_is_loaded_unforeseen_and_changed_lets_nothing_of_it_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lazy.py").write_text(LAZY)
    Path("later_loaded.py").write_text("VALUE = 'a'\n")

    def run(view=None):
        return memfit.run({"experiment": "lazy", "target": "lazy:LAZY"}, view=view)

    def lose(run):
        return lambda: (run.path / "checkpoints/stage_lost.json").unlink(missing_ok=True)

    assert run().metrics == {"train": {"steps": "a"}}
    Path("later_loaded.py").write_text("VALUE = 'b'\n")
    changed = run()
    assert (changed.exit_code, changed.metrics) == (4, {"train": {"steps": "b"}})  # and not "ab"
    Path("ok").touch()
    lost = run(lose)  # a job that ended well, and its manifest is not there
    assert (lost.state, lost.exit_code, lost.statuses["lost"].cause) == ("failed", 4, "its result is not there")
    done = run()
    assert (done.path, done.exit_code) == (changed.path, 0)
    Path("later_loaded.py").write_text("VALUE = 'c'\n")
    again = run()
    assert (again.metrics["train"], again.path != done.path) == ({"steps": "c"}, True)
    assert json.loads((done.path / "checkpoints/stage_train.json").read_text())["result"] == {"steps": "b"}


UNDECLARED = """
from memfit.pipeline import Stage, Workload
from pydantic import BaseModel

class Params(BaseModel):
    rate: int = 0
    units: int = 1

def stage(name, run, **more):
    return Stage(name, run, each="n in params.units", reads=(), **more)

UNDECLARED = Workload(Params, (
    stage("listed", lambda context, params: {}),
    stage("setting", lambda context, params: {"rate": params.rate}),
    stage("stage", lambda context, params: context["listed"].result, after=("listed",)),
    stage("seed", lambda context, params: {"seed": context.seed}),
))

BAD = Workload(Params, (Stage("a", print, reads=("rates",)),))

def numbered(context, params):
    return {"n": context.unit, "before": context.previous and context.previous.result["n"]}

def joined(context, params):
    return {"first": context["first"].result, "meets": sorted(context.meets)}

JOINED = Workload(Params, (
    stage("first", numbered, in_order=True),
    Stage("other", numbered, each="k in params.units", reads=()),
    stage("joined", joined, needs=("first", "other")),
))
"""


def test_an_undeclared_setting_an_undeclared_stage_and_an_undeclared_seed_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("undeclared.py").write_text(UNDECLARED)
    result = memfit.run({"experiment": "undeclared", "target": "undeclared:UNDECLARED"})
    assert result.exit_code == 4
    assert "stage setting reads the setting 'rate', and does not say so" in result.statuses["setting_1"].cause
    assert "this stage reads stage listed, and does not say so" in result.statuses["stage_1"].cause
    assert "this stage reads the seed, and does not say so" in result.statuses["seed_1"].cause
    said = (result.path / "jobs/setting_1/err.log").read_text()
    assert "add it: Stage('setting', ..., reads=(..., 'rate'))" in said
    with pytest.raises(ConfigError, match="stage 'a' reads 'rates', which is no setting"):
        memfit.run({"experiment": "bad", "target": "undeclared:BAD"})


def test_a_unit_reads_its_own_unit_of_a_stage_with_the_same_units_and_the_one_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("undeclared.py").write_text(UNDECLARED)
    metrics = memfit.run({"experiment": "met", "target": "undeclared:JOINED", "params": {"units": 2}}).metrics
    first, second = {"n": 1, "before": None}, {"n": 2, "before": 1}
    assert [metrics["joined_1"], metrics["joined_2"]] == [{"first": one, "meets": ["first"]} for one in (first, second)]


@pytest.mark.slow
def test_code_that_is_edited_during_a_run_is_refused_and_the_same_command_is_right(chain):
    edit(
        "chain.py", "def listed(context: Context, params: Params) -> dict:", "def listed(context, params):\n    edit()"
    )
    edit("chain.py", "class Params", "def edit():\n"
         "    path = Path('chain_help.py')\n"
         "    path.write_text(path.read_text().replace('value**2', 'value**3'))\n\n\nclass Params")  # fmt: skip
    edit("chain.py", "import chain_help\n", "from pathlib import Path\n\nimport chain_help\n")
    result, _, _ = chain("params.count=1")
    assert result.exit_code == 4
    assert "the code of stage square is not what it was when this run started" in result.statuses["square_1"].cause
    again, _, _ = chain("params.count=1")
    assert (again.path, again.exit_code) == (result.path, 0)
    assert again.metrics["summed"]["sum"] == 8


@pytest.mark.proves("S1-26")
@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"a": {"needs": ["b"]}, "b": {"needs": ["a"]}}, "in a circle: .* -> "),
        ({"a": {"needs": ["c"]}}, "stage 'a' names the stage 'c', which there is not"),
        ({"a": {"each": "x of y"}}, "stage 'a' has each='x of y'"),
        ({"a b": {}}, "stage 'a b' has a bad name"),
        (
            {
                "fold": {"each": "fold in params.folds"},
                "mean": {"needs": ["fold"]},
                "gate": {"needs": ["mean"], "holds": "fold"},
            },
            "stage 'gate' holds 'fold' and waits for 'mean', which needs all units of it",
        ),
        ({"a": {}, "b": {"holds": "a"}}, "stage 'b' holds 'a', which has no units"),
        ({"a": {"run": "echo {params.rate}"}}, r"stage 'a' names the setting 'params\.rate', which is not there"),
        ({"a": {"run": None}}, r"stages\.a has no command"),
    ],
)
def test_stages_that_cannot_work_are_refused_in_words(stages, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = {name: {"run": "true", **own} for name, own in stages.items()}
    with pytest.raises(ConfigError, match=message):
        memfit.run({"experiment": "bad", "stages": stages, "params": {"folds": 2}})
    assert not Path("runs").exists()


def test_a_file_saved_under_another_name_is_found_again_and_none_is_written_over_another(tmp_path):
    context, places = Context(None, None, tmp_path / "unit", tmp_path), ("unit/own", "a/tokens", "b/tokens")
    paths = [tmp_path / one for one in places]
    for path in paths:
        path.parent.mkdir()
        path.write_text(str(path))
    for path in paths[:2]:
        found = context.once(path.parent.name, lambda path=path: path)
        assert context.once(path.parent.name, pytest.fail) == found and found.read_text() == str(path)
    with pytest.raises(UsageError, match="output b was written over output a: both are tokens"):
        context.save("b", paths[2])
    for name in ("", ".hidden", "../up"):
        with pytest.raises(UsageError, match=f"'{re.escape(name)}' cannot name an output"):
            context.save(name, [1])


def test_a_folder_is_replaced_whole_by_the_last_of_two_and_an_error_leaves_nothing(tmp_path):
    path = tmp_path / "arrays"
    with replacing(path) as first:
        with replacing(path) as second:
            (second / "b").mkdir(parents=True)
        (first / "a").mkdir(parents=True)
        assert [one.name for one in path.iterdir()] == ["b"]
    with pytest.raises(ValueError, match="no"), replacing(path) as third:
        (third / "c").mkdir(parents=True)
        raise ValueError("no")
    assert [one.name for one in (*tmp_path.iterdir(), *path.iterdir())] == ["arrays", "a"]


def test_a_large_raw_file_counts_by_size_time_and_sixteen_pieces_of_it(tmp_path):
    path, size = tmp_path / "raw.bin", 160 << 20
    with open(path, "wb") as file:
        file.truncate(size)
    first, stat = fingerprint_files(path), path.stat()
    found = []
    for at in (0, (1 << 20) - 1, 5 << 20, (size - (1 << 20)) // 15, 14 * (size - (1 << 20)) // 15, size - 1):
        with open(path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"x", at)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            found.append(fingerprint_files(path) != first)
            os.pwrite(file.fileno(), b"\0", at)
    assert found == [True, True, False, True, True, True]  # that of 5 MiB lies between two pieces

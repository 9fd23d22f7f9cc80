"""Settings resolve by one precedence, keep their origins, and come back the same from YAML and JSON."""

import itertools
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from memfit import rundir
from memfit.config import INTERNAL_VARIABLES, ByteSize, Resolved, Settings, fingerprint, resolve, resolve_nested
from memfit.errors import ConfigError


class Memory(Settings):
    reserve: ByteSize = 1 << 30
    cap: ByteSize | None = None


class Run(Settings):
    experiment: str = "demo"
    seed: int = 0
    rate: float = Field(0.1, gt=0)
    scheduler: Literal["cosine", "linear"] = "cosine"
    max_parallel: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    resume: bool = True
    runs: Path = Path("runs")
    codes: list[str] = Field(default_factory=list)
    lags: tuple[int, ...] = (1, 5)
    memory: Memory = Memory()
    params: dict[str, Any] = Field(default_factory=dict)


class Train(Settings):
    epochs: int = 12
    rate: float = 0.1


class Params(Settings):
    tag: str = "none"
    train: Train = Train()


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


PLACES = ("file", "environment", "override")


@pytest.mark.proves("S0-15")
@pytest.mark.parametrize("places", [c for n in range(4) for c in itertools.combinations(PLACES, n)], ids="+".join)
@pytest.mark.parametrize("name", ["seed", "memory.reserve", "params.train.epochs"])
def test_the_strongest_place_wins_and_is_the_origin(tmp_path: Path, places: tuple[str, ...], name: str) -> None:
    section, _, key = name.rpartition(".")
    nested = f"{{{key}: {11 << 20}}}"
    for outer in reversed(section.split(".") if section else []):
        nested = f"{{{outer}: {nested}}}"
    file = write(tmp_path, f"# a comment\n{nested}\n" if "file" in places else "")
    variable = "MEMFIT_" + name.replace(".", "__").upper()
    env = {variable: str(22 << 20)} if "environment" in places else {}
    overrides = [f"{name}={33 << 20}"] if "override" in places else []

    resolved = resolve(Run, file=file, env=env, overrides=overrides)

    value: Any = resolved.value
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if value is None:
            break
    default = {"seed": 0, "memory.reserve": 1 << 30, "params.train.epochs": None}[name]
    expected = {
        "file": (11 << 20, f"{file}:2"),
        "environment": (22 << 20, f"environment {variable}"),
        "override": (33 << 20, "--set"),
    }
    strongest = max(places, key=PLACES.index, default=None)
    assert (value, resolved.origins.get(name)) == (
        expected[strongest] if strongest else (default, None if name.startswith("params") else "default")
    )


def test_origins_name_the_line_of_each_key(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: 3\n\nmemory:\n  cap: 2GiB\nparams:\n  a:\n    b: [1,\n      2]\n    c: 1\n")
    origins = resolve(Run, file=file, env={}).origins
    lines = {name: origin.rpartition(":")[2] for name, origin in origins.items() if origin.startswith(str(file))}
    assert lines == {"seed": "1", "memory.cap": "4", "params.a.b": "7", "params.a.c": "9"}
    assert origins["memory.reserve"] == "default"


def test_every_setting_has_exactly_one_origin() -> None:
    origins = resolve(Run, env={}).origins
    assert set(origins.values()) == {"default"}
    assert set(origins) == (set(Run.model_fields) - {"memory"}) | {"memory.reserve", "memory.cap"}


def test_values_from_python_stand_for_a_file() -> None:
    values = {"runs": Path("a/b"), "lags": (2, 3), "memory": Memory(reserve=5 << 20), "params": {"x": {"y": 1.5}}}
    resolved = resolve(Run, values=values, env={"MEMFIT_MEMORY__CAP": "1MiB"})
    assert resolved.value.runs == Path("a/b")
    assert resolved.value.lags == (2, 3)
    assert resolved.value.memory == Memory(reserve=5 << 20, cap=1 << 20)
    assert resolved.value.params == {"x": {"y": 1.5}}
    assert resolved.origins["params.x.y"] == "argument"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_SEED", "7")
    assert resolve(Run).value.seed == 7
    assert resolve(Run, env={}).value.seed == 0


@pytest.mark.parametrize("variable", ["MEMFIT_MEMORY__RESERVE", "memfit_memory__reserve", "Memfit_Memory__Reserve"])
def test_variables_are_read_in_any_case(variable: str) -> None:
    assert resolve(Run, env={variable: "1GiB"}).value.memory.reserve == 1 << 30


def test_a_variable_meets_the_keys_of_a_free_section_in_any_case() -> None:
    values = {"params": {"Train": {"numEpochs": 1}}}
    env = {"MEMFIT_PARAMS__TRAIN__NUMEPOCHS": "2", "MEMFIT_PARAMS__TRAIN__NEW": "3"}
    assert resolve(Run, values=values, env=env).value.params == {"Train": {"numEpochs": 2, "new": 3}}


def test_variables_for_jobs_and_of_other_programs_are_no_settings() -> None:
    own = {rundir.RUN_DIR_VARIABLE, rundir.JOB_ID_VARIABLE, rundir.RANKS_VARIABLE}
    assert (
        own | {f"MEMFIT_{one}" for one in ("CLAIMS_DIR", "GENERATION", "HANG_SECONDS", "CANARY")} == INTERNAL_VARIABLES
    )
    env = dict.fromkeys([*INTERNAL_VARIABLES, "SEED", "MEMFITX_SEED", "XMEMFIT_SEED"], "1")
    assert resolve(Run, env=env).value == Run()


def test_of_two_overrides_the_later_counts() -> None:
    assert resolve(Run, env={}, overrides=["seed=1", "seed=2"]).value.seed == 2
    value = resolve(Run, env={}, overrides=["params.a.b=1", "params.a.c=2", "params.a={b: 3}"]).value
    assert value.params == {"a": {"b": 3, "c": 2}}


def test_a_key_of_the_params_may_be_named_alone_where_it_is_no_setting() -> None:
    values = {"seed": 3, "params": {"loader": {"params": {"batch_size": 8}}, "seed": 5}}
    value = resolve(Run, values=values, env={}, overrides=["loader.params.batch_size=2", "seed=1"]).value
    assert value.params == {"loader": {"params": {"batch_size": 2}}, "seed": 5} and value.seed == 1
    with pytest.raises(ConfigError, match="unknown_name"):
        resolve(Run, values=values, env={}, overrides=["unknown_name=1"])


def test_mappings_merge_and_lists_replace() -> None:
    values = {"lags": [1, 2, 3], "params": {"a": {"x": 1, "y": [1, 2]}}}
    overrides = ["lags=[9]", "params={a: {y: [3]}, b: 4}"]
    value = resolve(Run, values=values, env={}, overrides=overrides).value
    assert value.lags == (9,)
    assert value.params == {"a": {"x": 1, "y": [3]}, "b": 4}


def test_a_section_replaced_by_a_value_leaves_no_origins_behind() -> None:
    resolved = resolve(Run, values={"params": {"a": {"x": 1, "y": 2}, "ab": 1}}, env={}, overrides=["params.a=3"])
    assert resolved.value.params == {"a": 3, "ab": 1}
    assert {n: o for n, o in resolved.origins.items() if n.startswith("params")} == {
        "params.a": "--set",
        "params.ab": "argument",
    }


def test_an_empty_section_is_a_section(tmp_path: Path) -> None:
    file = write(tmp_path, "memory:\nparams:\n")
    assert resolve(Run, file=file, env={}).value == Run()
    assert resolve(Run, file=file, env={}, overrides=["params.x=1"]).value.params == {"x": 1}


def test_nothing_behind_the_equals_sign_is_the_empty_text_and_null_is_no_value() -> None:
    assert resolve(Run, env={}, overrides=["experiment="]).value.experiment == ""
    assert resolve(Run, env={"MEMFIT_EXPERIMENT": ""}).value.experiment == ""
    assert resolve(Run, values={"memory": {"cap": 1}}, env={}, overrides=["memory.cap=null"]).value.memory.cap is None


def test_text_settings_take_a_whole_number_and_codes_stay_text(tmp_path: Path) -> None:
    file = write(tmp_path, "experiment: 2024\ncodes: [0050, 12, no, 'null']\nruns: 007\nparams: {tag: 0050}\n")
    resolved = resolve(Run, file=file, env={})
    assert resolved.value.experiment == "2024"
    assert resolved.value.codes == ["0050", "12", "no", "null"]
    assert resolved.value.runs == Path("007")
    assert resolved.value.params == {"tag": "0050"}
    assert resolve_nested(resolved, "params", Params).value.tag == "0050"


def test_equals_signs_and_yaml_signs_stay_in_a_value() -> None:
    overrides = ["experiment=a=b: c # d", "params.x=*star", "params.y='[1]'"]
    value = resolve(Run, env={}, overrides=overrides).value
    assert value.experiment == "a=b: c # d"
    assert value.params == {"x": "*star", "y": "[1]"}


def test_a_nested_section_is_checked_later_with_origins_kept(tmp_path: Path) -> None:
    file = write(tmp_path, "params:\n  tag: x\n  train: {epochs: 3}\n")
    run = resolve(Run, file=file, env={"MEMFIT_PARAMS__TRAIN__EPOCHS": "4"}, overrides=["params.train.rate=1e-3"])
    nested = resolve_nested(run, "params", Params)
    assert nested.value == Params(tag="x", train=Train(epochs=4, rate=1e-3))
    assert nested.origins == {
        "params.tag": f"{file}:2",
        "params.train.epochs": "environment MEMFIT_PARAMS__TRAIN__EPOCHS",
        "params.train.rate": "--set",
    }


def test_a_nested_section_that_was_not_given_has_its_defaults() -> None:
    nested = resolve_nested(resolve(Run, env={}), "params", Params)
    assert nested.value == Params()
    assert set(nested.origins.values()) == {"default"}


@pytest.mark.proves("S0-15")
def test_a_model_without_settings_as_its_base_refuses_unknown_keys_too() -> None:
    class Loose(BaseModel):
        width: int = 1

    with pytest.raises(ConfigError, match=r"params\.widht is no setting \(--set\)"):
        resolve_nested(resolve(Run, env={}, overrides=["params.widht=2"]), "params", Loose)


def test_a_model_that_allows_any_key_takes_any_key() -> None:
    class Open(BaseModel, extra="allow"):
        width: int = 1

    assert resolve(Open, env={}, overrides=["other=2"]).value.model_extra == {"other": 2}


@pytest.mark.slow
def test_settings_resolve_the_same_in_another_process(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: 3\nparams: {tag: 0050, rate: 1e-3}\n")
    resolved = resolve(Run, file=file, env={}, overrides=["max_parallel=2"])
    (tmp_path / "resolved.json").write_text(resolved.to_json())
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_resolve import *
class Params(Settings):
    tag: str
    rate: float
resolved = Resolved.from_json(Run, Path("resolved.json").read_text())
print(resolve_nested(resolved, "params", Params).value, resolved.origins["params.tag"], fingerprint(resolved.value))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    expected = f"tag='0050' rate=0.001 {file}:2 {fingerprint(resolved.value)}\n"
    assert (done.stdout, done.stderr) == (expected, "")
    assert pickle.loads(pickle.dumps(resolved)) == resolved


def test_the_written_file_holds_nested_defaults_and_resolves_to_the_same(tmp_path: Path) -> None:
    run = resolve(Run, values={"params": {"tag": "x"}}, env={"MEMFIT_SEED": "3"}, overrides=["memory.cap=1536MiB"])
    before = run.to_yaml()
    text = run.to_yaml(resolve_nested(run, "params", Params))
    assert text.startswith("# All settings as they were resolved.")
    body = text.splitlines()
    assert "seed: 3" in body
    assert body[body.index("memory:") :] == [
        "memory:",
        "  reserve: 1GiB",
        "  cap: 1536MiB",
        "params:",
        "  tag: x",
        "  train:",
        "    epochs: 12",
        "    rate: 0.1",
    ]
    again = resolve(Run, file=write(tmp_path, text), env={})
    assert resolve_nested(again, "params", Params).value == resolve_nested(run, "params", Params).value
    assert "default" not in set(again.origins.values())
    assert run.to_yaml() == before


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
TRICKY = st.sampled_from(
    ["no", "1e3", "0050", "null", "~", "", " a", "a #b", "a: b", "- x", "\n", "é", "\x85", "%", "'"]
)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | TRICKY
KEY = (TEXT | TRICKY).filter(lambda key: key and "." not in key)
FREE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3), max_leaves=8
)
RUNS = st.fixed_dictionaries(
    {},
    optional={
        "experiment": TEXT | TRICKY,
        "seed": st.integers(),
        "rate": st.floats(min_value=0, exclude_min=True),
        "scheduler": st.sampled_from(["cosine", "linear"]),
        "max_parallel": st.just("auto") | st.integers(min_value=1),
        "resume": st.booleans(),
        "runs": st.sampled_from(["a", "a/b c", "007", "no"]),
        "codes": st.lists(TEXT | TRICKY, max_size=4),
        "lags": st.lists(st.integers(), max_size=4),
        "memory": st.fixed_dictionaries({}, optional={"cap": st.none() | st.integers(1 << 20, 1 << 50)}),
        "params": st.dictionaries(KEY, FREE, max_size=4),
    },
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(values=RUNS)
def test_settings_come_back_the_same_from_yaml_and_json(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    resolved = resolve(Run, values=values, env={})
    file = write(tmp_path_factory.getbasetemp(), resolved.to_yaml())
    again = resolve(Run, file=file, env={})
    assert again.value == resolved.value
    assert fingerprint(again.value) == fingerprint(resolved.value)
    assert resolve(Run, file=write(file.parent, again.to_yaml()), env={}).value == resolved.value
    assert Resolved.from_json(Run, resolved.to_json()) == resolved


def test_infinite_numbers_come_back_and_defaults_are_checked_as_given_values_are(tmp_path: Path) -> None:
    class Model(Settings):
        top: float = math.inf
        low: float = -math.inf
        one: float = 1
        many: dict[str, Train] = Field(default_factory=lambda: {"a": Train()})
        some: tuple[Train, ...] = (Train(epochs=3),)

    resolved = resolve(Model, env={})
    again = resolve(Model, file=write(tmp_path, resolved.to_yaml()), env={})
    assert again.value == resolved.value
    assert fingerprint(again.value) == fingerprint(resolved.value)

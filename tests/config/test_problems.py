"""Whatever is wrong with settings is named in words, all at once, with its place, the rule and what to do."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, field_validator, model_validator

from memfit.config import ByteSize, Settings, resolve, resolve_nested
from memfit.errors import ConfigError


class Folds(Settings):
    first: int = Field(1, ge=1)
    last: int = Field(5, lt=20)

    @model_validator(mode="after")
    def _order(self) -> "Folds":
        if self.first > self.last:
            raise ValueError(f"first fold {self.first} is after last fold {self.last}")
        return self


class Cosine(Settings):
    type: Literal["cosine"]
    floor: float = 0.1


class Linear(Settings):
    type: Literal["linear"]
    end: float = 0.0


class Run(Settings):
    experiment: str
    seed: int = 0
    rate: float = Field(0.1, gt=0, le=1)
    scheduler: Literal["cosine", "linear", "none"] = "cosine"
    max_parallel: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    resume: bool = True
    reserve: ByteSize = 0
    pair: tuple[int, int] = (1, 2)
    steps: list[Folds] = Field(default_factory=list)
    name: str = Field("x", pattern="[a-z]+", max_length=3)
    decay: Annotated[Cosine | Linear, Field(discriminator="type")] = Cosine(type="cosine")
    folds: Folds = Folds()
    params: dict[str, Any] = Field(default_factory=dict)

    @field_validator("seed")
    @classmethod
    def _lucky(cls, seed: int) -> int:
        if seed == 13:
            raise ValueError("13 is not a seed")
        return seed


def refused(**given: Any) -> ConfigError:
    given.setdefault("env", {})
    if "file" not in given:
        given.setdefault("values", {"experiment": "demo"})
    with pytest.raises(ConfigError) as caught:
        resolve(Run, **given)
    assert caught.value.exit_code == 2
    assert all((caught.value.what, caught.value.rule, caught.value.remedy))
    return caught.value


@pytest.mark.proves("S3-34")
@pytest.mark.parametrize(
    ("override", "what", "remedy"),
    [
        ("seed=abc", 'seed must be a valid integer, got "abc" (--set).', "give for example --set seed=0"),
        ("seed=3.0", "seed must be a valid integer, got 3.0 (--set).", "give for example --set seed=0"),
        ("seed=", 'seed must be a valid integer, got "" (--set).', "give for example --set seed=0"),
        ("seed=13", "seed: 13 is not a seed, got 13 (--set).", "give for example --set seed=0"),
        ("rate=fast", 'rate must be a valid number, got "fast" (--set).', "give for example --set rate=0.1"),
        ("rate=-1", "rate must be greater than 0, got -1 (--set).", "give for example --set rate=0.1"),
        ("folds=3", "folds must have names below it, got 3 (--set).", "give for example --set folds.first=1"),
        (
            "reserve=12",
            "reserve must be a size of 1MiB or more, such as 8GiB; a bare number is bytes, got 12 (--set).",
            "give for example --set reserve=12GiB",
        ),
        ("jobs=2", "jobs is no setting (--set).", "did you mean 'max_parallel'?"),
        ("experiment=[1]", "experiment must be a valid string, got [1] (--set).", "give --set experiment=..."),
        (
            "scheduler=cosin",
            "scheduler must be 'cosine', 'linear' or 'none', got \"cosin\" (--set).",
            "give for example --set scheduler=cosine",
        ),
        ("resume=yes", 'resume must be a valid boolean, got "yes" (--set).', "give for example --set resume=true"),
        (
            "max_parallel=atuo",
            "max_parallel must be 'auto' or must be a valid integer, got \"atuo\" (--set).",
            "give for example --set max_parallel=auto",
        ),
        (
            "max_parallel=0",
            "max_parallel must be 'auto' or must be greater than or equal to 1, got 0 (--set).",
            "give for example --set max_parallel=auto",
        ),
        (
            "reserve=lots",
            'reserve must be a size of 1MiB or more, such as 8GiB; a bare number is bytes, got "lots" (--set).',
            "give for example --set reserve=4GiB",
        ),
        ("pair=[1]", "pair[1] is missing.", "write pair: in the file, or give --set pair=..., or MEMFIT_PAIR=..."),
        ("pair=[1, x]", 'pair[1] must be a valid integer, got "x" (--set).', "give --set pair[1]=..."),
        (
            "name=A",
            "name: string should match pattern '[a-z]+', got \"A\" (--set).",
            "give for example --set name=x",
        ),
        ("steps=[{frist: 1}]", "steps[0].frist is no setting (--set).", "did you mean 'steps.first'?"),
        ("decay={type: linear, ned: 1}", "decay.ned is no setting (--set).", "did you mean 'decay.end'?"),
        ("sede=1", "sede is no setting (--set).", "did you mean 'seed'?"),
        ("frist=1", "frist is no setting (--set).", "did you mean 'steps.first'?"),
        ("folds.frist=1", "folds.frist is no setting (--set).", "did you mean 'folds.first'?"),
        ("folds.qqq=1", "folds.qqq is no setting (--set).", "known: folds.first, folds.last"),
        (
            "experiment=1.10",
            "experiment must be a valid string, got 1.1 (--set).",
            "give --set experiment=...",
        ),
        ("seed.x=1", "seed must be a valid integer (--set).", "give for example --set seed=0"),
        ("folds.first=9", "folds: first fold 9 is after last fold 5 (--set).", "give --set folds=..."),
        ("seed", '--set "seed" is not name=value.', "write --set NAME=VALUE"),
        ("a..b=1", '--set "a..b=1" is not name=value.', "write --set NAME=VALUE"),
        (
            "params.x=[1,",
            "params.x: it cannot be read as YAML: while parsing a flow node, expected the node content, but found "
            "'<stream end>', got \"[1,\" (--set).",
            "put quotes around a text, or close what is open",
        ),
        (
            "params={a: 1, a: 2}",
            'params: it cannot be read as YAML: a is set twice, first in line 1, got "{a: 1, a: 2}" (--set).',
            "put quotes around a text, or close what is open",
        ),
    ],
)
def test_a_bad_override_is_refused_in_words(override: str, what: str, remedy: str) -> None:
    error = refused(overrides=[override])
    assert (error.what, error.remedy) == (what, remedy)


@pytest.mark.proves("S2-14")
@pytest.mark.parametrize(
    ("variable", "what", "remedy"),
    [
        ("MEMFIT_SCHEDULER_TYPE", "names no setting", "did you mean 'MEMFIT_SCHEDULER'?"),
        ("MEMFIT_SEDE", "names no setting", "did you mean 'MEMFIT_SEED'?"),
        ("MEMFIT_FLODS__FIRST", "names no setting", "did you mean 'MEMFIT_FOLDS__FIRST'?"),
        ("MEMFIT_FOLDS__FRIST", "names no setting", "did you mean 'MEMFIT_FOLDS__FIRST'?"),
        ("MEMFIT_FOLDS__QQQ", "names no setting", "known: MEMFIT_FOLDS__FIRST, MEMFIT_FOLDS__LAST"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(variable: str, what: str, remedy: str) -> None:
    error = refused(env={variable: "1"})
    assert error.what == f"{variable} in the environment {what}."
    assert error.remedy == remedy


def test_a_variable_of_nothing_and_a_variable_with_an_empty_part_are_refused() -> None:
    assert "'' cannot be a key (environment MEMFIT_)." in refused(env={"MEMFIT_": "1"}).what
    assert "'' cannot be a key (environment MEMFIT_FOLDS____FIRST)." in refused(env={"MEMFIT_FOLDS____FIRST": "1"}).what


def test_what_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text('experiment: x\nname: "\\ud800"\nparams: {"\\udfff": 1, b: ["\\ud800"]}\n')
    error = refused(file=file, env={"MEMFIT_SCHEDULER": b"\xff".decode(errors="surrogateescape")})
    assert [line.partition(": write")[0] for line in error.what.splitlines()[1:]] == [
        f"  - name is no text ({file}:2); params.? is no text ({file}:3); params.b is no text ({file}:3); "
        "scheduler is no text (environment MEMFIT_SCHEDULER)"
    ]


def test_a_bad_variable_is_named_with_its_remedy() -> None:
    error = refused(env={"MEMFIT_SEED": "abc"})
    assert error.what == 'seed must be a valid integer, got "abc" (environment MEMFIT_SEED).'
    assert error.remedy == "give for example MEMFIT_SEED=0, or take it away: unset MEMFIT_SEED"


def test_a_missing_setting_is_named_with_all_ways_to_give_it() -> None:
    error = refused(values={})
    assert error.what == "experiment is missing."
    assert "Run" not in error.rule
    assert error.remedy == "write experiment: in the file, or give --set experiment=..., or MEMFIT_EXPERIMENT=..."


@pytest.mark.proves("C-33")
def test_every_bad_key_is_reported_at_once_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "experiment: x\nsheduler: linear\nseed: abc\n# a comment\nfolds:\n  first: 2\n  frist: 2\na.b: 1\ntrain:\n  x: 1\n"
    )
    error = refused(file=file, env={"MEMFIT_RESUME": "maybe"}, overrides=["rate=0", "nonsense"])
    lines = error.what.splitlines()
    assert lines[0] == "8 settings cannot be used:"
    assert sorted(lines[1:]) == sorted(
        [
            f"  - 'a.b' cannot be a key ({file}:8): write b: 1 below a: for a.b: 1",
            '  - --set "nonsense" is not name=value: write --set NAME=VALUE',
            f"  - sheduler is no setting ({file}:2): did you mean 'scheduler'?",
            f"  - folds.frist is no setting ({file}:7): did you mean 'folds.first'?",
            f"  - train is no setting ({file}:10): known: decay, experiment, folds, max_parallel, name, pair, params, "
            "rate, reserve, resume, scheduler, seed, steps",
            f'  - seed must be a valid integer, got "abc" ({file}:3): correct seed in {file}:3, for example to 0',
            "  - rate must be greater than 0, got 0 (--set): give for example --set rate=0.1",
            '  - resume must be a valid boolean, got "maybe" (environment MEMFIT_RESUME): '
            "give for example MEMFIT_RESUME=true, or take it away: unset MEMFIT_RESUME",
        ]
    )
    assert error.remedy == "correct each at the place named in brackets"


def test_a_rule_over_several_settings_names_where_they_came_from(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("experiment: x\nfolds:\n  last: 2\n")
    error = refused(file=file, overrides=["folds.first=3"])
    assert error.what == f"folds: first fold 3 is after last fold 2 ({file}:3, --set)."


def test_a_rule_over_all_settings_names_no_setting() -> None:
    class Model(Settings):
        a: int = 1

        @model_validator(mode="after")
        def _no(self) -> "Model":
            raise ValueError("a and b do not go together")

    with pytest.raises(ConfigError) as caught:
        resolve(Model, env={}, overrides=["a=2"])
    assert caught.value.what == "the settings: a and b do not go together (--set)."


def test_a_message_that_is_not_known_in_advance_still_names_the_setting() -> None:
    class Model(Settings):
        when: Annotated[str, Field(json_schema_extra={})] | None = None
        size: Annotated[float, Field(allow_inf_nan=False)] = 0.0
        kind: Annotated[Cosine | Linear, Field(discriminator="type")] = Cosine(type="cosine")

    with pytest.raises(ConfigError, match=r"size must be a finite number, got Infinity \(--set\)"):
        resolve(Model, env={}, overrides=["size=.inf"])
    with pytest.raises(ConfigError, match=r"kind: input tag 'x' found using 'type' does not match.*\(--set\)"):
        resolve(Model, env={}, overrides=["kind={type: x}"])


def test_a_nested_section_is_refused_with_full_names_and_their_places() -> None:
    class Train(Settings):
        epochs: int = 1

    class Params(Settings):
        train: Train = Train()
        tag: str

    run = resolve(Run, values={"experiment": "x"}, env={"MEMFIT_PARAMS__TRIAN__EPOCHS": "x"})
    with pytest.raises(ConfigError) as caught:
        resolve_nested(run, "params", Params)
    assert sorted(caught.value.what.splitlines()[1:]) == [
        "  - MEMFIT_PARAMS__TRIAN__EPOCHS in the environment names no setting: did you mean "
        "'MEMFIT_PARAMS__TRAIN__EPOCHS'?",
        "  - params.tag is missing: write tag: in the file, or give --set params.tag=..., or MEMFIT_PARAMS__TAG=...",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("- a\n", "holds a list at its top level."),
        ("3\n", "holds a single value at its top level."),
        ("a: 1\n b: 2\n", ":2:3 cannot be read: mapping values are not allowed here."),
        ("a: [1\n", ":2:1 cannot be read: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'."),
        ("a: 1\nb: !x 3\n", ":2:4 cannot be read: the tag !x is not read: write the value without it."),
        ("a: 1\nb: {<<: {c: 1}}\n", ":2:5 cannot be read: merge keys (<<) are not read: write the keys out."),
        ("a: 1\nb: \x00\n", ":2:4 cannot be read: unacceptable character #x0000: special characters are not allowed."),
        ("[" * 5000, ":1:1 cannot be read: it is nested too deeply."),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert what in refused(file=file).what


@pytest.mark.parametrize("key", ["[a, b]", "? {a: 1}\n", "''"])
def test_a_key_that_is_no_name_is_refused(tmp_path: Path, key: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"experiment: x\n{key}: 1\n")
    assert "cannot be a key" in refused(file=file).what
    assert f"{file}:2" in refused(file=file).what


def test_a_file_that_cannot_be_read_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    missing = refused(file=tmp_path / "confg.yaml")
    assert (missing.what, missing.remedy) == (f"{tmp_path}/confg.yaml is not there.", "did you mean 'config.yaml'?")
    assert refused(file=tmp_path / "none" / "x.yaml").remedy == "name a YAML file that is there"
    assert refused(file=tmp_path).what == f"{tmp_path} cannot be read: Is a directory."
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    assert refused(file=tmp_path / "latin.yaml").what.endswith("invalid continuation byte.")
    assert "iconv" in refused(file=tmp_path / "latin.yaml").remedy


def test_values_that_no_file_can_hold_are_refused() -> None:
    assert "a value of type object is no setting" in refused(values={"experiment": object()}).what
    assert refused(values={"experiment": "x", "params": {"a.b": 1}}).what.endswith("'a.b' cannot be a key (argument).")
    assert refused(values={"experiment": None}).remedy.startswith("set experiment to another value")

"""Sizes read and write as people give them; a fingerprint depends on the content and on nothing else."""

import dataclasses
import datetime
import enum
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from memfit.config import ByteSize, Settings, differences, fingerprint
from memfit.errors import ConfigError
from memfit.units import parse_bytes


class Model(Settings):
    size: ByteSize = 0
    path: Path = Path("a")


class Colour(enum.Enum):
    RED = "red"


@given(st.integers(min_value=1 << 20, max_value=1 << 53))
def test_a_size_comes_back_from_its_text(count: int) -> None:
    assert parse_bytes(Model(size=count).model_dump(mode="json")["size"]) == count


def test_a_size_is_given_as_text_and_kept_as_bytes() -> None:
    model = Model.model_validate({"size": "1.5GiB"})
    assert model.size == 3 << 29
    assert model.model_dump(mode="json")["size"] == "1536MiB"
    assert model.model_dump()["size"] == 3 << 29


@pytest.mark.parametrize("bad", ["lots", -1, 1.5, True, None, "-3", [1], "9" * 400])
def test_what_is_no_size_is_refused(bad: object) -> None:
    with pytest.raises(ValidationError, match="must be a size"):
        Model.model_validate({"size": bad})


@pytest.mark.parametrize("small", [1, 12, "12", "900KiB", (1 << 20) - 1])
def test_memory_of_less_than_a_mib_is_a_slip(small: object) -> None:
    with pytest.raises(ValidationError, match="must be a size of 1MiB or more"):
        Model.model_validate({"size": small})
    assert Model.model_validate({"size": 0}).size == 0 and Model.model_validate({"size": "1MiB"}).size == 1 << 20


def test_settings_are_frozen_and_refuse_unknown_keys() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Model().size = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        Model.model_validate({"sise": 3})


def test_a_fingerprint_sees_values_and_not_their_order_or_container() -> None:
    value = {"a": [1, 2.5, None, True], "b": {"x": "a/b"}}
    same = {"b": {"x": Path("a/b")}, "a": (np.int64(1), np.float64(2.5), None, True)}
    assert fingerprint(value) == fingerprint(same)
    assert fingerprint({"a": 1})[:8] == "015abd7f"  # as every release has it
    assert fingerprint(PureWindowsPath("a\\b")) == fingerprint("a/b")
    assert fingerprint(Colour.RED) == fingerprint("red")
    assert fingerprint(datetime.date(2024, 1, 31)) == fingerprint("2024-01-31")
    assert fingerprint({3, 1, 2}) == fingerprint([1, 2, 3])
    assert fingerprint(Model(size=1 << 20)) == fingerprint({"size": "1MiB", "path": "a"})


@pytest.mark.parametrize("pair", [(1, "1"), (1, 1.0), (1, True), (0.1, 0.1 + 2**-53), ([1], [1, None]), ({"a": 1}, {})])
def test_a_fingerprint_tells_different_values_apart(pair: tuple[object, object]) -> None:
    assert fingerprint(pair[0]) != fingerprint(pair[1])


def test_what_no_settings_file_can_hold_has_no_fingerprint() -> None:
    point = dataclasses.make_dataclass("Point", ["x"])
    for value in (object(), b"x", np.zeros(2), point(1)):
        with pytest.raises(ConfigError):
            fingerprint(value)


def test_a_fingerprint_is_the_same_in_a_process_with_another_hash_seed() -> None:
    code = "from memfit.config import fingerprint; print(fingerprint({'b': {'z', 'a', 'q'}, 'a': 0.1}))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {fingerprint({"a": 0.1, "b": {"z", "a", "q"}})}


def test_settings_that_differ_are_named_with_both_values() -> None:
    before, now = {"seed": 1, "train": {"lr": 0.1}}, {"seed": 1, "train": {"lr": 0.2, "decay": 0.0}}
    assert list(differences(before, now)) == [("train.lr", 0.1, 0.2), ("train.decay", None, 0.0)]

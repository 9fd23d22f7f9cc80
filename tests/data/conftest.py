"""Generated tables, and children that really build, read and die."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CHILD = Path(__file__).with_name("child.py")


def generate_table(
    num_dates: int = 12, num_assets: int = 7, num_features: int = 3, *, missing: float = 0.2, seed: int = 0
) -> pa.Table:
    """Rows in random order, a share of them absent, and a share of the values null."""
    rng = np.random.default_rng(seed)
    date, asset = (axis.ravel() for axis in np.indices((num_dates, num_assets)))
    kept = rng.permutation(len(date))[: max(1, round(len(date) * (1 - missing)))]
    columns: dict[str, Any] = {
        "date": np.datetime64("2024-01-01") + date[kept],
        "code": pa.array([f"A{code:03d}" for code in asset[kept]]),
    }
    for j in range(num_features):
        columns[f"f{j}"] = pa.array(rng.standard_normal(len(kept)), mask=rng.random(len(kept)) < missing / 4)
    columns["ret"] = pa.array(rng.standard_normal(len(kept)), mask=rng.random(len(kept)) < missing / 4)
    return pa.table(columns)


@pytest.fixture
def make_table() -> Callable[..., pa.Table]:
    return generate_table


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A small source of many row groups."""
    path = tmp_path / "source.parquet"
    pq.write_table(generate_table(60, 400, missing=0.1), path, row_group_size=1500)
    return path


@pytest.fixture
def start_child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Gives a function that starts the child with a verb and JSON arguments; ends what is left of it."""
    started: list[subprocess.Popen[str]] = []
    pipe = subprocess.PIPE

    def start(verb: str, **arguments: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(CHILD), verb, json.dumps(arguments, default=str)]
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture(scope="session")
def large_panel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A 195 MiB panel that a child built from 50 row groups, with the child's report of its own memory."""
    folder = tmp_path_factory.mktemp("large")
    source, num_assets, num_features, rng = folder / "source.parquet", 2000, 64, np.random.default_rng(1)
    codes = pa.array([f"A{code:05d}" for code in range(num_assets)] * 8)
    schema = pa.schema([("date", pa.date32()), ("code", pa.string())])
    for j in range(num_features):
        schema = schema.append(pa.field(f"f{j}", pa.float32()))
    with pq.ParquetWriter(source, schema, compression="none", use_dictionary=["code"]) as writer:
        for group in range(50):
            days = np.repeat(np.datetime64("2020-01-01") + np.arange(group * 8, group * 8 + 8), num_assets)
            numbers = [pa.array(column) for column in rng.random((num_features, len(days)), np.float32)]
            writer.write_table(pa.Table.from_arrays([pa.array(days), codes, *numbers], schema=schema))
    features = [f"f{j}" for j in range(num_features)]
    arguments = {"source": str(source), "directory": str(folder / "panels"), "features": features, "targets": []}
    command = [sys.executable, str(CHILD), "build", json.dumps({**arguments, "watch_memory": True})]
    output = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, text=True).stdout
    source.unlink()
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report

"""The lengths of a data set decide on the largest batch, and on how much of a batch fills up."""

import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import DataError, UsageError
from memfit.estimation import (
    LengthStatistics,
    describe_batches,
    equation_of_batch,
    read_lengths,
    split_batch,
)

LENGTHS = [3, 1, 7, 7, 512, 20]


def skewed(count=4000, seed=5):
    return np.random.default_rng(seed).lognormal(4.5, 0.8, count).astype(np.int64).clip(1, 512)


def statistics(lengths, max_length=None):
    return LengthStatistics.from_histogram(np.bincount(lengths), max_length)


def write(path, kind):
    if kind == "txt":
        path.write_text("".join(f"{n}\n" for n in LENGTHS) + "\n")
    elif kind == "csv":
        path.write_text("id,text,length\n" + "".join(f'{i},"a, b",{n}\n' for i, n in enumerate(LENGTHS)))
    elif kind == "bare.csv":
        path.write_text("".join(f"{n}\n" for n in LENGTHS))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"id": "a", "num_tokens": n}) + "\n" for n in LENGTHS))
    elif kind == "lists.jsonl":
        path.write_text("".join(json.dumps({"tokens": [0] * n}) + "\n" for n in LENGTHS))
    elif kind == "feather":
        pyarrow.feather.write_feather(pa.table({"id": ["a"] * 6, "length": LENGTHS}), path)
    elif kind == "lists.parquet":
        pq.write_table(pa.table({"tokens": [[0] * n for n in LENGTHS]}), path)
    elif kind == "arrow":
        table = pa.table({"length": pa.array(LENGTHS, pa.uint16())})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=4)
    return path


@pytest.mark.parametrize(
    "kind", ["txt", "csv", "bare.csv", "jsonl", "lists.jsonl", "feather", "lists.parquet", "arrow"]
)
def test_every_kind_of_file_gives_the_same_distribution(tmp_path, kind):
    found = read_lengths(write(tmp_path / f"lengths.{kind}", kind))
    assert (found.count, found.longest, found.mean) == (6, 512, sum(LENGTHS) / 6)
    assert found.histogram.nonzero()[0].tolist() == [1, 3, 7, 20, 512]
    assert found == statistics(LENGTHS)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "3\nfour\n", r"a\.txt holds no lengths: .*'four'"),
        ("a.txt", "3\n-1\n", r"-1"),
        ("a.txt", "99999999\n", r"99999999"),
        ("a.txt", "3.5\n", r"'3\.5'"),
        ("a.txt", "", r"Empty"),
        ("a.csv", "id,size\n1,2\n", r"2 columns, none of them named length(?s:.*)known: id, size"),
        ("a.csv", "id,length\n1,\n", r"null values"),
        ("a.csv", "id,length\n1\n", r"2 columns"),
        ("a.jsonl", '{"length": true}\n', r"bool values"),
        ("a.jsonl", '{"length": 1}\n{"other": 1}\n', r"a missing value"),
        ("a.jsonl", "{\n", r"JSON parse error"),
        ("a.parquet", "no table", r"Is this a 'parquet'"),
        ("a.feather", "no table", r"Could not read schema"),
        ("a.xlsx", "1", r"does not say by its name"),
        ("a.txt", b"\xff\xfe", r"conversion error"),
    ],
)
def test_what_is_no_length_is_refused_with_a_rule_and_a_remedy(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said) as error:
        read_lengths(path)
    assert "rule:" in str(error.value) and "do:" in str(error.value)


def test_a_file_that_is_not_there_and_columns_of_other_types_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt"):
        read_lengths(tmp_path / "none.txt")
    for values, said in (([1.5], "double values"), (["a"], "string values"), ([1, None], "a missing value")):
        pq.write_table(pa.table({"length": values}), tmp_path / "odd.parquet")
        with pytest.raises(DataError, match=said):
            read_lengths(tmp_path / "odd.parquet")


def test_a_large_file_takes_memory_for_a_piece_of_it(tmp_path):
    path = tmp_path / "large.txt"
    path.write_text("".join(f"{n}\n" for n in range(1000)) * 140)
    tracemalloc.start()
    found = read_lengths(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.count == 140_000 and peak < 4 << 20


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.integers(1, 40))
def test_statistics_are_those_of_the_sequences_cut_one_by_one(lengths, most):
    found = statistics(lengths, max_length=most)
    cut = sorted(min(n, most) for n in lengths)
    assert (found.count, found.longest, int(found.histogram.sum())) == (len(cut), cut[-1], len(cut))
    assert found.mean == pytest.approx(sum(cut) / len(cut))
    assert found.truncated_share == sum(n > most for n in lengths) / len(lengths)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 9))
def test_no_batch_is_larger_than_the_worst_one_and_every_token_is_in_one(lengths, batch, seed):
    found = describe_batches(statistics(lengths), batch=batch, max_length=30, seed=seed)
    assert found["longest_tokens"] == max(lengths)
    assert found["largest_batch_tokens"] <= found["worst_batch_tokens"] <= max(*lengths, 1, 1) * batch
    total = found["mean_batch_tokens"] * -(-len(lengths) // batch)
    assert total * (1 - found["pad_share"]) == pytest.approx(sum(lengths))


def test_padding_to_the_longest_of_the_batch_saves_what_the_data_says():
    short = describe_batches(statistics(skewed()), batch=8, max_length=512)
    equal = describe_batches(statistics([512] * 64), batch=8, max_length=512)
    assert 0.2 < short["saving"] < 0.8
    assert short["saving"] == pytest.approx(1 - short["mean_batch_tokens"] * 500 / (4000 * 512))
    assert equal["saving"] == equal["pad_share"] == 0
    assert short == describe_batches(statistics(skewed()), batch=8, max_length=512)


def test_cutting_bounds_the_largest_batch():
    found = describe_batches(statistics([10, 2000, 30, 40]), batch=4, max_length=128)
    assert found["largest_batch_tokens"] == 4 * 128


def test_batches_without_a_size_are_refused():
    with pytest.raises(UsageError, match="batch is 0"):
        describe_batches(statistics([1]), batch=0, max_length=8)
    with pytest.raises(UsageError, match="max_length is 0"):
        statistics([1], max_length=0)


@pytest.mark.slow
def test_an_epoch_of_very_many_sequences_is_thinned_and_keeps_its_longest():
    counts = np.zeros(901, np.int64)
    counts[[10, 900]] = 1 << 36, 1
    found = describe_batches(LengthStatistics.from_histogram(counts), batch=8, max_length=900)
    assert found["largest_batch_tokens"] == found["worst_batch_tokens"] == 8 * 900


def test_the_size_of_a_batch_is_an_equation():
    assert equation_of_batch(8, 16, 1) == "8 samples x 16 microbatches x 1 device = 128 samples an update"
    assert equation_of_batch(1, 1, 2) == "1 sample x 1 microbatch x 2 devices = 2 samples an update"
    assert split_batch(128, 8) == 16
    with pytest.raises(UsageError, match=r"100 samples(?s:.*)take 96 samples"):
        split_batch(100, 8, world_size=2)
    with pytest.raises(UsageError, match="samples is 0"):
        equation_of_batch(0, 1, 1)

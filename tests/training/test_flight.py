"""The record of what was alive when an allocation failed."""

import gc
import json

import pytest
import torch

from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, RunDir, record
from memfit.training import OomKind, _flight, write_flight_record


@pytest.fixture
def trained():
    """A model with gradients and optimizer states."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A run that this process is job ``fold_1`` of; gives the job's folder."""
    run = RunDir.create(tmp_path, "demo", "0" * 64)
    run.job_dir("fold_1").mkdir()
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(run.path))
    monkeypatch.setenv(JOB_ID_VARIABLE, "fold_1")
    return run.job_dir("fold_1")


def write(trained, **changed):
    model, optimizer = trained
    given = {"model": model, "optimizer": optimizer, "where": {"epoch": 3, "step": 7, "microbatch_size": 16}}
    return write_flight_record("no room", OomKind.HOST, **{**given, **changed})


@pytest.mark.proves("S1-12")
def test_a_record_tells_what_failed_where_and_what_lived(trained, job):
    for step in range(30):
        record("step", step=step)
    path = write(trained)
    assert path == job / "oom_1.json"
    content = json.loads(path.read_text())
    assert (content["kind"], content["error"]) == ("host", "no room")
    assert content["where"] == {"epoch": 3, "step": 7, "microbatch_size": 16}
    assert content["host"]["rss_bytes"] > 10_000_000
    assert content["host"]["pss_bytes"] > 0
    assert content["host"]["live_bytes"] > 0
    assert all(limit["limit_bytes"] > 0 and limit["source"] for limit in content["limits"])
    assert content["limits"]
    assert [event["step"] for event in content["events"]] == list(range(10, 30))


def test_each_kind_of_tensor_has_its_owners_name_and_size(trained, job, monkeypatch):
    monkeypatch.setattr(_flight, "_MAX_TENSORS", 10_000)  # other tests' tensors may still live
    lines = json.loads(write(trained).read_text())["tensors"]["largest"]
    found = {line["owner"]: (line["shape"], line["dtype"], line["bytes"], line["device"]) for line in lines}
    weights = ([128, 64], "float32", 128 * 64 * 4, "cpu")
    for owner in ("parameter 0.weight", "gradient 0.weight", "optimizer exp_avg 0.weight"):
        assert found[owner] == weights
    assert found["buffer 1.running_mean"] == ([128], "float32", 512, "cpu")
    assert found["optimizer exp_avg_sq 1.bias"] == ([128], "float32", 512, "cpu")


def test_a_tensor_that_refuses_to_be_read_leaves_the_others_told(trained, job):
    class Refusing(torch.Tensor):
        def untyped_storage(self):
            raise TypeError("no storage")

    refusing = torch.zeros(3).as_subclass(Refusing)
    tensors = json.loads(write(trained).read_text())["tensors"]
    assert tensors["num_tensors"] > 0
    del refusing


def test_the_largest_come_first_alike_ones_together_and_views_count_once(trained, job, monkeypatch):
    monkeypatch.setattr(_flight, "_MAX_TENSORS", 10_000)  # other tests' tensors may still live
    activations = [torch.zeros(511, 1024) for _ in range(3)]
    views = [one[:8] for one in activations]
    batch = torch.zeros(1023, 1024, dtype=torch.float64)
    tensors = json.loads(write(trained).read_text())["tensors"]
    sizes = [line["bytes"] for line in tensors["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    own = [line for line in tensors["largest"] if line["shape"] in ([511, 1024], [1023, 1024], [8, 1024])]
    assert [(line["owner"], line["count"], line["bytes"]) for line in own] == [
        ("other", 1, 1023 << 13),
        ("other", 3, 3 * 511 << 12),
    ]
    assert tensors["tensors_bytes"]["cpu"] >= sum(line["bytes"] for line in own)
    del views, batch


def test_a_record_keeps_nothing_alive(trained, job):
    batch = torch.zeros(16)
    before = len(gc.get_referrers(batch))
    assert write(trained)
    assert len(gc.get_referrers(batch)) == before


def test_records_are_numbered_bounded_and_short(trained, job, monkeypatch):
    monkeypatch.setattr(_flight, "MAX_RECORDS", 3)
    names = [write(trained) for _ in range(4)]
    assert [path and path.name for path in names] == ["oom_1.json", "oom_2.json", "oom_3.json", None]
    (job / "oom_3.json").unlink()
    path = write_flight_record("x" * 10**6, OomKind.HOST, model=trained[0], optimizer=None, where={})
    assert path.stat().st_size < 100_000


def test_outside_a_run_nothing_is_written(trained, monkeypatch):
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    assert write(trained) is None


@pytest.mark.parametrize("where", [{"what": object()}, {}])
def test_what_cannot_be_written_ends_nothing(trained, job, where):
    if not where:
        job.rmdir()
    assert write(trained, where=where) is None
    assert not list(job.glob("oom_*"))


def test_a_part_that_cannot_be_read_says_why_and_the_others_are_there(trained, job, monkeypatch):
    def short():
        raise MemoryError("no room for this either")

    monkeypatch.setattr(gc, "get_objects", short)
    content = json.loads(write(trained).read_text())
    assert content["tensors"] == "not read: MemoryError: no room for this either"
    assert content["host"]["rss_bytes"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the allocator's snapshot needs a CUDA device")
def test_on_cuda_the_allocators_snapshot_lies_beside_the_record(trained, job):
    held = torch.zeros(1 << 20, device="cuda")
    content = json.loads(write(trained).read_text())
    assert content["devices"]["cuda:0"]["allocated_bytes"] >= held.nbytes
    assert (job / "oom_1_snapshot.pickle").stat().st_size > 0

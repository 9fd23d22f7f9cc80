"""A clean-up that says what it freed, and a detector of what grows."""

import gc
import inspect
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import memfit
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, RunDir
from memfit.training import BySample, LeakDetector, Trainer, clean_up


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that this process is a job of."""
    run = RunDir.create(tmp_path, "demo", "0" * 64)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(run.path))
    monkeypatch.setenv(JOB_ID_VARIABLE, "fold_1")
    return run


class Cycle:
    """Refers to itself and holds a mebibyte."""

    def __init__(self):
        self.me = self
        self.held = torch.zeros(1 << 18)


@pytest.mark.proves("S1-01", "S4-38")
@pytest.mark.slow
def test_a_clean_up_tells_what_it_freed_and_cost(run):
    gc.collect()
    gc.disable()
    try:
        Cycle()
        done = clean_up()
    finally:
        gc.enable()
    assert not any(type(one) is Cycle for one in gc.get_objects())
    assert done.num_objects >= 2
    assert done.host_bytes >= 1 << 20
    assert done.seconds > 0
    (event,) = run.events()
    assert (event["kind"], event["num_objects"]) == ("cleanup", done.num_objects)


@pytest.mark.proves("S1-03", "S4-11")
@pytest.mark.parametrize("fails_at", [None, 4])
def test_a_training_cleans_up_after_an_out_of_memory_and_on_no_schedule(run, fails_at):
    steps = []

    def loss(model, batch):
        steps.append(len(batch))
        if len(steps) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(batch).square().sum(), len(batch)

    trainer = Trainer(torch.nn.Linear(3, 1), loss=loss, split=BySample())
    trainer.fit([torch.ones(4, 3)] * 5, num_epochs=4, preflight=False)
    assert len(steps) >= 20
    assert sum(event["kind"] == "cleanup" for event in run.events()) == (fails_at is not None)


@pytest.mark.proves("S1-31", "S4-10", "C-01")
def test_nothing_but_a_clean_up_empties_the_device_s_cache():
    package = Path(memfit.__file__).parent
    assert [path.name for path in package.rglob("*.py") if ".empty_cache()" in path.read_text()] == ["_oom.py"]
    assert inspect.getsource(clean_up).count(".empty_cache()") == 1


def train_step(model, optimizer):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def loop():
    """``loop(num_epochs, extra)``: the leaks by epoch, in a real training with 40 times ``extra(model)`` in each epoch."""

    def train(num_epochs, extra=lambda model: None, detector=None):
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        detector = detector or LeakDetector()
        leaks = {}
        gc.collect()  # what earlier tests left would be freed within the loop, and hide its growth for two epochs
        for epoch in range(1, num_epochs + 1):
            train_step(model, optimizer)
            for _ in range(40):
                extra(model)
            leak = detector.end_epoch()
            if leak:
                leaks[epoch] = leak
        return leaks

    return train


def test_a_clean_loop_has_no_leak(loop):
    # a hundredth of the usual floor: not even 10 KiB more per epoch
    assert loop(12, detector=LeakDetector(floor_bytes=10 << 10, floor_objects=1000)) == {}


@pytest.mark.proves("S1-06")
def test_garbage_that_a_collection_would_free_is_no_leak(loop):
    gc.disable()
    try:
        assert loop(7, lambda model: Cycle()) == {}
    finally:
        gc.enable()


class Recorder:
    """Keeps what it is given."""

    def __init__(self):
        self.kept = []


@pytest.mark.slow
def test_losses_kept_with_their_graphs_are_found_within_five_epochs_by_shape_and_by_name(loop, run, monkeypatch):
    module = types.ModuleType("kept_here")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.HISTORY = []
    leaks = loop(5, lambda model: module.HISTORY.append(model(torch.randn(256, 64)).square().mean()))
    assert list(leaks) == [5]
    leak = leaks[5]
    assert leak.series == "host heap"
    assert leak.slope == pytest.approx(40 * 256 * (64 + 128 + 8) * 4, rel=0.5)
    assert "Tensor [256, 128] torch.float32 on cpu: 80 more, 10.0 MiB" in leak.holders
    assert "list kept_here.HISTORY: 80 elements more" in leak.holders
    assert str(leak).startswith("host heap: ")
    events = [event for event in run.events() if event["kind"] == "leak"]
    assert [event["series"] for event in events] == ["host heap"]


@pytest.mark.proves("C-02")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("series", "keep"),
    [
        ("host heap", lambda kept: kept.append(np.zeros((100, 100)))),
        ("host heap", lambda kept: kept.append(bytes(50_000))),
        ("Python objects", lambda kept: kept.extend([i] for i in range(1000, 2000))),
    ],
    ids=["arrays", "bytes", "small objects"],
)
def test_what_an_attribute_gathers_is_found_whoever_holds_its_memory(loop, series, keep):
    recorder = Recorder()
    leaks = loop(5, lambda model: keep(recorder.kept))
    assert leaks[5].series == series
    assert any(text.startswith("list Recorder.kept: ") for text in leaks[5].holders), leaks[5]


@pytest.mark.slow
def test_growth_that_ends_is_no_leak_and_a_lasting_one_is_not_said_every_epoch(loop):
    kept = []
    assert loop(8, lambda model: kept.append(torch.zeros(1 << 16)) if len(kept) < 80 else None) == {}
    kept.clear()
    assert list(loop(14, lambda model: kept.append(torch.zeros(1 << 14)))) == [5, 13]


def test_the_detector_leaves_the_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    detector = LeakDetector()
    for _ in range(3):
        detector.end_epoch()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_a_tensor_whose_size_is_a_symbol_is_left_out():
    """As ``torch.compile`` keeps them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(7, 4), symbolic_context=context)
    assert isinstance(fake.numel(), torch.SymInt)
    detector, grown, leaks = LeakDetector(), [], []
    for _ in range(6):
        grown.append([object() for _ in range(200_000)])
        leaks.append(detector.end_epoch())
    assert any(leaks)

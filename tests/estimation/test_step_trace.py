"""A step of which nothing is known is followed through its phases, and counts what a real run of it allocates."""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from memfit.errors import UntraceableError
from memfit.estimation import Trace, estimate_step, find_peaks, part, trace

WIDTH = 64
LENGTHS = np.array([5, 90, 40])
VALUES = np.ones((LENGTHS.sum(), WIDTH), np.float32)

trace_step = partial(trace, real_data=True)
Make = Callable[[], Callable[[], object]]


def make_ragged() -> Callable[[], object]:
    """Rows of lists of different lengths, padded to the longest of them: shapes that depend on the batch."""
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        lengths = torch.from_numpy(LENGTHS)
        longest = int(lengths.max())
        is_there = torch.arange(longest) < lengths[:, None]
        padded = torch.zeros(len(LENGTHS), longest, WIDTH)
        padded[is_there] = torch.from_numpy(VALUES)
        loss = model(padded)[is_there].square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measure(make: Make) -> int:
    """The most bytes that the second run of a step holds beside what was there before."""
    step = make()
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    alive = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def peak_of(trace: Trace) -> tuple[int, dict[str, int]]:
    peak = max(find_peaks(trace).values(), key=lambda one: one.num_bytes)
    return peak.num_bytes, {str(name): size for name, size in peak.parts.items()}


def test_a_ragged_step_counts_what_a_real_run_of_it_allocates() -> None:
    traced = trace_step(make_ragged, cuda=False)
    total, parts = peak_of(traced)
    before = sum(parts.get(name, 0) for name in ("weights", "optimizer", "inputs"))
    real = measure(make_ragged)
    assert total - before == pytest.approx(real, abs=512)
    assert traced.notes == (), "lengths and masks are those of the batch, and no guesses"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layers", "both_ways"), [(nn.LSTM, 1, False), (nn.LSTM, 2, True), (nn.GRU, 2, False)])
def test_a_recurrent_step_counts_what_onednn_keeps(kind: type[nn.RNNBase], layers: int, both_ways: bool) -> None:
    def make() -> Callable[[], object]:
        model = kind(64, 128, layers, bidirectional=both_ways)
        inputs = torch.zeros(60, 8, 64)

        def step() -> None:
            model(inputs)[0].sum().backward()
            model.zero_grad()

        return step

    total, parts = peak_of(trace_step(make, cuda=False))
    before = sum(parts.get(name, 0) for name in ("weights", "buffers", "inputs"))
    assert total - before == pytest.approx(measure(make), rel=0.05)


def test_phases_and_parts_show_without_being_told() -> None:
    peaks = find_peaks(trace_step(make_ragged, cuda=False))
    assert list(peaks) == ["build", "forward", "backward", "step"]
    weights = 4 * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH + WIDTH)
    for name in ("forward", "backward", "step"):
        assert peaks[name].parts["weights"] == weights
        assert peaks[name].parts["inputs"] == VALUES.nbytes + LENGTHS.nbytes
        assert 2 * weights <= peaks[name].parts["optimizer"] <= 2 * weights + 4 * 4, "the second step holds the states"
    assert peaks["step"].parts["gradients"] == weights
    assert peaks["forward"].parts["activations"] > len(LENGTHS) * LENGTHS.max() * 8 * WIDTH * 4


def test_each_microbatch_has_a_forward_and_a_backward_pass() -> None:
    def make() -> Callable[[], object]:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            optimizer.zero_grad()
            for _ in range(3):
                torch.autograd.backward(model(torch.from_numpy(VALUES)).sum())
            optimizer.step()

        return step

    phases = [event.phase for event in trace_step(make, num_iterations=1).events if event.phase != "build"]
    changes = [new for old, new in zip(["", *phases], phases, strict=False) if new != old]
    assert [name for name in changes if name != "step"] == ["forward", "backward"] * 3


def test_on_cuda_the_update_runs_over_all_weights_at_once_unless_it_is_told_otherwise() -> None:
    def made_with(foreach: bool | None) -> Make:
        def make() -> Callable[[], object]:
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
            optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)

            def step() -> None:
                model(torch.from_numpy(VALUES)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return make

    at_once, one_by_one = (
        find_peaks(trace_step(made_with(foreach)))["step"].parts["temporaries"] for foreach in (None, False)
    )
    weight = 4 * WIDTH * WIDTH
    assert at_once >= 8 * weight > 3 * weight >= one_by_one


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, lambda _: torch.linspace(0, 1, 4, dtype=torch.float32).tolist()[0]]
)
def test_a_step_that_looks_at_what_is_computed_gets_a_guess_that_is_noted(read: Callable[..., float]) -> None:
    def make() -> Callable[[], object]:
        model = nn.Linear(WIDTH, WIDTH)

        def step() -> None:
            loss = model(torch.from_numpy(VALUES)).sum()
            if read(loss) < 1e9:
                loss.backward()

        return step

    assert trace_step(make).notes == ("a number that depends on the data is assumed to be 1.0",)


def test_what_cannot_be_followed_says_what_and_where_and_leaves_torch_as_it_was() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.numpy() + 1)

    def make() -> Callable[[], object]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reads())
        return lambda: model(torch.from_numpy(VALUES))

    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with pytest.raises(UntraceableError) as caught:
        trace_step(make)
    assert caught.value.what
    assert torch.autograd._engine_run_backward is engine  # type: ignore[attr-defined]
    assert make_ragged()() is None, "real steps run as before"


def test_an_estimate_of_a_step_has_all_four_figures_with_their_bounds() -> None:
    found = estimate_step(make_ragged)
    assert (found.method, found.verdict) == ("traced", None)
    sizes = [found.device[name].value for name in ("allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes")]
    assert sizes == sorted(sizes) and sizes[0] > VALUES.nbytes
    assert all(one.upper >= one.value for one in found.device.values())


def test_a_step_keeps_what_a_convolution_may_take_the_streams_and_what_its_optimizer_may_take() -> None:
    class Roomy(torch.optim.SGD):
        slack_bytes = 12_345

    def make() -> Callable[[], object]:
        model = nn.Conv2d(3, 8, 3, padding=1)
        optimizer = Roomy(model.parameters(), 0.1)

        def step() -> None:
            with part("collectives", stream=1):
                _received = torch.empty(256)
            model(torch.zeros(2, 3, 16, 16)).sum().backward()
            optimizer.step()

        return step

    traced = trace_step(make)
    unfolded, copies = 2 * 16 * 16 * 3 * 9 * 4, 4 * (2 * 16 * 16 * (3 + 8) + 8 * 3 * 9)
    tiles = 36 * 4 * (2 * 4 * 4 * (3 + 8) + 3 * 8)
    assert traced.convolution_slack == {"forward": unfolded - copies, "backward": unfolded - tiles}
    assert traced.slack_bytes == 12_345
    assert set(traced.streams.values()) == {1}


def test_a_step_may_convert_and_copy_its_model() -> None:
    def make() -> Callable[[], object]:
        model = nn.Linear(WIDTH, WIDTH, bias=False).double()
        average = copy.deepcopy(model).requires_grad_(False)

        def step() -> None:
            batch = torch.zeros(8, WIDTH, dtype=torch.float64)
            (model(batch) - average(batch)).sum().backward()
            model.zero_grad()

        return step

    assert find_peaks(trace_step(make))["forward"].parts["weights"] == 2 * 8 * WIDTH * WIDTH

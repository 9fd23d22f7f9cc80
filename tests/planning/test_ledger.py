"""What a training takes line by line: its sums by phase and node, against a node's memory, and what would fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.amounts import Amount, Layout
from memfit.memory import Footprint, PhasePeak
from memfit.planning import Forecast, Ledger, Line, describe_batch, footprint_lines, step_line

GB, GIB = 10**9, 1 << 30


def task(size, name="x", **more):
    return Line(name, Amount(size, "task"), "", "computed", **more)


def sums(ledger):
    return {phase: size.bytes for phase, size in ledger.by_phase().items()}


LINES = (
    Line("interpreter", Amount(100, "process"), "", "measured"),
    task(50, "data"),
    Line("training workers", Amount(10, "process"), "", "measured", phases=("train", "checkpoint"), number=3),
    task(20, "training dataset copies", phases=("train", "checkpoint")),
    task(5, "training batches", phases=("train", "checkpoint"), in_shm=True),
    task(90, "validation loaders", phases=("validate",)),
    Line("checkpoint", Amount(70, "node"), "", "computed", phases=("checkpoint",)),
    Line("training step", Amount(999, "gpu", "device"), "", "computed", "device"),
)
TWO = Ledger(Layout(1, 2, gpus_per_node=2), LINES)


@pytest.mark.proves("S3-21")
def test_a_node_has_each_line_as_often_as_its_scope_says_and_no_device_memory():
    assert sums(TWO) == {"train": 2 * 205, "validate": 2 * 240, "checkpoint": 2 * 205 + 70}
    assert (TWO.peak, TWO.shm.bytes) == (Amount(480, "node"), 10)
    assert TWO.on_node(LINES[-1]) == Amount(2 * 999, "node", "device")
    with pytest.raises(TypeError):
        TWO.peak + TWO.on_node(LINES[-1])


@given(st.integers(1, 64), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5))
def test_what_each_rank_has_is_there_for_each_rank(tasks, sizes):
    lines = tuple(task(size) for size in sizes)
    assert Ledger(Layout(1, tasks), lines).peak.bytes == tasks * sum(sizes)


def test_a_step_is_on_each_gpu():
    parts = {"weights": 40, "gradients": 40, "optimizer": 80, "activations": 30}
    sizes = {"allocated_bytes": {"value": 200}, "device_bytes": {"upper": 300}}
    answer = {"device": sizes, "parts": {name: {"value": size} for name, size in parts.items()}}
    on_gpu = step_line(answer)
    assert (on_gpu.amount, on_gpu.metric) == (Amount(300, "gpu", "device"), "device")


@pytest.mark.proves("S3-31")
def test_a_measured_peak_stands_for_its_phase():
    def ledger(tasks, *words):
        return Ledger(Layout(1, tasks), tuple(footprint_lines(*words)))

    peaks = {"load": PhasePeak(90), "train": PhasePeak(300), "validate": PhasePeak(700)}
    found = Footprint(700, 11, {"a": 5}, phases=peaks)
    assert sums(ledger(2, found, 2, "measured on train of run_1")) == {"train": 300, "validate": 700, "load": 90}
    four = ledger(4, found, 2, "measured on run_1")
    assert (sums(four)["validate"], four.mapped.bytes) == (1400, 11)
    [gpu] = [line for line in four.lines if line.metric == "device"]  # and the layout has no GPU
    assert (gpu.amount, four.on_node(gpu).bytes) == (Amount(5, "gpu", "device"), 5)
    more = Footprint(440, phases={"validate": PhasePeak(400)})
    assert sums(ledger(2, more, 2, "measured on run_1")) == {"validate": 400, "unmarked": 440}
    assert ledger(2, Footprint.declared(600), 2, "declared: memory.job").peak.bytes == 600


def report_3(node=256 * GB):
    """Job 273202: 16 ranks on 4 nodes, 71.4 GB each as sacct saw them; a node had 256 GB."""
    ledger = Ledger(Layout(4, 4), (task(71_400_000_000, "rank"),))
    return Forecast(ledger, Amount(node, "node"), "machine.yaml", num_ranks=16, num_nodes=4, slack=0.25)


def test_the_job_of_report_3_is_over_its_nodes_limit_before_it_starts():
    found = report_3()
    assert found.ledger.peak.bytes == 285_600_000_000
    assert not found.fits
    assert found.why == "265.99 GiB of each node in phase train (4 x 66.50 GiB), and it has 238.42 GiB"
    assert found.change.startswith("3 tasks a node: 199.49 GiB of each node (cost: 6 nodes for 16 ranks, of 4")
    assert [(mode.name, mode.peak.bytes, mode.fits) for mode in found.list_modes()] == [
        ("as it is", 285_600_000_000, False), ("3 tasks a node", 214_200_000_000, True),
    ]  # fmt: skip
    enough = report_3(513 * GB)
    assert (enough.fits, enough.why, enough.change, enough.request["mem"]) == (True, "", "", "333G")
    assert describe_batch(85109, None, 22, 16, 1).startswith("global batch 352 = 22 per rank x 16 ranks")


@pytest.mark.proves("S3-10")
def test_an_epoch_has_the_steps_of_its_samples():
    steps = {(drops, number): describe_batch(100, None, 3, 2, number, drops=drops).split("; ")[1].split()[0]
             for drops in (False, True) for number in (1, 4)}  # fmt: skip
    assert describe_batch(100, None, 0, 2, 1) == ""
    assert steps == {(False, 1): "17", (True, 1): "16", (False, 4): "5", (True, 4): "4"}


@pytest.mark.proves("S3-41")
@pytest.mark.parametrize(
    ("limit", "name"),
    [(480, ""), (300, "1 worker"), (200, "0 workers"), (190, "--mem=256M on nodes that have it")],
)
def test_the_cheapest_change_that_fits_is_named_with_its_own_sum(limit, name):
    data, rest = task(60, "data"), task(180, "loaders")
    ledger = Ledger(Layout(1, 2), (data, rest))
    fewer = {1: (data, task(90)), 0: (data, task(40))}
    found = Forecast(ledger, Amount(limit, "node"), "here", num_ranks=2, fewer=fewer)
    peaks = {mode.name: mode.peak.bytes for mode in found.list_modes()}
    assert peaks.items() >= {"as it is": 480, "1 worker": 300, "0 workers": 200}.items()
    assert found.change.partition(":")[0] == name
    assert found.fits == (not name)


def test_what_lies_in_shared_memory_must_fit_there():
    found = Forecast(TWO, Amount(1000, "node"), "here", shm_limit=Amount(9, "node"), num_ranks=2,
                     fewer={0: (*LINES[:2], *LINES[5:])})  # fmt: skip
    assert not found.fits and "10 B of each node in /dev/shm, which holds 9 B" in found.why
    assert found.change.startswith("0 workers: ")

"""A trace that takes too long is made at smaller sizes."""

import pytest

torch = pytest.importorskip("torch")

import memfit  # noqa: E402
from memfit.errors import OutOfTimeError, UntraceableError  # noqa: E402
from memfit.estimation import (  # noqa: E402
    estimate_step,
    fit,
    limit_time,
    sizes_of_batch,
)

STEPS = 32


class Loop(torch.nn.Module):
    """A cell over time, and attention over all times, whose scores are kept."""

    def __init__(self, width):
        super().__init__()
        self.cell, self.width = torch.nn.GRUCell(width, width), width

    def forward(self, x):
        state, states = torch.zeros(len(x), self.width), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state)
        kept = torch.stack(states, 1)
        return ((kept @ kept.transpose(1, 2)).softmax(-1) @ kept).square().mean()


def step_of(batch, *, width, too_long=()):
    def make():
        if batch.shape[1] in too_long:
            raise OutOfTimeError("the trace was not done after 0 s of CPU", rule="-", remedy="-")
        model = Loop(width)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "width"), [(64, 16), (2, 256)])  # activations, or the update, are the peak
def test_a_loop_over_time_is_continued_to_what_the_whole_trace_finds(samples, width):
    batch = torch.zeros(samples, STEPS, width)
    whole = estimate_step(step_of(batch, width=width))
    sizes = sizes_of_batch(batch, lambda one: step_of(one, width=width))
    found = estimate_step(step_of(batch, width=width, too_long=(STEPS,)), sizes=sizes)

    assert (whole.method, found.method) == ("traced", "extrapolated")
    for metric in ("allocated_bytes", "reserved_bytes"):
        assert found.device[metric].value == pytest.approx(whole.device[metric].value, rel=0.06)
        assert found.device[metric].upper >= whole.device[metric].value
    assert found.parts["activations"].value == pytest.approx(whole.parts["activations"].value, rel=0.06)
    assert list(found.by_phase) == list(whole.by_phase)
    assert found.by_phase["backward"].value == pytest.approx(whole.by_phase["backward"].value, rel=0.06)
    [note] = found.notes
    assert f"{STEPS} rows of dimension 1" in note and "2, 4, 8 and 16" in note and "widens the bound by" in note


@pytest.mark.slow
def test_a_size_that_the_model_needs_is_left_as_it_is():
    batch = torch.zeros(64, STEPS, 16)

    def make_of(one):
        return step_of(one, width=16, too_long=range(2, STEPS) if len(one) == 64 else ())

    found = estimate_step(step_of(batch, width=16, too_long=(STEPS,)), sizes=sizes_of_batch(batch, make_of))
    assert "64 rows of dimension 0" in found.notes[0]


def test_a_step_of_fixed_sizes_says_that_it_cannot_be_made_smaller():
    make = step_of(torch.zeros(2, STEPS, 16), width=16, too_long=(STEPS,))
    with pytest.raises(UntraceableError, match="its batch and its length are fixed"):
        estimate_step(make)


def test_the_time_of_an_answer_ends_whole_and_smaller_traces():
    with pytest.raises(UntraceableError, match=r"after 0 s of CPU, and smaller rows .* took too long, too"):
        memfit.estimate(lambda: Loop(16), torch.zeros(2, 8, 16), time_limit=0)
    with limit_time(0), pytest.raises(UntraceableError, match="fixed"):
        estimate_step(step_of(torch.zeros(2, 8, 16), width=16))


def test_what_a_fit_leaves_is_its_width():
    sizes = [4, 8, 16, 32]
    assert fit(sizes, [7 + 3 * n for n in sizes], 512).upper == 7 + 3 * 512
    assert fit(sizes, [7 + n * n for n in sizes], 512).upper == 7 + 512 * 512
    assert fit(sizes, [9, 8, 16, 32], 512).upper == 512, "another part was larger at the first size"
    unsteady = fit(sizes, [9, 11, 17, 19], 512)
    assert unsteady.value < unsteady.upper


def test_a_mask_picks_all_elements():
    def loss(model, batch):
        rows = model(batch)
        return rows[rows.sum(-1) > 0].sum()

    found = memfit.estimate(lambda: torch.nn.Linear(64, 64), torch.zeros(32, 64), loss=loss)
    assert found.notes == ("masks are assumed to pick all elements",)

"""What a resume says of the steps that it makes again."""

import json
import os
import signal
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from memfit.training import CheckpointWarning, Loop, digest_of
from training import loops


def train(folder, at, *, own=False, nudge=0.0, allow=("rehearsal",), num_epochs=2):
    """Twelve steps an epoch, each of which is a moment; ``nudge`` is added to the losses of a start."""
    warnings.simplefilter("ignore", CheckpointWarning)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    average, seen = {name: one.detach().clone() for name, one in model.named_parameters()}, [0]
    loop = Loop(folder, seed=1, every=4, allow=allow, model=model, optimizer=optimizer)
    for _ in loop.epochs(num_epochs):
        for batch in loop(DataLoader(torch.arange(384.0).view(48, 8) / 384, batch_size=4, shuffle=True)):
            loss = model(batch).square().mean() * (1 + nudge)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if own:
                seen[0] += 1
                for name, one in model.named_parameters():
                    average[name].lerp_(one.detach(), 0.1)
            at(loop.step)
    return loops.digest(model, optimizer)


def resumed(folder, step, number=signal.SIGKILL, before=None, **options):
    """Train until a step, then again; how the second start ended, and what it said."""
    loops.in_child(train, folder, step, number, own=options.get("own", False))
    if before is not None:
        before()
    already = len(loops.said(folder))
    return loops.in_child(train, folder, **options)[0], loops.said(folder)[already:]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


def test_what_no_step_shows_is_named_and_a_second_set_of_the_weights_so(folder):
    code, said = resumed(folder, 10, own=True)
    assert code == 0
    assert (
        "memfit: steps 9 to 10 came out as before; what differs since the checkpoint: average of train (local) ("
        in said
    )
    assert "average of train (local) (weights), seen of train (local)" in said
    assert "batch of train" not in said


def other_torch(folder):
    """Let the checkpoints be those of another torch."""
    for path in folder.glob("step-*/SEAL.json"):
        seal = json.loads(path.read_text())
        seal["facts"]["environment"]["torch"] = "1.0"
        path.write_text(json.dumps(seal))


@pytest.mark.parametrize(
    ("nudge", "code", "text"),
    [
        (1e-6, 0, "steps 9 to 10 came out as before but for kernels that do not repeat to the bit, from step 9 on"),
        (1e-2, 1, "This resume is NOT exact: step 9 is not what it was: loss "),
    ],
)
def test_in_another_environment_losses_may_differ_in_their_last_digits(folder, nudge, code, text):
    found, said = resumed(folder, 10, before=lambda: other_torch(folder), nudge=nudge)
    assert found == code and text in said


def test_where_nothing_changed_the_last_digits_count(folder):
    code, said = resumed(folder, 10, nudge=1e-6)
    assert code == 1 and "NOT exact: step 9" in said and "the batch and the rate the same" in said
    code, said = resumed(folder, 10, nudge=1e-6, allow=("rehearsal", "replay"))
    assert code == 0 and "memfit: This resume is NOT exact: step 9" in said


def older(folder, seconds):
    seal = folder / "step-4" / "SEAL.json"
    os.utime(seal, (seal.stat().st_atime - seconds,) * 2)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, ("after its step 4", "steps 5 to 8 came")),
        (700, ("after its step 8", "not proved: no step after step-8 was")),
    ],
)
def test_a_kill_right_after_a_checkpoint_goes_back_to_the_one_before_if_that_is_near(folder, seconds, told):
    code, said = resumed(folder, 8, before=lambda: older(folder, seconds))
    assert code == 0 and all(text in said for text in told), said


def test_a_journal_that_is_torn_or_gone_proves_less_and_fails_nothing(folder):
    def tear():
        journal = folder / "step-8" / "replay.jsonl"
        journal.write_bytes(journal.read_bytes()[:-9])
        (folder / "step-4" / "replay.jsonl").unlink()

    code, said = resumed(folder, 10, before=tear)
    assert code == 0 and "memfit: step 9 came out as before" in said


def test_other_orders_and_other_bytes_are_other_checksums():
    values = [torch.arange(300_000.0).view(2, -1), torch.arange(8.0), [1, 2], {"a": 1.0}, "a", True, None]
    assert len({digest_of(one) for one in values}) == len(values)
    assert digest_of(values[0]) != digest_of(values[0].flip(0))
    assert digest_of({1, 2, 3}) == digest_of({3, 2, 1}) and digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of(torch.tensor([torch.nan])) == digest_of(torch.tensor([torch.nan]))

"""The preflight: what would fail late fails or shrinks at once, and nothing of it remains."""

import copy
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

import forked
import ranked
from memfit.errors import DoesNotFitError, JobFailedError, SampleTooLargeError, UsageError
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, RunDir
from memfit.training import (
    KeyedStream,
    Longest,
    Loop,
    SafeStep,
    Trainer,
    find_longest,
    load_checkpoint,
    preflight,
    rehearse,
    seed_everything,
)

MIB = 1 << 20


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += len(x)
        return self.head(self.drop(self.norm(self.first(x))))


def squared(model, x):
    random.random(), np.random.rand()
    return model(x).square().sum(), len(x)


def limited(most, error=torch.OutOfMemoryError):
    """A loss that runs out of memory on more than ``most`` samples."""

    def loss(model, x):
        if torch.is_grad_enabled() and len(x) > most:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(x).square().sum(), len(x)

    return loss


def batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator) for size in sizes]


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def everything(model, optimizer):
    """Weights, buffers, state, gradients, modes and random draws."""
    tensors = [*model.state_dict().values(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    modes = [module.training for module in model.modules()]
    grads = [parameter.grad for parameter in model.parameters()]
    rng = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return [tensor.tolist() for tensor in tensors], modes, grads, rng


def test_nothing_remains_of_it(tmp_path):
    seed_everything(3)
    model = Net()
    model.head.eval()
    optimizer = adam(model)
    step = SafeStep(model, optimizer, squared)
    before, in_save = everything(model, optimizer), []

    def save():
        weights, _, _, rng = everything(model, optimizer)
        in_save.append((weights, rng))
        assert all(parameter.grad is not None for parameter in model.parameters())
        torch.save(model.state_dict(), tmp_path / "c.pt")
        return tmp_path / "c.pt"

    modes = []
    report = preflight(
        step,
        longest=Longest(batches(6)[0], "given"),
        validate=lambda: modes.append((model.training, torch.is_grad_enabled(), squared(model, torch.rand(5, 4)))),
        save=save,
    )
    assert everything(model, optimizer) == before
    assert in_save == [(before[0], before[3])]
    assert [entry[:2] for entry in modes] == [(False, False)]
    assert list(report.phases) == ["train", "validate", "checkpoint"]
    assert (report.microbatch_size, report.num_ooms, report.longest) == (6, 0, "given")


def test_a_fit_is_the_same_bit_for_bit_with_and_without(tmp_path):
    def trained(with_preflight):
        seed_everything(5)
        model = Net()
        optimizer = adam(model)
        trainer = Trainer(model, loss=squared, optimizer=optimizer, checkpoint_dir=tmp_path / str(with_preflight))
        result = trainer.fit(batches(3, 5, 2), batches(4), num_epochs=2, preflight=with_preflight)
        weights, _, _, rng = everything(model, optimizer)
        return weights, rng, result.history

    assert trained(True) == trained(False)


@pytest.mark.proves("S4-01", "S4-03")
def test_the_longest_batch_shrinks_before_the_first_step():
    model = torch.nn.Linear(4, 1)
    step = SafeStep(model, adam(model), limited(3))
    report = preflight(step, longest=find_longest(batches(4, 12, 8)))
    assert (report.microbatch_size, report.num_ooms, report.num_seen) == (3, 2, 3)
    assert step(batches(12)[0]).num_ooms == 0


def test_sizes_of_a_resumed_step_are_not_touched():
    model = torch.nn.Linear(4, 1)
    step = SafeStep(model, adam(model), limited(3))
    step(batches(12)[0])
    before = step.state_dict()
    preflight(step, longest=Longest(batches(12)[0], "given"))
    assert step.state_dict() == before


def test_a_single_sample_that_does_not_fit_fails_at_once():
    model = torch.nn.Linear(4, 1)
    step = SafeStep(model, adam(model), limited(0))
    with pytest.raises(SampleTooLargeError):
        preflight(step, longest=Longest(batches(4)[0], "given"))
    assert all(parameter.grad is None for parameter in model.parameters())


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


@pytest.mark.parametrize("phase", ["validate", "checkpoint"])
def test_what_does_not_fit_later_is_refused_with_the_numbers(phase):
    model = Net()
    optimizer = adam(model)
    step, before = SafeStep(model, optimizer, squared), everything(model, optimizer)
    actions = {"validate": out_of_memory} if phase == "validate" else {"save": out_of_memory}
    with pytest.raises(
        DoesNotFitError, match=rf"(?s)device memory in its phase '{phase}': .*2\.00 GiB.*\d GiB"
    ) as caught:
        preflight(step, longest=Longest(batches(4)[0], "given"), **actions)
    assert caught.value.exit_code == 3
    assert everything(model, optimizer) == before


def test_an_error_that_is_none_of_memory_stays_what_it_is():
    def broken():
        raise KeyError("label")

    model = torch.nn.Linear(4, 1)
    with pytest.raises(KeyError, match="label"):
        preflight(SafeStep(model, adam(model), squared), longest=Longest(batches(4)[0], "given"), validate=broken)


@pytest.mark.proves("S3-30")
@pytest.mark.slow
def test_peaks_are_told_by_phase_and_recorded(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, "demo", "0123abcd" * 8)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(run.path))
    monkeypatch.setenv(JOB_ID_VARIABLE, "fold_1")
    model = torch.nn.Linear(4, 1)
    held = []

    def validate():
        held.append(bytearray(96 * MIB))  # zeroed pages that were never touched do not count
        held[0][::4096] = b"x" * len(held[0][::4096])
        time.sleep(0.6)  # below an earlier mark of this process a peak is seen by samples only, one each 20 ms
        held.clear()

    step = SafeStep(model, adam(model), squared)
    report = preflight(step, longest=Longest(batches(4)[0], "given"), validate=validate)
    phases = report.phases
    assert phases["validate"]["host_bytes"] - phases["train"]["host_bytes"] > 64 * MIB
    (event,) = [event for event in run.events() if event["kind"] == "preflight"]
    assert event["phases"]["validate"]["host_bytes"] == phases["validate"]["host_bytes"]
    assert event["longest"] == "given"
    assert [event["phase"] for event in run.events() if event["kind"] == "phase"] == ["preflight"]


def test_several_batches_to_a_step_are_accumulated():
    seen = []

    def loss(model, x):
        seen.append(len(x))
        return model(x).square().sum(), len(x)

    model = torch.nn.Linear(4, 1)
    preflight(SafeStep(model, adam(model), loss), longest=Longest(batches(4)[0], "given"), num_batches=8)
    assert seen == [4, 4] * 2


class Ragged(torch.utils.data.Dataset):
    """Samples of different lengths; draws as an augmentation does."""

    def __init__(self, lengths, *, tell):
        self.sizes = lengths
        if tell:
            self.lengths = lengths

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return torch.rand(self.sizes[index])


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.ones(size) for size in (2, 5, 3))


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


LENGTHS = [3, 9, 4, 1, 8, 2, 7, 5, 6]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_with_lengths_gives_its_longest_samples(num_workers):
    loader = DataLoader(
        Ragged(LENGTHS, tell=True), batch_size=3, shuffle=True, collate_fn=padded, num_workers=num_workers
    )
    found = find_longest(loader)
    assert (found.how, found.batch.shape) == ("lengths", (3, 9))
    assert sorted((found.batch != 0).sum(1).tolist()) == [7, 8, 9]


def test_batches_of_varying_size_are_compared_padded():
    sampler = BatchSampler(range(len(LENGTHS)), 2, drop_last=False)
    sampler.batch_size = 5  # as a bucketing sampler of one's own: what the loader knows is only that there is one
    loader = DataLoader(Ragged(LENGTHS, tell=True), batch_sampler=sampler, collate_fn=padded)
    assert find_longest(loader).batch.shape == (5, 9)


def test_else_the_first_batches_are_a_sample_and_said_so():
    loader = DataLoader(Ragged(LENGTHS, tell=False), batch_size=1)
    found = find_longest(loader)
    assert (found.how, found.num_seen, found.batch.shape) == ("sampled", 8, (1, 9))
    found = find_longest(DataLoader(Stream(), batch_size=None))
    assert (found.how, found.num_seen, found.batch.shape) == ("sampled", 3, (5,))


def test_batches_that_know_their_longest_are_asked():
    class Known(list):
        def longest(self):
            return self[1]

    found = find_longest(Known(batches(9, 2, 3)))
    assert (found.how, len(found.batch)) == ("known", 2)


def test_one_s_own_batches_are_copied_and_generators_refused():
    data = batches(2, 5)
    find_longest(data).batch.zero_()
    assert data[1].any()
    with pytest.raises(UsageError, match="once only"):
        find_longest(iter(data))
    with pytest.raises(UsageError, match="no batch"):
        find_longest([])


@pytest.mark.parametrize(("num_workers", "generator_seed"), [(0, 2), (1, 2), (0, None)])
def test_neither_the_loader_nor_the_random_state_is_disturbed(num_workers, generator_seed):
    def orders(look):
        seed_everything(1)
        loader = DataLoader(
            TensorDataset(torch.arange(30.0)),
            batch_size=4,
            shuffle=True,
            generator=None if generator_seed is None else torch.Generator().manual_seed(generator_seed),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        if look:
            find_longest(loader)
        draws = [random.random(), np.random.rand(), torch.rand(1).item()]
        return [batch[0].tolist() for batch in loader], draws

    assert orders(True) == orders(False)


def test_the_checkpoint_of_a_preflight_is_the_start(tmp_path):
    seed_everything(5)
    model = Net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = Trainer(model, loss=squared, optimizer=adam(model), checkpoint_dir=tmp_path, keep_epochs=5)
    trainer.fit(batches(3, 5), num_epochs=1)
    saved = load_checkpoint(tmp_path / "step-0")
    assert all(torch.equal(saved["model"][name], value) for name, value in start.items())


def fit_under_a_limit(folder):
    """What a fit says whose validation takes 1 GiB where 160 MiB are left, and its numbers of gradients and updates."""
    steps = []

    def loss(model, x):
        kept = [] if model.training else [torch.ones(16 * MIB // 4) for _ in range(64)]
        if not kept:
            steps.append(len(x))
        return model(x).square().sum(), len(x)

    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held + 160 * MIB,) * 2)
    trainer = Trainer(torch.nn.Linear(4, 1), loss=loss, checkpoint_dir=folder)
    with pytest.raises(JobFailedError) as caught:
        trainer.fit([torch.ones(3, 4)] * 50, [torch.ones(3, 4)], num_epochs=2)
    return caught.value.what, len(steps), len(trainer.optimizer.state)


@pytest.mark.proves("C-18")
@pytest.mark.slow
def test_a_validation_that_does_not_fit_a_real_limit_fails_before_the_first_step(tmp_path):
    said, *counts = forked.call(fit_under_a_limit, tmp_path)
    assert "One sample of a validation batch of 3 does not fit" in said
    assert counts == [2, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_says_that_it_fits_and_changes_nothing(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = rehearse(model, optimizer, lambda x: model(x).square().sum(), [torch.ones(3, 4), torch.ones(5, 4)])
    assert (report.num_seen, list(report.phases)) == (2, ["train"])
    assert "fits: the largest of 2 batches" in capsys.readouterr().err
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert not optimizer.state
    assert all(weight.grad is None for weight in model.parameters())


def rehearsed(rank, folder):
    model = torch.nn.Linear(4, 4)
    optimizer, data = torch.optim.SGD(model.parameters()), [torch.ones(3 + rank, 4)]
    rehearse(model, optimizer, lambda x: model(x).sum(), data)
    for _ in Loop(folder / str(rank), every=9, model=model, optimizer=optimizer)(data):
        optimizer.step()


def test_of_several_ranks_one_says_whether_its_largest_batch_fits(tmp_path, capfd):
    ranked.values(ranked.run(2, tmp_path, rehearsed, tmp_path / "kept"))
    said = capfd.readouterr().err
    assert (said.count("memfit: fits: "), said.count("memfit: no verdict")) == (1, 1)


def test_a_rehearsal_loses_nothing_of_a_stream_and_says_so(capsys):
    model = torch.nn.Linear(4, 4)
    read = iter([torch.ones(3, 4)])
    for batches in (read, DataLoader(Stream(), batch_size=None)):
        assert rehearse(model, torch.optim.SGD(model.parameters()), lambda x: model(x).sum(), batches) is None
        assert "no verdict whether the largest batch fits: the data are a stream" in capsys.readouterr().err
    assert len(list(read)) == 1


def outside(model, x):
    return model.set_by_the_loop(x)  # an attribute that is set where the training has begun


@pytest.mark.parametrize(
    ("loss", "optimizer", "why"),
    [
        (lambda model, x: model(x).sum() * torch.inf, torch.optim.SGD, ""),
        (outside, torch.optim.SGD, "AttributeError: 'Linear' object has no attribute"),
        (lambda model, x: model(x).sum(), torch.optim.LBFGS, "LBFGS evaluates the loss several times"),
    ],
    ids=["not finite", "outside of its loop", "LBFGS"],
)
def test_a_rehearsal_that_raises_an_error_is_no_verdict_and_ends_nothing(loss, optimizer, why, capsys):
    model = torch.nn.Linear(4, 4)
    made = optimizer(model.parameters())
    assert rehearse(model, made, lambda x: loss(model, x), [torch.ones(3, 4)]) is None
    said = capsys.readouterr().err
    assert f"no verdict whether the largest batch fits: {why}" in said and "allow=('rehearsal',)" in said


def test_no_further_batch_is_sampled_once_that_takes_long(monkeypatch, capsys):
    drawn = []

    class Slow(list):
        def __getitem__(self, index):
            drawn.append(index)
            return super().__getitem__(index)

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: 4.0 * len(drawn))
        found = find_longest(DataLoader(Slow(torch.ones(20, 4))))
    assert (found.how, found.num_seen, len(drawn)) == ("sampled", 3, 3)
    model = torch.nn.Linear(4, 4)
    rehearse(model, torch.optim.SGD(model.parameters()), lambda x: model(x).sum(), found)
    assert "the largest of 3 batches (sampled)" in capsys.readouterr().err


def test_the_longest_samples_are_found_under_the_keys_of_exact():
    class Texts(list):
        lengths = (2, 9, 1, 7)

    data = Texts(torch.ones(length, 2) for length in Texts.lengths)
    loader = KeyedStream(1).loader(DataLoader(data, batch_size=2, shuffle=True, collate_fn=pad_sequence))
    found = find_longest(loader)
    assert (found.how, found.batch.shape) == ("lengths", (9, 2, 2))


def test_a_rehearsal_refuses_what_does_not_fit():
    model = torch.nn.Linear(4, 4)

    def loss(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(DoesNotFitError, match="largest batch does not fit") as caught:
        rehearse(model, torch.optim.AdamW(model.parameters()), loss, [torch.ones(3, 4)])
    assert "accumulate" in str(caught.value)

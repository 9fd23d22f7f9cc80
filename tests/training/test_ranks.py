"""Steps of several ranks: real processes in a group of gloo, with many faults in each launch."""

import os
import random
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ranked
from memfit.errors import HalfUpdatedError, MemfitError, PeerFailedError, SampleTooLargeError, UsageError
from memfit.rundir import read_beats
from memfit.training import SafeStep, SkipPolicy, keep_beats, rng_state, set_rng_state

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(5)).double()


class Net(torch.nn.Module):
    """Dropout, a large weight, small ones, one that is never used, and buffers that a forward pass changes."""

    def __init__(self, dropout=0.2, width=600):
        super().__init__()
        self.first = torch.nn.Linear(6, width)
        self.large = torch.nn.Linear(width, 300)
        self.last = torch.nn.Linear(300, 1)
        self.unused = torch.nn.Linear(2, 2)
        self.dropout = torch.nn.Dropout(dropout)
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        hidden = torch.relu(self.large(torch.relu(self.first(self.dropout(x)))))
        return self.last(hidden)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError(OOM)


class Faulty:
    """A model, its optimizer and a loss that run out of memory once, at the place that is armed."""

    def __init__(self, dropout=0.2, **settings):
        torch.manual_seed(0)
        self.model = Net(dropout, settings.pop("width", 600)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.place = None
        step, self.optimizer.step = self.optimizer.step, self.update
        self._real_step = step
        self.step = SafeStep(DistributedDataParallel(self.model), self.optimizer, self.loss, **settings)
        trial, self.step.guard.try_memory = self.step.guard.try_memory, self.trial
        self._real_trial = trial

    def take(self, place):
        self.place, was = (None, True) if self.place == place else (self.place, False)
        return was

    def loss(self, model, batch):
        strikes = model.training  # not while the loss of parts is compared
        if strikes and self.take("forward"):
            raise torch.OutOfMemoryError(OOM)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().sum()
        weight = batch[:, 0].abs().sum() + len(batch)  # as of tokens: not the same for all samples
        return (FailsBackward.apply(loss) if strikes and self.take("backward") else loss), weight

    def trial(self):
        if self.take("trial"):
            raise torch.OutOfMemoryError(OOM)
        self._real_trial()

    def update(self, *args):
        if self.take("update"):
            self.model.last.weight.data.mul_(0.5)
            raise torch.OutOfMemoryError(OOM)
        return self._real_step(*args)

    def digest(self):
        self.step.settle()
        return ranked.digest(self.model.state_dict(), self.optimizer.state_dict(), rng_state()["torch"])


PLACES = ["forward", "backward", "trial"]


def share(number, rank, size):
    """The rank's part of a global batch: of every fourth one some ranks have no sample."""
    count = 2 if number % 4 == 3 else 10
    return [one for one in X[number % 50 :][:count].tensor_split(size)[rank : rank + 1] if len(one)]


def train(rank, size, faults, num_steps, **settings):
    made = Faulty(**settings)
    torch.manual_seed(100 + rank)
    outcomes = []
    for number in range(num_steps):
        made.place = faults.get((rank, number))
        outcomes.append(made.step(*share(number, rank, size)))
    return made, outcomes


def with_and_without_faults(rank, faults, num_steps):
    plain, outcomes = train(rank, 4, {}, num_steps, microbatch_size=1, max_grad_norm=1.0)
    made, others = train(rank, 4, faults, num_steps, microbatch_size=1, max_grad_norm=1.0)
    same = [one.loss_sum == other.loss_sum for one, other in zip(outcomes, others, strict=True)]
    unused = made.model.unused.weight
    return plain.digest(), made.digest(), all(same), made.step.num_ooms, unused.grad is None, len(made.optimizer.state)


@pytest.mark.core
def test_ranks_that_run_out_of_memory_at_any_place_end_with_the_same_bytes(tmp_path):
    rng = random.Random(1)
    faults = {(rng.randrange(4), number): rng.choice(PLACES) for number in range(14) for _ in range(2)}
    faults |= {(rank, 15): place for rank, place in enumerate(PLACES)}
    found = ranked.values(ranked.run(4, tmp_path, with_and_without_faults, faults, 18))
    assert [plain == faulted for plain, faulted, *_ in found] == [True] * 4
    assert all(same and is_none and num == 6 for _, _, same, _, is_none, num in found)  # the unused ones have no state
    in_passes = [key for key, place in faults.items() if place in PLACES[:2] and share(key[1], key[0], 4)]
    assert sum(num for _, _, _, num, *_ in found) == len(in_passes)


def alone(num_steps):
    """The same steps in one process, over the batches of all ranks."""
    torch.manual_seed(0)
    model = Net(0.0, 20).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    step = SafeStep(model, optimizer, lambda m, b: Faulty.loss(Calm, m, b), max_grad_norm=1.0, group=None)
    return [step(X[number % 50 :][: 2 if number % 4 == 3 else 10]) for number in range(num_steps)], model


class Calm:
    """No fault at all."""

    @staticmethod
    def take(place):
        return False


def as_one(rank, size, num_steps):
    expected, model = alone(num_steps)
    made, outcomes = train(rank, size, {}, num_steps, dropout=0.0, width=20, max_grad_norm=1.0)
    loss = [
        abs(one.loss - other.loss) + abs(one.grad_norm - other.grad_norm)
        for one, other in zip(expected, outcomes, strict=True)
    ]
    pairs = zip(model.parameters(), made.model.parameters(), strict=True)
    return max(*loss, *(float((one - other).detach().abs().max()) for one, other in pairs))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_make_the_step_of_one_process_over_all_their_samples(tmp_path, size):
    assert max(ranked.values(ranked.run(size, tmp_path, as_one, size, 12))) < 1e-12


# --- what is refused


class Sums(torch.nn.Module):
    def __init__(self, part=None):
        super().__init__()
        self.weight, self.part = torch.nn.Parameter(torch.ones(1)), part

    def forward(self, x):
        return (self.weight * x).sum()


def squared(model, x):
    return model(x).square(), len(x)


def summed(model, x):
    return model(x), len(x)


def over(model, loss=squared, **settings):
    return SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **settings)


def counted(model, x):
    total = torch.ones(1)
    dist.all_reduce(total)
    return squared(model, x)


def refusals(rank):
    warnings.simplefilter("ignore")
    told = []

    def tell(action, *args, **settings):
        try:
            action(*args, **settings)
        except MemfitError as error:
            told.append(error.what)

    tell(over, Sums())
    normed = DistributedDataParallel(Sums())
    normed.module.part = torch.nn.SyncBatchNorm(2)  # on the CPU, DDP refuses it by itself
    tell(over, normed)
    hooked = DistributedDataParallel(Sums())
    hooked.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    tell(over, hooked)
    used = DistributedDataParallel(Sums())
    late = over(used)
    used(torch.ones(1))
    tell(over, used)
    tell(late, torch.ones(2))
    silent = DistributedDataParallel(Sums())
    step = over(silent)
    with silent.no_sync():
        tell(step, torch.ones(2))
    tell(over(DistributedDataParallel(Sums()), counted), torch.ones(2))
    sparse = torch.nn.Embedding(4, 2, sparse=True)
    tell(over(DistributedDataParallel(sparse), lambda model, x: (model(x).sum(), 1)), torch.tensor([rank]))
    assert over(Sums(), group=None)(torch.ones(2)).weight == 2
    tell(over(DistributedDataParallel(Sums())))
    return told


def test_what_would_keep_a_rank_from_working_alone_is_refused_by_name(tmp_path):
    told = ranked.values(ranked.run(2, tmp_path, refusals))
    assert told[0] == told[1] == [
        "The model is a plain one, and a group of 2 ranks is there.",
        "'part' in the model is a SyncBatchNorm: it waits for all ranks in its forward pass.",
        "The DistributedDataParallel wrapper has a communication hook.",
        "The DistributedDataParallel wrapper was called before.",
        "The DistributedDataParallel wrapper was called before.",
        "no_sync() is active.",
        "The loss called a collective of its group.",
        "A gradient is sparse.",
    ]  # fmt: skip


# --- errors, sizes, policies


class Told:
    """A loss that does as it is told once."""

    def __init__(self):
        self.error = None
        self.most = None

    def __call__(self, model, x):
        error, self.error = self.error, None
        if error is not None:
            raise error
        if self.most is not None and len(x) > self.most:
            raise torch.OutOfMemoryError(OOM)
        return summed(model, x)


def after_errors(rank, folder):
    keep_beats(folder)
    loss = Told()
    model = Sums()
    step = over(DistributedDataParallel(model), loss, microbatch_size=None, skip=SkipPolicy(2, 1.0))
    step(torch.ones(2))
    before, told = model.weight.item(), []
    loss.error = ValueError("a bug") if rank == 1 else None
    try:
        step(torch.ones(2))
    except Exception as error:
        told.append(
            f"{type(error).__name__}: {error}".partition("\n")[0] + f" ({read_beats(folder / 'ranks')[rank].place})"
        )
    told.append(model.weight.item() == before)
    try:
        step({"x": torch.ones(2), "y": torch.ones(2 + rank)} if rank else torch.ones(2))  # refused before the loss
    except MemfitError as error:
        told.append(type(error).__name__)
    for _ in range(3):
        loss.most = 1 if rank == 0 else None
        try:
            outcome = step(torch.ones(2))
            told.append((step.num_skipped, step.num_batches, outcome.weight, outcome.skipped))
        except MemfitError as error:
            told.append(error.what)
    step.load_state_dict({**step.state_dict(), "num_skipped": 0})
    loss.most = 1
    told.append(step(torch.ones(2)).skipped)
    return told


@pytest.mark.proves("S1-13")
def test_an_error_of_one_rank_is_raised_on_all_and_skipped_batches_are_counted_together(tmp_path):
    first, second = ranked.values(ranked.run(2, tmp_path, after_errors, tmp_path))
    assert first[:3] == ["PeerFailedError: Rank 1 failed: ValueError: a bug (vote)", True, "PeerFailedError"]
    assert second[:3] == ["ValueError: a bug (microbatch)", True, "UsageError"]
    skipped = [(1, 7, 2.0, False), (2, 9, 2.0, False), "In this step 3 of 11 batches of all ranks were skipped."]
    assert first[3:] == second[3:] == [*skipped, True]


def sizes(rank):
    loss, model = Told(), Sums()
    step = over(DistributedDataParallel(model), loss, cost=len)
    loss.most = 3 if rank == 1 else None
    used = [step(torch.ones(8)).microbatch_size for _ in range(2)]
    step.load_state_dict({**step.state_dict(), "sizes": {**step.state_dict()["sizes"], "wait": 2, "quiet": 0}})
    loss.most = None
    used += [step(torch.ones(8)).microbatch_size for _ in range(4)]
    return used, step.sizes.state_dict()


def test_all_ranks_use_the_smallest_size_from_the_next_step_on_and_grow_together(tmp_path):
    (first, known), (second, others) = ranked.values(ranked.run(2, tmp_path, sizes))
    assert first == [8, 2, 2, 2, 3, 3]
    assert second == [2, 2, 2, 2, 3, 3]
    assert known == others and known["limit"] == 3


class Draws(Sums):
    """Counts in a buffer, by another number on each rank."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.seen += self.rank + 1
        return super().forward(x)


def scaled(rank):
    torch.manual_seed(0)
    model = Draws(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    loss = Told()
    step = over(DistributedDataParallel(model), loss, scaler=scaler, microbatch_size=None)
    with torch.autocast("cpu", torch.bfloat16):
        found = [step(torch.ones(2)).skipped]
        found.append(step(torch.full((2,), torch.inf if rank == 1 else 1.0)).skipped)
        found += [step(torch.ones(2)).skipped for _ in range(3)]
    return found, scaler.get_scale(), model.weight.item(), model.seen.tolist()


def test_a_gradient_that_overflows_on_one_rank_is_skipped_on_all_and_buffers_are_those_of_rank_0(tmp_path):
    first, second = ranked.values(ranked.run(2, tmp_path, scaled))
    assert first == second
    assert first[0] == [False, True, False, False, False]
    assert first[1] == 4.0  # halved by the overflow, doubled after two steps
    assert first[3] == [5.0, 5.0]


# --- what cannot go on in the process


def half(rank, ranks):
    told, made = [], Faulty()
    for next_is in (lambda: made.step(X[:4]), made.step.settle):
        made.place = "update" if rank in ranks else None
        assert made.step(X[:4]).skipped is False
        try:
            next_is()
        except HalfUpdatedError as error:
            told.append(error.what)
    return told


@pytest.mark.parametrize(("ranks", "named"), [((0, 1), "rank 0, rank 1"), ((1,), "rank 1")])
def test_an_update_left_half_way_on_some_ranks_is_an_error_on_all(tmp_path, ranks, named):
    told = ranked.values(ranked.run(2, tmp_path, half, ranks))
    assert told == [[f"Memory ran out inside AdamW.step on {named}."] * 2] * 2


def lost(rank, how):
    made = Faulty(width=20)
    made.step(X[:4])
    if rank == 1 and how == "kill in the update":
        made.optimizer.step = lambda: os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "error in the update":
        made.optimizer.step = lambda: [][0]
    if rank == 1 and how == "kill in the backward pass":
        made.step.backward = lambda loss: os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "another step":
        made.step.ranks.step += 1
    for _ in range(2):
        made.step(X[:4])
    return "went on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [("kill in the update", -9), ("error in the update", 79), ("kill in the backward pass", -9), ("another step", 79)],
)
def test_all_leave_with_79_at_once_when_one_is_lost_or_fails_alone_in_the_update(tmp_path, how, code, capfd):
    ends = ranked.run(3, tmp_path, lost, how)
    assert [end.code for end in ends] == [79, code, 79]
    told = {"another step": "the ranks are at steps [2, 3, 2]"}.get(how, "it lost its peers")
    assert f"memfit: rank 0 leaves with exit code 79: {told}" in capfd.readouterr().err


def of_one(rank):
    """A sample too large on one rank, while the others wait at the vote."""
    loss = Told()
    step = over(DistributedDataParallel(Sums()), loss)
    if rank == 0:
        time.sleep(0.3)
        loss.most = 0
    try:
        step(torch.ones(2))
    except (SampleTooLargeError, PeerFailedError, UsageError) as error:
        return type(error).__name__, error.what.partition("\n")[0]


def test_a_sample_too_large_for_one_rank_ends_all_with_its_name(tmp_path):
    (own, what), (other, told) = ranked.values(ranked.run(2, tmp_path, of_one))
    assert (own, other) == ("SampleTooLargeError", "PeerFailedError")
    assert told.startswith("Rank 0 failed: A single unit of the batch does not fit, in this step") and what in told


def test_a_random_state_that_is_a_row_of_a_larger_tensor_can_be_put_back(tmp_path):
    def put_back(rank):
        states = torch.stack([torch.get_rng_state(), torch.get_rng_state()])
        expected = torch.rand(2)
        set_rng_state({**rng_state(), "torch": states[1]})
        return torch.equal(torch.rand(2), expected)

    assert ranked.values(ranked.run(1, tmp_path, put_back)) == [True]

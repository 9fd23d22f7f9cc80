"""A loop of one's own is watched, stops and resumes, to the same bytes where that was asked for."""

import signal
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from memfit.errors import StoppedError, UsageError
from memfit.training import CheckpointWarning, Loop, LoopParts, SafeStep
from training import loops
from training.loops import bare, in_child, loader, masked, parts, plain, said, train


def ignore(moment):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an unbroken training leaves, by its options."""
    made = {}

    def find(**options):
        key = repr(sorted(options.items()))
        if key not in made:
            code, made[key] = in_child(train, tmp_path_factory.mktemp("whole") / "out", **options)
            assert code == 0
        return made[key]

    return find


def test_no_checkpoint_lies_inside_an_accumulation(tmp_path, whole):
    folder, options = tmp_path / "out", {"carries": True}  # the fifth batch of an epoch belongs to the next one's step
    unbroken = whole(**options)[0]
    assert in_child(train, folder, ("evaluation", 0), **options)[0] == 75
    assert "Stopped by SIGTERM after step 3" in said(folder)
    left, _, evaluated = in_child(train, folder, **options)[1]
    assert left == unbroken != whole()[0] and evaluated.keys() == {1, 2}


def with_generator(made):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(made.dataset, made.batch_size, shuffle=True, collate_fn=plain, generator=generator)


def with_nested_generator(made):
    order = torch.utils.data.RandomSampler(made.dataset, generator=torch.Generator().manual_seed(5))
    batches = torch.utils.data.BatchSampler(order, made.batch_size, drop_last=False)
    return DataLoader(made.dataset, batch_sampler=batches, collate_fn=plain)


STOPS = [
    {"collate": plain},
    {"collate": plain, "workers": 2},
    {"wrap": with_generator},
    {"wrap": with_nested_generator},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", STOPS, ids=["plain", "workers", "generator", "nested generator"])
def test_stop_goes_on_to_the_same_bytes_where_only_the_order_is_drawn(options, tmp_path, whole):
    folder, options = tmp_path / "out", {"mode": "stop", **options}
    unbroken, seen, _ = whole(**options)
    assert in_child(train, folder, ("batch", 1, 2), **options)[0] == 75
    assert in_child(train, folder, **options)[1][:2] == (unbroken, seen[7:])


class Own(torch.utils.data.RandomSampler):
    """Another order in each epoch, which it counts itself."""


def test_an_order_that_nobody_can_make_again_is_not_said_to_go_on():
    data = loops.Samples()
    own, plain_one = (DataLoader(data, 4, sampler=kind(data)) for kind in (Own, torch.utils.data.RandomSampler))
    for made, draws_again, goes_on in ((own, True, False), (plain_one, True, True), (plain_one, False, False)):
        text = LoopParts.order_again(made, draws_again=draws_again)
        assert text.startswith("the order goes on") == goes_on
        assert ("some samples come twice in it, and some not at all" in text) != goes_on
    assert LoopParts.order_again(DataLoader(data), draws_again=False).startswith("the order goes on")


class Numbered:
    """Batches by number, in another order each epoch, that draw."""

    def __init__(self, made):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 5

    def __getitem__(self, number):
        return masked([torch.full((4,), (number * self.epoch + one) / 20) for one in range(4)])


def test_an_epoch_that_is_left_ends_with_the_steps_that_were_made(tmp_path):
    def go(folder, num_epochs):
        model, optimizer = bare()
        loop = Loop(folder, seed=1, every=99, model=model, optimizer=optimizer)
        for _ in loop.epochs(num_epochs):
            for batch in loop(loader()):
                model(batch[1]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if loop.batch == 3:
                    break
        return loops.digest(model, optimizer), loop.step

    assert go(tmp_path / "whole", 3)[1] == 9
    go(tmp_path / "out", 1)
    assert sorted(path.name for path in (tmp_path / "out").glob("step-*")) == ["step-3"]
    assert go(tmp_path / "out", 3) == go(tmp_path / "whole", 3)


def test_batches_by_number_are_exact(tmp_path, whole):
    folder, options = tmp_path / "out", {"wrap": Numbered}
    unbroken, seen, _ = whole(**options)
    assert seen[:5] != seen[5:10]
    in_child(train, folder, ("batch", 1, 2), **options)
    assert in_child(train, folder, **options)[1][0] == unbroken


def stopped(folder, events=None, **options):
    def at(moment):
        if moment == ("batch", 1, 1):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError, match="Stopped by SIGTERM after step 4"):
        train(folder, at, **options)


def tenth(step):
    return 0.1 if step == 5 else 0.5


SCHEDULES = [None, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)]
SCHEDULES += [lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, tenth)]


@pytest.mark.parametrize("make", SCHEDULES)
def test_an_allowed_rate_is_the_one_that_holds(make, tmp_path):
    def begin(rate, allow=()):
        model, optimizer = bare(rate)
        schedule = make(optimizer) if make else None
        own = {"schedule": schedule} if make else {}
        return (
            Loop(tmp_path, seed=1, every=1, allow=allow, model=model, optimizer=optimizer, **own),
            optimizer,
            schedule,
        )

    loop, optimizer, schedule = begin(1e-2)
    for _ in loop.epochs(1):
        for _ in loop(loader()):
            optimizer.step()
            schedule.step() if make else None
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 if make else 1e-2)
    loop, optimizer, schedule = begin(5e-2, ["learning_rate"])
    with loop:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3 if make else 5e-2)
        optimizer.step()
        schedule.step() if make else None
        later = 2.5e-2 if make is SCHEDULES[2] else 5e-4
        assert optimizer.param_groups[0]["lr"] == pytest.approx(later if make else 5e-2)


def warm_up(step, num_steps):
    return min(1.0, step / num_steps)


def test_arguments_of_a_function_of_the_rate_are_compared(tmp_path):
    for num_steps in (10, 10, 20):
        model, optimizer = bare()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm_up, num_steps=num_steps))
        loop = Loop(tmp_path, every=1, model=model, optimizer=optimizer, schedule=schedule)
        if num_steps == 10:
            one_epoch(loop, lambda batch: None, optimizer)
        else:
            with pytest.raises(UsageError, match="schedule, num_steps: 10 then, 20 now"):
                loop.__enter__()


def test_another_schedule_is_refused_or_holds(tmp_path):
    def begin(step_size, allow=()):
        model, optimizer = bare()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size)
        return (
            Loop(tmp_path, every=1, allow=allow, model=model, optimizer=optimizer, schedule=schedule),
            optimizer,
            schedule,
        )

    loop, optimizer, _ = begin(3)
    one_epoch(loop, lambda batch: None, optimizer)
    with pytest.raises(UsageError, match="schedule, step_size: 3 then, 2 now"):
        begin(2)[0].__enter__()
    loop, _, schedule = begin(2, ["schedule"])
    with loop:
        assert schedule.step_size == 2


def test_more_data_and_another_batch_are_named(tmp_path):
    class More(loops.Samples):
        def __len__(self):
            return 24

    folder = tmp_path / "out"
    stopped(folder)
    with pytest.raises(UsageError, match="num_samples: 20 then, 24 now"):
        train(folder, ignore, data=More())
    train(folder, ignore, data=More(), allow=["num_samples"])


def test_another_batch_size_goes_on_at_the_same_sample(tmp_path):
    folder = tmp_path / "out"
    stopped(folder)
    half = lambda made: DataLoader(made.dataset, 2, shuffle=True, collate_fn=masked)  # noqa: E731
    unbroken = in_child(train, tmp_path / "whole")[1][1]
    with pytest.raises(UsageError, match="batch_size: 4 then, 2 now"):
        train(folder, ignore, wrap=half)
    rest = train(folder, ignore, wrap=half, allow=["batch_size"])[1]
    assert [one for batch in rest[:6] for one in batch] == [one for batch in unbroken[7:10] for one in batch]


def test_stop_becomes_exact_between_two_epochs(tmp_path):
    folder = tmp_path / "out"
    in_child(train, folder, ("evaluation", 0), mode="stop")
    assert train(folder, ignore)[2].keys() == {1, 2}
    folder = tmp_path / "other"
    stopped(folder, mode="stop")
    with pytest.raises(UsageError, match="seed: None then, 1 now"):
        train(folder, ignore)


def test_what_cannot_be_exact_is_refused_before_the_first_step(tmp_path):
    seen = []
    with pytest.raises(UsageError, match="stream"):
        train(tmp_path, seen.append, data=loops.Stream())
    assert {*seen} == {("begin", 0)}


def one_epoch(loop, backward, optimizer, batches=None):
    for batch in loop(batches or loader()):
        backward(batch)
        optimizer.step()


def test_a_loop_that_is_gone_through_again_trains_what_is_left(tmp_path, capsys):
    model, optimizer, schedule = parts()
    loop, lone = (Loop(tmp_path / name, model=model, optimizer=optimizer, schedule=schedule) for name in "ab")
    train = partial(one_epoch, backward=lambda batch: model(batch[1]).square().mean().backward(), optimizer=optimizer)
    assert [sum(train(loop) or 1 for _ in loop.epochs(num)) for num in (2, 2, 3)] == [2, 0, 1]
    train(lone)
    assert lone.step == 5 and capsys.readouterr().err.count("nothing is left to train") == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_what_compiles_by_shapes_or_timings_is_refused_before_the_first_step(tmp_path):
    def begin(compile, allow=()):
        model, optimizer = bare()
        return Loop(tmp_path, seed=1, every=1, allow=allow, model=compile(model), optimizer=optimizer)

    def in_place(model):
        model.compile()
        return model

    def graphed(model):
        def make_graphed_callables(forward):
            return lambda x: forward(x)

        model[0].forward = make_graphed_callables(model[0].forward)
        return model

    timed = partial(torch.compile, dynamic=False, mode="max-autotune")
    for compile, named in (
        (torch.compile, "shapes"),
        (in_place, "shapes"),
        (timed, "timings"),
        (graphed, r"model\.0 "),
    ):
        with pytest.raises(UsageError, match=named), begin(compile):
            pass
        with begin(compile, allow=("cuda_graph" if compile is graphed else "torch_compile",)):
            pass
    with begin(partial(torch.compile, dynamic=False, mode="reduce-overhead")):
        pass


def compiled(folder, at):
    """Train what is compiled, on batches of two shapes; return the hash of what it leaves."""

    class Few(loops.Samples):
        def __len__(self):
            return 6

    model, optimizer = bare()
    net = torch.compile(model, dynamic=False, backend="aot_eager")  # in C++: the long test of transformers
    loop = Loop(
        folder, seed=1, every=1, loss=lambda batch: net(batch[1]).square().mean(), model=net, optimizer=optimizer
    )
    for epoch in loop.epochs(2):
        for batch in loop(loader(data=Few())):
            net(batch[1]).square().mean().backward()
            at(("batch", epoch, loop.batch))
            optimizer.step()
            optimizer.zero_grad()
    return loops.digest(model, optimizer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_what_is_compiled_for_each_shape_is_exact(tmp_path):
    assert in_child(compiled, tmp_path / "out", ("batch", 0, 1))[0] == 75, said(tmp_path / "out")
    code, found = in_child(compiled, tmp_path / "out")
    assert (code, found) == (0, in_child(compiled, tmp_path / "whole")[1]), said(tmp_path / "out")


class Watched(torch.nn.Module):
    """Notes each forward pass."""

    def __init__(self, log):
        super().__init__()
        self.net, self.log, self.calls = torch.nn.Linear(4, 1), log, 0

    def forward(self, x):
        self.calls += 1
        self.log.append((len(x), self.calls))
        return self.net(x).square().mean()


def test_a_loss_that_is_given_says_before_the_first_step_whether_the_largest_batch_fits(tmp_path, capsys):
    def go(folder, has_loss=False, **options):
        torch.manual_seed(0)
        log = []
        model = Watched(log)
        optimizer = torch.optim.AdamW(model.parameters())
        loop = Loop(folder, every=1, loss=model if has_loss else None, model=model, optimizer=optimizer, **options)
        one_epoch(loop, lambda batch: (log.append("train"), model(batch).backward()), optimizer, batches)
        return log, model.net.weight

    batches = [torch.ones(2, 4), torch.ones(5, 4)]
    tried, weight = go(tmp_path / "tried", has_loss=True)
    assert "fits: the largest of 2 batches" in capsys.readouterr().err
    plain, other = go(tmp_path / "plain")
    assert tried == plain == ["train", (2, 1), "train", (5, 2)]  # what the model notes itself is put back
    assert torch.equal(weight, other)
    assert capsys.readouterr().err.count("no verdict whether the largest batch fits: pass loss=") == 1
    go(tmp_path / "left", allow=["rehearsal"])
    go(None)  # a loop without a folder and a loss asks for nothing
    assert "verdict" not in capsys.readouterr().err


def test_a_loop_that_cannot_count_is_refused(tmp_path):
    model, optimizer = bare()
    for name in ("every", "every_seconds", "keep"):
        with pytest.raises(UsageError, match=f"{name} is 0"):
            Loop(tmp_path, **{name: 0}, model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match="No optimizer"):
        next(Loop(tmp_path, every=1, model=model).epochs())
    with pytest.raises(UsageError, match="has no state"):
        Loop(tmp_path, every=1, model=3)
    loop = Loop(tmp_path, every=1, model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match="5 batches and no optimizer step"):
        for _ in loop(loader()):
            pass
    loop = Loop()
    with pytest.raises(UsageError, match="a second time in one epoch"):
        for _ in range(2):
            list(loop(loader()))


def test_an_optimizer_of_which_no_checkpoint_holds_all_is_refused_before_the_first_step(tmp_path):
    model, head = torch.nn.Linear(4, 1), torch.nn.Linear(1, 1)
    both = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    moved = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(moved, 3)
    weights = {"model": model, "optimizer": both}
    rate = {"model": model, "optimizer": moved}
    for number, (given, missing, name) in enumerate(
        ((weights, {"head": head}, "unsaved_weights"), (rate, {"schedule": schedule}, "unsaved_schedule"))
    ):
        loop = partial(Loop, tmp_path / str(number), every=1)
        with pytest.raises(UsageError, match=f"{name}"), loop(**given):
            pass
        with loop(**given, **missing), loop(**given, allow=(name,)):
            pass


def test_the_number_of_a_groups_weights_is_no_setting_to_take(tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    LoopParts({"model": model, "optimizer": optimizer}).take({"optimizer group 0, params": 3})
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]


def safe(folder, at, backward=torch.Tensor.backward, fits=3):
    """Train by a SafeStep, in a loop whose device fits three samples."""
    model, optimizer = bare()

    def loss(model, batch):
        if len(batch[0]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(batch[1]).square().sum(), len(batch[0])

    step = SafeStep(model, optimizer, loss, backward=backward)
    loop = Loop(folder, seed=1, every=2, model=model, optimizer=optimizer, sizes=step)
    for epoch in loop.epochs(2):
        for batch in loop(loader()):
            outcome = step(batch)
            loop.log(outcome.loss)
            at(("batch", epoch, loop.batch))
    return loops.digest(model, optimizer), step.num_ooms, loop.step


def test_safe_step_in_a_loop_recovers_stops_and_resumes(tmp_path):
    code, (unbroken, num_ooms, steps) = in_child(safe, tmp_path / "whole")
    assert (code, num_ooms > 0, steps) == (0, True, 10)
    assert in_child(safe, tmp_path / "out", ("batch", 1, 2))[0] == 75
    assert in_child(safe, tmp_path / "out")[1][0] == unbroken


def scaled(folder, at):
    """Train with a gradient scaler and two optimizers; one step in four has gradients that are not finite."""
    model, optimizer = bare()
    weight = torch.nn.ParameterList([torch.ones(1)])
    other = torch.optim.SGD(weight, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    loop = Loop(folder, seed=1, every=2, model=model, weight=weight, optimizer=optimizer, other=other, scaler=scaler)
    for epoch in loop.epochs(2):
        for batch in loop(loader()):
            loss = model(batch[1]).square().mean() * (torch.inf if loop.batch == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            other.step()
            optimizer.zero_grad()
            at(("batch", epoch, loop.batch))
    return loops.digest(model, optimizer), scaler.get_scale(), loop.step


@pytest.mark.parametrize("moment", [("batch", 0, 2), ("batch", 1, 3)])
def test_a_scaler_that_skips_a_step_and_two_optimizers(moment, tmp_path):
    unbroken = in_child(scaled, tmp_path / "whole")[1]
    assert unbroken[2] == 8  # of ten batches two were skipped
    assert in_child(scaled, tmp_path / "out", moment)[0] == 75
    assert in_child(scaled, tmp_path / "out")[1] == unbroken


def test_another_number_of_threads_is_refused_or_told(tmp_path):
    folder = tmp_path / "out"
    stopped(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(UsageError, match="num_threads"):
            train(folder, ignore)
        with pytest.warns(CheckpointWarning, match="num_threads"):
            train(folder, ignore, allow=("num_threads",))
    finally:
        torch.set_num_threads(threads)

"""A loop of Accelerate is watched, stops and resumes by the real package, to the same bytes where that was asked for."""

import pytest
import torch
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator, skip_first_batches  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration  # noqa: E402

from memfit.errors import UsageError  # noqa: E402
from memfit.integrations.accelerate import Exact, MemfitCallback, Stop  # noqa: E402
from memfit.training import SafeStep  # noqa: E402
from training import loops  # noqa: E402
from training.conftest import events  # noqa: E402, F401
from training.loops import NUM_EPOCHS, Unwatched, bare, digest, ids, in_child, loader, masked, parts, plain, said  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def ignore(moment):
    pass


def make(mode, accelerator, folder, allow=(), loss=None, times=loops.EVERY_TWO):
    if mode in ("watch", "plain"):
        return MemfitCallback(accelerator) if mode == "watch" else Unwatched()
    form, seed = (Exact, {"seed": 1}) if mode == "exact" else (Stop, {})
    return form(accelerator, folder, allow=allow, loss=loss, **times, **seed)


def train(  # noqa: PLR0913
    folder,
    at,
    *,
    mode="exact",
    workers=0,
    collate=masked,
    rate=1e-2,
    width=8,
    allow=(),
    data=None,
    leaves=False,
    accumulation=2,
    scaled=False,
    with_loss=False,
    times=loops.EVERY_TWO,
    skips=0,
    **settings,
):
    """Train in Accelerate; return the hash of what it leaves, the samples of each batch, and evaluations."""
    dealt = {"use_seedable_sampler": settings.pop("seedable", False), "split_batches": settings.pop("split", False)}
    seedable = DataLoaderConfiguration(**dealt)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=seedable, **settings
    )
    scaler = accelerator.scaler = torch.amp.GradScaler("cpu", 4.0, growth_interval=3) if scaled else None
    model, optimizer, schedule = parts(rate, width)
    loss_of = lambda batch: model(batch[1]).square().mean()  # noqa: E731
    run = make(mode, accelerator, folder, allow, loss_of if with_loss else None, times)
    batches = run.loader(loader(collate, workers, data))
    model, optimizer, schedule, batches, valid = accelerator.prepare(
        model, optimizer, schedule, batches, DataLoader(loops.Samples(), 4, num_workers=workers)
    )
    seen, evaluated = [], []
    with run:
        for epoch in run.epochs(NUM_EPOCHS):
            at(("begin", epoch))
            for batch in run.batches(skip_first_batches(batches, skips) if skips and epoch == 1 else batches):
                if leaves and (epoch, run.batch) == (1, 3):
                    break  # with a batch that is not wanted
                with accelerator.accumulate(model):
                    loss = loss_of(batch)
                    accelerator.backward(loss * torch.inf if scaled and run.batch == 3 else loss)
                    seen.append(ids(batch))
                    at(("batch", epoch, run.batch))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                run.log(loss)
            for _ in valid:
                at(("evaluation", epoch))
            evaluated.append(epoch)
    left = digest(accelerator.unwrap_model(model), optimizer) + (f" {scaler.get_scale()} {run.step}" if scaled else "")
    return left, seen, evaluated


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an unbroken training leaves, by its options."""
    made = {}

    def find(**options):
        key = repr(sorted(options.items(), key=repr))
        if key not in made:
            folder = tmp_path_factory.mktemp("whole") / "out"
            code, made[key] = in_child(train, folder, **options)
            assert code == 0, said(folder)
        return made[key]

    return find


BF16 = {"mixed_precision": "bf16"}


@pytest.mark.core
@pytest.mark.parametrize(
    "first, second", [(BF16, BF16), ({"workers": 2, "seedable": True}, {})], ids=["bf16", "seedable"]
)
def test_other_numbers_and_samplers_are_exact(tmp_path, whole, first, second):
    folder = tmp_path / "out"
    assert in_child(train, folder, ("batch", 1, 3), **first)[0] == 75
    found = in_child(train, folder, **second)[1][0]
    assert found == whole(**second)[0] and (found != whole()[0]) == bool(second)


@pytest.mark.parametrize("mode", ["stop", "exact"])
def test_a_loss_that_is_given_says_whether_the_largest_batch_fits(mode, tmp_path, whole, capsys):
    found = in_child(train, tmp_path / "out", mode=mode, with_loss=True, mixed_precision="bf16", workers=1)[1][0]
    assert found == whole(mode=mode, mixed_precision="bf16", workers=1)[0], said(tmp_path / "out")
    assert "fits: the largest of 5 batches" in said(tmp_path / "out")


@pytest.mark.parametrize("mode", ["stop", "exact"])
def test_an_epoch_of_which_the_script_skips_batches_is_of_the_same_data(mode, tmp_path, whole):
    folder, options = tmp_path / "out", {"mode": mode, "collate": plain, "skips": 2}
    unbroken, seen, _ = whole(**options)
    assert len(seen) == 13 and in_child(train, folder, ("batch", 1, 2), **options)[0] == 75
    assert in_child(train, folder, **options)[1][:2] == (unbroken, seen[7:]), said(folder)


@pytest.mark.core
def test_stop_sees_each_sample_of_a_seedable_sampler_once(tmp_path, whole):
    folder, options = tmp_path / "out", {"mode": "stop", "collate": plain, "seedable": True}
    unbroken, seen, _ = whole(**options)
    assert in_child(train, folder, ("batch", 1, 3), **options)[0] == 75
    code, (found, rest, _) = in_child(train, folder, **options)
    assert (code, rest, found) == (0, seen[9:], unbroken)  # nothing but order and dropout is random here
    assert "but not to the same bytes" in said(folder)


class Batches:
    """Draws by seed and epoch, which it is told."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 5

    def __iter__(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(7 + self.epoch)).tolist()
        return iter([order[one : one + 4] for one in range(0, 20, 4)])


def ordered(folder, at, kind="batches"):
    """Train on a loader with an order of its own; return the samples of each batch."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = bare()
    if kind == "batches":
        batches = DataLoader(loops.Samples(), batch_sampler=Batches(), collate_fn=plain)
    else:
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        batches = stateful.StatefulDataLoader(loops.Samples(), 4, shuffle=True, collate_fn=plain)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    run, seen = Stop(accelerator, folder, every=9, allow=("rehearsal",)), []
    for epoch in run.epochs(2):
        for batch in run.batches(batches):
            seen.append(ids(batch))
            at(("batch", epoch, run.batch))
            optimizer.step()
    return seen


@pytest.mark.filterwarnings("ignore:.*set_vital")  # torchdata asks for it
@pytest.mark.parametrize("kind", ["batches", "stateful"])
def test_an_order_of_its_own_goes_on_after_a_stop(kind, tmp_path):
    if kind == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader")
    whole = in_child(ordered, tmp_path / "whole", kind=kind)[1]
    assert whole[:5] != whole[5:]
    assert in_child(ordered, tmp_path / "part", ("batch", 1, 2), kind=kind)[0] == 75, said(tmp_path / "part")
    assert in_child(ordered, tmp_path / "part", kind=kind)[1] == whole[7:], said(tmp_path / "part")
    told = "in the order that Batches gives now" if kind == "batches" else "the order goes on"
    assert f"but not to the same bytes: {'the epoch goes on ' * (kind == 'batches')}{told}" in said(tmp_path / "part")


@pytest.mark.core
def test_a_schedule_that_was_not_prepared_is_refused_before_the_first_step(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(UsageError, match="unsaved_schedule"), Stop(accelerator, tmp_path, every=1):
        pass
    accelerator.register_for_checkpointing(schedule)
    with Stop(accelerator, tmp_path, every=1):
        pass


@pytest.mark.core
def test_what_cannot_be_resumed_is_refused_before_the_first_step(tmp_path):
    seen = []
    with pytest.raises(UsageError, match="stream"):
        train(tmp_path, seen.append, data=loops.Resumable())
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match="was not prepared"), Stop(accelerator, tmp_path, every=1):
        pass
    *_, batches = accelerator.prepare(*bare(), loader())
    with (
        pytest.raises(UsageError, match="has not made"),
        Exact(accelerator, tmp_path, seed=1, every=1) as run,
    ):
        run.batches(batches)
    accelerator.project_configuration = ProjectConfiguration(automatic_checkpoint_naming=True)
    with pytest.raises(UsageError, match="automatic_checkpoint_naming"), Stop(accelerator, tmp_path, every=1):
        pass
    accelerator.dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=False)
    accelerator.dataloader_config.use_stateful_dataloader = True  # without torchdata only here
    with pytest.raises(UsageError, match="use_stateful_dataloader"), Stop(accelerator, tmp_path, every=1):
        pass
    accelerator.state._shared_state["num_processes"] = 2
    for name, value in (("dispatch_batches", True), ("even_batches", False)):
        accelerator.dataloader_config = DataLoaderConfiguration(**{name: value})
        with pytest.raises(UsageError, match=f"resumed with {name}"), Exact(accelerator, tmp_path, seed=1, every=1):
            pass
    accelerator.dataloader_config = DataLoaderConfiguration()
    accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    with pytest.raises(UsageError, match="resumed with fsdp"), Stop(accelerator, tmp_path, every=1):
        pass
    assert seen == []


def safe(folder, at, fits=3):
    """Train by a SafeStep in Accelerate, on a device that fits so many samples."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = bare()
    run = Exact(accelerator, folder, seed=1, every=2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, run.loader(loader()))

    def loss(model, batch):
        if len(batch[0]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(batch[1]).square().sum(), len(batch[0])

    step = SafeStep(model, optimizer, loss, backward=accelerator.backward)
    accelerator.register_for_checkpointing(step)
    with run:
        for epoch in run.epochs(2):
            for batch in run.batches(batches):
                run.log(step(batch).loss)
                at(("batch", epoch, run.batch))
    return digest(accelerator.unwrap_model(model), optimizer), step.num_ooms, run.step


def test_safe_step_recovers_stops_and_resumes(tmp_path):
    code, result = in_child(safe, tmp_path / "whole")
    assert code == 0, said(tmp_path / "whole")
    assert (result[1] > 0, result[2]) == (True, 10)
    assert in_child(safe, tmp_path / "out", ("batch", 1, 2))[0] == 75
    assert in_child(safe, tmp_path / "out")[1][0] == result[0]

"""What would make a training fit: changes of its setup, the cheapest first, each tried; and the largest batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.estimation._estimate import Estimate
from memfit.estimation._gpus import Gpu
from memfit.estimation._setup import Setup

#: A change is left out of several together where it saves less than this share of the device.
_WORTH = 0.005
_MOST_ADDED = 16


@dataclass(frozen=True)
class Change:
    """One change, or several together, and what comes of it.

    Attributes:
        options: The options of ``memfit estimate`` that say it, to be written behind those of the setup before.
        cost: What it costs, in words.
        setup: The setup with it.
        same_training: Whether the training computes the same, up to rounding.
    """

    options: tuple[str, ...]
    cost: str
    setup: Setup
    same_training: bool = True


def list_options(before: Setup, after: Setup) -> tuple[str, ...]:
    """The options of ``memfit estimate`` that make one setup the other, written behind those of the first.

    >>> list_options(Setup(gradient_checkpointing="selective"), Setup(batch=2, gradient_checkpointing="full"))
    ('--batch 2', '--no-selective-checkpointing', '--gradient-checkpointing')
    """
    flags = (
        ("foreach", "foreach"),
        ("offload_activations", "offload-activations"),
        ("optimizer_in_backward", "optimizer-in-backward"),
        ("clip_grad_norm", "clip"),
        ("master_weights", "master-weights"),
        ("compiled", "compile"),
    )
    values = (
        ("batch", "batch"),
        ("num_microbatches", "microbatches"),
        ("attention", "attention"),
        ("loss_chunks", "loss-chunks"),
        ("optimizer", "optimizer"),
        ("state_dtype", "state-dtype"),
        ("quantization", "quant"),
        ("world_size", "world-size"),
        ("strategy", "strategy"),
        ("load", "load"),
    )
    names = {"full": "gradient-checkpointing", "selective": "selective-checkpointing"}
    was, will = before.gradient_checkpointing, after.gradient_checkpointing
    changed = [f"--{name} {getattr(after, key) or 'none'}" for key, name in values if _differs(key, before, after)]
    changed += [
        f"--{'' if getattr(after, key) else 'no-'}{name}" for key, name in flags if _differs(key, before, after)
    ]
    changed += [f"--no-{names[was]}"] if was != will and was in names else []
    changed += [f"--{names[will]}"] if was != will and will in names else []
    changed += [f"--lora {after.lora_rank}"] if after.lora_rank != before.lora_rank else []
    return tuple(changed)


def _differs(key: str, before: Setup, after: Setup) -> bool:
    return bool(getattr(before, key) != getattr(after, key))


def list_changes(setup: Setup) -> Iterator[Change]:
    """Single changes that apply to a setup, the cheapest in speed first, those that change the training last.

    >>> [" ".join(change.options) for change in list_changes(Setup(batch=2, seq_len=512))][:3]
    ['--no-foreach', '--loss-chunks 8', '--batch 1 --microbatches 2']
    """
    for changed, cost, same in _changes(setup):
        yield Change(list_options(setup, changed), cost, changed, same)


def _changes(setup: Setup) -> Iterator[tuple[Setup, str, bool]]:
    trains = setup.optimizer != "none"
    full_update = trains and not setup.lora_rank
    if setup.is_sharded and setup.load != "shards":
        yield replace(setup, load="shards"), "none: build on the meta device, load shard by shard", True
    if setup.attention == "eager":
        yield replace(setup, attention="sdpa"), "none: it is faster", True
    if full_update and setup.foreach and not setup.optimizer_in_backward:
        yield replace(setup, foreach=False), "none with fused=True", True
    if trains and setup.loss_chunks == 1:
        yield replace(setup, loss_chunks=8), "hardly any", True
    if setup.batch > 1 and not (trains and setup.optimizer_in_backward):
        parts = next(number for number in range(2, setup.batch + 1) if setup.batch % number == 0)
        smaller = replace(setup, batch=setup.batch // parts)
        if trains:  # samples an update stay as they were
            smaller = replace(smaller, num_microbatches=setup.num_microbatches * parts)
        yield smaller, "some per cent of speed: smaller products", True
    if trains and setup.gradient_checkpointing == "none":
        yield replace(setup, gradient_checkpointing="selective"), "5 to 15 % of speed", True
    if trains and setup.gradient_checkpointing != "full":
        yield replace(setup, gradient_checkpointing="full"), "25 to 33 % of speed", True
    if trains and not setup.offload_activations and setup.gradient_checkpointing == "full":
        yield replace(setup, offload_activations=True), "host memory, and speed where the bus is slow", True
    if full_update and setup.world_size > 1 and setup.strategy in ("none", "ddp", "zero1", "zero2"):
        yield replace(setup, strategy="fsdp", load="shards"), "traffic between the devices", True
    yield from _changes_of_training(setup, trains, full_update)


def _changes_of_training(setup: Setup, trains: bool, full_update: bool) -> Iterator[tuple[Setup, str, bool]]:
    one = setup.num_microbatches == 1 and setup.strategy == "none"
    if full_update and one and not setup.optimizer_in_backward and not setup.master_weights:
        changed = replace(setup, optimizer_in_backward=True, clip_grad_norm=False)
        yield changed, "no clipping by the norm", not setup.clip_grad_norm
    if full_update and setup.optimizer in ("adam", "adamw") and not setup.master_weights:
        yield replace(setup, optimizer="adamw8bit", state_dtype=None), "moments in 8 bits", False
    adapters = replace(
        setup,
        lora_rank=setup.lora_rank or 16,
        optimizer=setup.optimizer if setup.lora_rank else "adamw",
        master_weights=False,
        state_dtype=None,
        optimizer_in_backward=False,
    )
    if full_update:
        yield adapters, "trains adapters only", False
    if setup.quantization == "none" and setup.strategy == "none":
        if trains:
            yield replace(adapters, quantization="nf4"), "trains adapters on rounded weights; slower", False
        else:
            yield replace(setup, quantization="nf4"), "rounded weights; slower", False


def find_change(
    setup: Setup, gpu: Gpu, guess: Callable[[Setup], int], check: Callable[[Setup], Estimate], *, most_checks: int = 5
) -> tuple[Change, Estimate] | None:
    """The cheapest change after which the bound fits the device; of single ones first, then of ones added up.

    Args:
        setup: What does not fit.
        gpu: The device.
        guess: A quick guess of the bound of the device's peak in bytes, to leave out what is hopeless.
        check: The estimate that decides.
        most_checks: How many changes may be checked; the rest is given up.
    """
    checks = 0
    for change in _candidates(setup, guess, _WORTH * gpu.total_bytes):
        if guess(change.setup) > gpu.total_bytes:
            continue
        if checks == most_checks:
            return None
        checks += 1
        found = check(change.setup)
        if found.verdict == "fits":
            return change, found
    return None


def _candidates(setup: Setup, guess: Callable[[Setup], int], worth: float) -> Iterator[Change]:
    singles = list(list_changes(setup))
    yield from (change for change in singles if change.same_training)
    added: Change | None = None
    for _ in range(_MOST_ADDED):  # each round adds the cheapest one that saves something and applies still
        base = added.setup if added else setup
        kept = [change for change in list_changes(base) if change.same_training]
        following = next((change for change in kept if guess(base) - guess(change.setup) > worth), None)
        if following is None:
            break
        added = _join(setup, added, following)
        yield added
    yield from (change for change in singles if not change.same_training)
    if added is not None:
        for change in list_changes(added.setup):
            if not change.same_training:
                yield _join(setup, added, change)


def _join(setup: Setup, first: Change | None, second: Change) -> Change:
    costs = dict.fromkeys((*(first.cost.split("; ") if first else ()), *second.cost.split("; ")))
    same = second.same_training and (first is None or first.same_training)
    return Change(list_options(setup, second.setup), "; ".join(costs), second.setup, same)


def find_batch(
    setups: Sequence[Setup],
    gpu: Gpu,
    guess: Callable[[Setup], int] | None,
    check: Callable[[Setup], Estimate],
    *,
    most_checks: int = 8,
) -> tuple[Setup, Estimate]:
    """The last of setups, in order of growing memory, whose bound fits the device; the first if none does.

    Args:
        setups: One after the other takes more.
        gpu: The device.
        guess: A quick guess of the bound of the device's peak in bytes: says where to look. Without one, from the first
            of the setups on, what has been checked says it.
        check: The estimate that decides.
        most_checks: How many may be checked; then the largest one that is known to fit is taken.
    """
    fits, above, scale = -1, len(setups), 1.0
    found: dict[int, Estimate] = {}
    for number in range(most_checks):
        if guess is None and not found:
            at = 0
        elif guess is None and number < most_checks // 2:
            at = _last_within(_line_through(setups, found), fits, above, gpu.total_bytes)
        elif guess is not None and number < most_checks // 2:
            at = _last_within(lambda place: guess(setups[place]), fits, above, gpu.total_bytes / scale)
        else:
            at = (fits + above) // 2
        at = min(max(at, fits + 1), above - 1)
        found[at] = check(setups[at])
        if found[at].verdict == "fits":
            fits = at
        else:
            above = at
        if above - fits == 1:
            break
        if guess is not None:
            scale = found[at].device["device_bytes"].upper / max(guess(setups[at]), 1)
    at = max(fits, 0)
    return setups[at], found[at] if at in found else check(setups[at])


def _line_through(setups: Sequence[Setup], found: Mapping[int, Estimate]) -> Callable[[int], float]:
    """The bound of a setup by its batch, on the line of the two largest that were checked; of one alone in proportion.

    Args:
        setups: One after the other has a larger batch.
        found: What was checked, by its place.
    """
    points = [(setups[place].batch, found[place].device["device_bytes"].upper) for place in sorted(found)]
    (low, less), (high, more) = ([(0, 0), *points])[-2:]
    return lambda place: less + (more - less) * (setups[place].batch - low) / (high - low)


def _last_within(need: Callable[[int], float], low: int, high: int, limit: float) -> int:
    """The last place between two whose need is within a limit, by halving; the lower one if there is none."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= limit else (low, middle)
    return low

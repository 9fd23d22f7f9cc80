"""Find what makes a training fit: changes of its setup, the cheapest first, and the largest batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

from memfit.estimation._estimate import Estimate
from memfit.estimation._gpus import Gpu
from memfit.estimation._setup import Dtype, Setup
from memfit.estimation._time_limit import time_left

#: A change joins others only if it saves this share of the device.
_WORTH = 0.005
_MOST_ADDED = 16
_MOST_CHECKS, _MOST_OF_ONE, _MOST_SHOWN = 10, 4, 3
#: The options of ``memfit estimate`` for the fields of `Setup` that are set most; ``--train KEY=VALUE`` sets any field.
_OPTIONS = {name: f"--{name}" for name in ("batch", "dtype", "optimizer", "strategy")} | {
    "seq_len": "--seq-len",
    "world_size": "--world-size",
    "lora_rank": "--lora",
    "num_microbatches": "--microbatches",
}


@dataclass(frozen=True)
class Change:
    """One change of a setup, or several together. ``options`` are those of ``memfit estimate`` that make it; ``cost``
    is in words. ``same_training``: the training computes the same, up to rounding."""

    options: tuple[str, ...]
    cost: str
    setup: Setup
    same_training: bool = True


def list_options(before: Setup, after: Setup) -> tuple[str, ...]:
    """Return the options that turn one setup into the other, to be added to those of the first."""
    changed = []
    for field in fields(Setup):
        was, will = getattr(before, field.name), getattr(after, field.name)
        if was == will:
            continue
        if (field.name, was, will) == ("gradient_checkpointing", "none", "full"):
            changed.append("--gradient-checkpointing")
        elif field.name in _OPTIONS:
            changed.append(f"{_OPTIONS[field.name]} {will}")
        else:
            changed.append(f"--train {field.name}={'null' if will is None else str(will).lower()}")
    return tuple(changed)


def in_words(options: Sequence[str], settings: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return options as a workload's own settings (`memfit.pipeline.Probe`); nothing if it lacks one of them.
    >>> in_words(["--train loss_chunks=8"], {"--train loss_chunks": "params.chunks={}"}), in_words(["--batch 1"], {})
    (('--set params.chunks=8',), ())
    """
    if settings is None:
        return tuple(options)
    given = [(one, *one.replace("=", " ").rpartition(" ")[::2]) for one in options]
    found = [settings.get(one, settings.get(key, "")).format(value) for one, key, value in given]
    return tuple(f"--set {one}" for one in found) if all(found) else ()


def list_changes(setup: Setup, settings: Mapping[str, str] | None = None) -> Iterator[Change]:
    """Yield the single changes that apply to a setup and have settings: the cheapest first, new trainings last."""
    for changed, cost, same in (*_changes(setup), *_changes_of_training(setup)):
        if in_words(options := list_options(setup, changed), settings):
            yield Change(options, cost, changed, same)


def _changes(setup: Setup) -> Iterator[tuple[Setup, str, bool]]:
    trains = setup.optimizer != "none"
    full_update = trains and not setup.lora_rank
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
    if full_update and setup.world_size > 1 and setup.strategy != "fsdp":
        yield replace(setup, strategy="fsdp"), "traffic between the devices", True


def _changes_of_training(setup: Setup) -> Iterator[tuple[Setup, str, bool]]:
    trains = setup.optimizer != "none"
    full_update = trains and not setup.lora_rank
    is_narrow = setup.dtype in ("bf16", "fp16") and not setup.master_weights
    if full_update and setup.optimizer == "adamw" and not is_narrow:
        yield replace(setup, optimizer="paged_adamw"), "moments wait in host memory", True
    one = setup.num_microbatches == 1 and setup.strategy == "none"
    if full_update and one and not setup.optimizer_in_backward and not setup.master_weights:
        changed = replace(setup, optimizer_in_backward=True, clip_grad_norm=False)
        yield changed, "no clipping by the norm", not setup.clip_grad_norm
    if full_update and is_narrow:
        wide: Dtype = "bf16-amp" if setup.dtype == "bf16" else "fp16-amp"
        yield replace(setup, dtype=wide), "weights and moments in fp32", False
    if full_update and setup.optimizer in ("adam", "adamw") and not setup.master_weights:
        yield replace(setup, optimizer="adamw8bit"), "moments in 8 bits", False
        yield replace(setup, optimizer="adafactor"), "another optimizer, of hardly any state", False
    adapters = replace(setup, lora_rank=16, optimizer="adamw") if full_update else setup
    if trains:
        adapters = replace(adapters, master_weights=False, optimizer_in_backward=False)
    if full_update:
        yield adapters, "trains adapters only", False
    if setup.quantization == "none" and setup.strategy == "none":
        cost = "trains adapters on rounded weights; slower" if trains else "rounded weights; slower"
        yield replace(adapters, quantization="nf4"), cost, False


_Guess = Callable[[Setup], int]
_Lister = Callable[[Setup], Iterator[Change]]


def rank_changes(
    setup: Setup,
    gpu: Gpu,
    guess: _Guess,
    check: Callable[[Setup], Estimate],
    changes: _Lister = list_changes,
    learns: Callable[[Setup], bool] = lambda setup: True,
) -> list[tuple[Change, Estimate]]:
    """Return changes after which the bound fits the device, one for each way to train: first those that learn, and of
    them first those that change the training least. ``guess`` quickly guesses the bound of the device's peak in bytes;
    what does not fit by it is not checked. ``check`` decides."""
    ways = [Change((), "", setup), *(one for one in changes(setup) if _is_way(setup, one))]
    wide = next((one for one in ways if one.setup.autocasts and not one.setup.lora_rank), ways[0])
    if not learns(setup) and wide is not ways[0]:  # adapters learn already
        joined = (_join(setup, wide, one) for one in changes(wide.setup) if _is_way(wide.setup, one))
        ways = [wide, *(one for one in joined if not one.setup.lora_rank), *(one for one in ways if one is not wide)]

    def fit(way: Change) -> tuple[Change, Estimate] | None:
        best = None
        saving = _saving(setup, way, guess, _WORTH * gpu.total_bytes, changes)
        hopeful = (one for one in saving if one.options and guess(one.setup) <= gpu.total_bytes)
        for change, _ in zip(islice(hopeful, _MOST_OF_ONE), checks, strict=False):
            found = check(change.setup)
            best = (change, found) if found.verdict in ("fits", "tight") else best
            if found.fits:
                break
        return best

    ranked, checks = list[tuple[Change, Estimate]](), iter(range(_MOST_CHECKS))
    is_lost = not learns(setup) and guess(setup) > gpu.total_bytes  # what fits as it is needs no saving
    for is_kept, most in ((True, _MOST_SHOWN), (False, is_lost)):
        fitting = map(fit, (way for way in ways if learns(way.setup) is is_kept))
        ranked += islice(filter(None, fitting), most)
    return ranked


def _is_way(setup: Setup, change: Change) -> bool:
    """Whether it is another way to train, of which each is ranked by itself."""
    return not change.same_training or change.setup.optimizer != setup.optimizer


def _saving(setup: Setup, way: Change, guess: _Guess, worth: float, changes: _Lister) -> Iterator[Change]:
    """Yield a way to train, then with one change that keeps it, the cheapest first, then with several."""
    kept = [one for one in changes(way.setup) if not _is_way(way.setup, one)]
    yield from (way, *(_join(setup, way, one) for one in kept))
    for _ in range(_MOST_ADDED):  # each round adds the cheapest one that saves something and applies still
        following = next((one for one in kept if guess(way.setup) - guess(one.setup) > worth), None)
        if following is None:
            break
        way = _join(setup, way, following)
        yield way
        kept = [one for one in changes(way.setup) if not _is_way(way.setup, one)]


def _join(setup: Setup, first: Change, second: Change) -> Change:
    costs = dict.fromkeys(filter(None, (*first.cost.split("; "), *second.cost.split("; "))))
    same = first.same_training and second.same_training
    return Change(list_options(setup, second.setup), "; ".join(costs), second.setup, same)


def find_batch(
    setups: Sequence[Setup],
    gpu: Gpu,
    guess: Callable[[Setup], int] | None,
    check: Callable[[Setup], Estimate],
    *,
    most_checks: int = 8,
) -> tuple[Setup, Estimate]:
    """Return the last setup whose bound fits the device, with its estimate; the first setup if none does.

    ``setups`` come in order of growing memory. ``guess`` gives the bound in bytes for the first check; then a line
    through what was checked says where to look. After ``most_checks``, or when the time for traces is over, the largest
    known to fit is taken."""
    fits, above = -1, len(setups)
    found: dict[int, Estimate] = {}
    for number in range(most_checks):
        if fits >= 0 and time_left() <= 0:
            break
        at = (fits + above) // 2
        if not found:
            at = 0 if guess is None else _last_within(lambda place: guess(setups[place]), fits, above, gpu.total_bytes)
        elif number < most_checks // 2:
            at = _last_within(_line_through(setups, found), fits, above, gpu.total_bytes)
        at = min(max(at, fits + 1), above - 1)
        found[at] = check(setups[at])
        if found[at].verdict == "fits":
            fits = at
        else:
            above = at
        if above - fits == 1:
            break
    at = max(fits, 0)
    return setups[at], found[at] if at in found else check(setups[at])


def _line_through(setups: Sequence[Setup], found: Mapping[int, Estimate]) -> Callable[[int], float]:
    """Predict the bound by the batch, on the line through the two largest that were checked, or through zero."""
    points = [(setups[place].batch, found[place].device["device_bytes"].upper) for place in sorted(found)]
    (low, less), (high, more) = ([(0, 0), *points])[-2:]
    return lambda place: less + (more - less) * (setups[place].batch - low) / (high - low)


def _last_within(need: Callable[[int], float], low: int, high: int, limit: float) -> int:
    """Return the last place between two whose need is within a limit, by halving; the lower one if there is none."""
    return low + bisect_right(range(low + 1, high), limit, key=need)

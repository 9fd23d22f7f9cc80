"""Try data and model before the first step: does one key give one batch, does anything move that no checkpoint holds?

What they cannot see: state in closures, global variables and C extensions, and a change that begins later.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from memfit.errors import MemfitError, UsageError
from memfit.rundir import record
from memfit.training._process import preserved_rng, say
from memfit.training._ranks import first_line
from memfit.training._snapshot import kept
from memfit.training._stream import KeyedStream

#: So many samples are drawn of a batch, so many numbers are compared of an object's attributes, as deep as this.
_NUM_SAMPLES, _NUM_ATTRIBUTES, _DEPTH = 8, 2000, 3
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@contextlib.contextmanager
def tried(what: str, name: str, allow: Collection[str] = ()) -> Iterator[None]:
    """Try a part before the first step. If it raises an error, perhaps in the trial alone, say so and go on."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemfitError):
            raise
        if name not in allow:
            text = f"{what} could not be tried, so counters and generators of its own are not seen: {first_line(error)}"
            record("untried", text=text)
            say(f"{text}; allow=({name!r},) leaves this out")


def check_loader(loader: DataLoader[Any], allow: Collection[str] = ()) -> None:
    """Draw a few samples of two batches, again and again, under the keys of a ``KeyedStream``; refuse what differs. An
    attribute that only the first draws set (a file that is opened late), or that says what was drawn last, may move. So
    may the parts in ``allow``, such as ``"collator.counter"``: they change no batch."""
    keyed = KeyedStream(0).loader(loader)
    parts = {"dataset": loader.dataset, "collator": loader.collate_fn}
    numbers = [_Numbers(part, name) for name, part in parts.items()]
    with tried("the training data", "data", allow), preserved_rng(), contextlib.ExitStack() as stack:
        for one in numbers:
            stack.callback(one.put_back)
        order, again = list(itertools.islice(_keys(keyed), 2)), list(itertools.islice(_keys(keyed), 2))
        if order != again:
            raise _refused("The sampler gives another order under the same key.", "sampler", allow)
        first = [_draw(keyed, keys) for keys in order]
        moved = [one.moved() for one in numbers]
        second = []
        for keys in order[:1]:  # an odd number of samples and of batches, so that no switch is back where it was
            _item(keyed, keys)
            second.append(_draw(keyed, keys))
        second += [_draw(keyed, keys) for keys in order]
        is_same = all(_same(*pair) for pair in zip([*first[:1], *first], second, strict=True))
        still = [name for one in numbers for name in one.moved()]
        if is_same and (once := [name for names in moved for name in names if name not in {*still, *allow}]):
            still += _carried(once, numbers, keyed, order, first)
        for name in itertools.chain(*moved) if not is_same else still:
            if name not in allow:
                raise _refused(f"{name} moves when a batch is made.", name, allow)
        if not is_same and "data" not in allow:
            raise _refused("The first batch differs when it is made a second time.", "data", allow)


def _carried(names: list[str], numbers: list[_Numbers], loader: Any, order: list[Any], batches: list[Any]) -> list[str]:
    """Return those names if the batches are others when they are drawn in another order, from the first numbers."""
    now = [one.exchange(names) for one in numbers]
    try:
        is_same = all(_same(_draw(loader, keys), batch) for keys, batch in [*zip(order, batches, strict=True)][::-1])
    except Exception:  # a number, and what belongs to it, were told apart
        is_same = False
    for one, values in zip(numbers, now, strict=True):
        one.exchange(names, values)
    return [] if is_same else names


def _keys(loader: Any) -> Iterator[Any]:
    yield from loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _draw(loader: Any, keys: Any) -> Any:
    """Make a batch of a few of the samples; of all where it cannot be made of a few."""
    if loader.batch_sampler is None or not isinstance(keys, list):
        return loader.collate_fn(loader.dataset[keys])
    try:
        return loader.collate_fn(loader.dataset.__getitems__(keys[:_NUM_SAMPLES]))
    except Exception:
        return loader.collate_fn(loader.dataset.__getitems__(keys))


def _item(loader: Any, keys: Any) -> None:
    if isinstance(keys, list) and loader.batch_sampler is not None:
        loader.dataset.__getitems__(keys[:1])
    else:
        loader.dataset[keys]


def check_model(model: torch.nn.Module, forward: Callable[[], object], allow: Collection[str] = ()) -> None:
    """Call ``forward`` without gradients, put all back, and refuse what moves unsaved. Where something moves that no
    checkpoint holds, it is called again from another value. What it sets whatever was there before (the height of a
    picture) is no state. Neither is a table that has grown, nor what a metric of torchmetrics counts."""
    cells = [cell for cell in _cells_of(model) if cell.name not in allow]
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    held = _tensors_of(model)

    def values_after() -> list[Any]:
        try:
            with preserved_rng(), torch.compiler.set_stance("force_eager"):
                forward()
            return [_copy(cell.get()) for cell in cells]
        finally:
            for buffer, was in buffers:
                buffer.copy_(was)

    with tried("the model", "rehearsal", allow), torch.no_grad(), kept(model):
        first = values_after()
        if carried := _carried_tensors(model, held, values_after, allow):
            raise _refused(
                f"{carried} is carried from one forward pass to the next, and saved nowhere.", carried, allow
            )
        grown = {cell.name for cell, now in zip(cells, first, strict=True) if _has_grown(cell.was, now)}
        sizes = {size for cell, now in zip(cells, first, strict=True) if cell.name in grown for size in now.shape}
        moved = [
            (cell, now)
            for cell, now in zip(cells, first, strict=True)
            if not _same(cell.was, now) and cell.name not in grown and not (type(now) is int and now in sizes)
        ]
        if not moved:
            return
        for cell, now in moved:
            cell.set(_another(now))
        try:
            second = dict(zip([cell.name for cell in cells], values_after(), strict=True))
        except Exception:  # what moved is read before it is set
            second = {}
        for cell, now in moved:
            if isinstance(now, bool) or cell.name not in second or not _same(second[cell.name], now):
                name = cell.name
                raise _refused(f"{name} moves in a forward pass, and no checkpoint holds it.", name, allow)


def check_compiled(model: torch.nn.Module, allow: Collection[str] = ()) -> None:
    """Refuse kernels that depend on earlier batches or on timings, and graphs that hold random states."""
    on_cpu = all(one.device.type == "cpu" for one in model.parameters())
    for context in () if "torch_compile" in allow else map(_compiler_of, model.modules()):
        is_static = context is None or getattr(context, "_dynamic", None) is False
        is_timed = bool((getattr(context, "compiler_config", None) or {}).get("max_autotune"))
        if context is not None and (not is_static or is_timed or not on_cpu):
            raise UsageError(
                "The model is compiled, and which kernels run depends on "
                + ("timings." if is_static else "the shapes of the batches that were seen before."),
                rule="exact: a stopped training goes on to the same bytes; of torch.compile that was shown on a CPU, "
                "with dynamic=False and at most eight shapes.",
                remedy="compile with torch.compile(model, dynamic=False) and without max-autotune, or not at all; or, "
                'if all batches have one shape and you have seen it resume to the same, pass allow=("torch_compile",)',
            )
    for name, module in model.named_modules() if "cuda_graph" not in allow else ():
        if "make_graphed" in getattr(vars(module).get("forward"), "__qualname__", ""):
            what = f"model.{name} replays a CUDA graph, whose draws were not shown to follow the seed of each step."
            raise _refused(what, "cuda_graph", allow)


def _compiler_of(module: torch.nn.Module) -> Any:
    """Return what a module was compiled by: torch.compile(module), module.compile(), or Lightning's of a module."""
    if (call := getattr(module, "_compiled_call_impl", None)) is not None:
        return inspect.getclosurevars(call).nonlocals.get("self")
    kept_by_lightning = getattr(module, "_compiler_ctx", None) or {}
    return vars(module).get("dynamo_ctx", kept_by_lightning.get("dynamo_ctx"))


def _tensors_of(model: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str, Any]]:
    """Return the plain attributes that hold a tensor or a tuple of tensors, by name: where they stand, and a copy."""
    found = {}
    for path, module in model.named_modules():
        for key, value in () if _is_metric(module) else module.__dict__.items():
            parts = value if isinstance(value, tuple) else (value,)
            if parts and all(isinstance(one, torch.Tensor) for one in parts):
                name = f"model.{path}.{key}" if path else f"model.{key}"
                found[name] = (module.__dict__, key, tuple(map(_copy, parts)))
    return found


def _carried_tensors(
    model: torch.nn.Module,
    before: Mapping[str, tuple[dict[str, Any], str, Any]],
    again: Callable[[], object],
    allow: Collection[str],
) -> str:
    """Return the name of an attribute that another pass over the same batch sets to other tensors; empty if none. What
    a pass keeps of itself, such as attention weights, is the same again; a hidden state is not."""
    first = _tensors_of(model)
    changed = [name for name, (*_, now) in first.items() if name not in before or not _same(before[name][2], now)]
    changed = [name for name in changed if name not in allow]
    if not changed:
        return ""
    again()
    second = _tensors_of(model)
    return next((name for name in changed if name not in second or not _same(first[name][2], second[name][2])), "")


class _Cell(NamedTuple):
    """A number, a generator or a buffer of a module that no state dict holds."""

    holder: dict[str, Any]
    key: str
    name: str
    was: Any

    def get(self) -> Any:
        value = self.holder.get(self.key)
        return _state_of(value) if isinstance(value, _GENERATORS) else value

    def set(self, value: Any) -> None:
        held = self.holder.get(self.key)
        if not isinstance(held, _GENERATORS):
            self.holder[self.key] = value
        elif value is not None:
            _set_state(held, value)


def _cells_of(model: torch.nn.Module) -> Iterator[_Cell]:
    saved = set(model.state_dict())
    for path, module in model.named_modules():
        if _is_metric(module):
            continue
        start = f"{path}." if path else ""
        lost = [(module._buffers, key) for key in module._buffers if start + key not in saved]
        numbers = [
            (module.__dict__, key)
            for key, value in module.__dict__.items()
            if isinstance(value, (int, float, complex, *_GENERATORS))
        ]
        for holder, key in [*lost, *numbers]:
            cell = _Cell(holder, key, f"model.{start}{key}", None)
            if holder[key] is not None:
                yield cell._replace(was=_copy(cell.get()))


def _is_metric(module: torch.nn.Module) -> bool:
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _another(value: Any) -> Any:
    """Return another value of the same kind; of a generator's state none.
    >>> _another(3), _another(torch.ones(2))
    (13, tensor([9., 9.]))
    """
    if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
        return ~value
    return value * 2 + 7 if isinstance(value, int | float | complex | torch.Tensor) else None


def _has_grown(was: Any, now: Any) -> bool:
    """Return whether a table has more entries than before, and those of before.
    >>> _has_grown(torch.ones(2), torch.ones(3)), _has_grown(torch.zeros(2), torch.ones(3))
    (True, False)
    """
    if not isinstance(was, torch.Tensor) or not isinstance(now, torch.Tensor) or was.shape == now.shape:
        return False
    if not was.numel():
        return True
    is_larger = was.ndim == now.ndim and all(a <= b for a, b in zip(was.shape, now.shape, strict=True))
    return is_larger and _same(was, now[tuple(map(slice, was.shape))])


def check_first_forward(
    model: torch.nn.Module, is_due: Callable[[], bool] = lambda: True, allow: Collection[str] = ()
) -> RemovableHandle:
    """Let ``check_model`` try the first forward pass in training mode for which ``is_due``, with what it is given.
    ``remove()`` of the result takes the check back. Refuses at once what ``check_compiled`` refuses."""

    def rehearse(module: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and module.training and is_due():
            handle.remove()
            plain = getattr(module, "_orig_mod", module)
            check_model(plain, lambda: plain(*args, **kwargs), allow)
            torch.clear_autocast_cache()  # it holds weights that were cast without their gradients

    check_compiled(model, allow)
    handle = model.register_forward_pre_hook(rehearse, with_kwargs=True)
    return handle


def _refused(what: str, name: str, allow: Collection[str]) -> UsageError:
    cure = {
        "sampler": "let it draw from the global generators of torch, NumPy or Python, or from its attribute generator",
        "data": "draw from the global generators, and read no clock and no counter",
        "cuda_graph": "train without it",
    }.get(name, "make it a function of the sample, or a buffer that the state dict holds")
    allowed = repr((*sorted(allow), name)) if len(allow) else f'("{name}",)'
    return UsageError(
        what,
        rule="exact: a stopped training goes on to the same bytes, so nothing may move that is not saved or keyed.",
        remedy=f"{cure}; or, if no batch and no loss depends on it, pass allow={allowed}",
    )


def refuse_own_generators(batches: Any) -> None:
    """Refuse a data set that draws from a random generator of its own: no checkpoint holds its state."""
    holder = getattr(batches, "dataset", batches)
    while holder is not None and not hasattr(holder, "load_state_dict"):
        for name, value in getattr(holder, "__dict__", {}).items():
            is_seeded = name == "generator" and holder is batches and not hasattr(batches, "__getitem__")
            if isinstance(value, _GENERATORS) and not is_seeded:
                raise UsageError(
                    f"{type(holder).__name__}.{name} is a random generator of its own ({type(value).__name__}).",
                    rule="a resume is bit-exact: it knows the global generators, and those of loaders and samplers.",
                    remedy="draw from the global generators (numpy.random, torch.rand), or pass allow_inexact=True",
                )
        holder = getattr(holder, "dataset", None)


class _Numbers:
    """The numbers in an object's attributes, and the states of its random generators."""

    def __init__(self, holder: object, name: str) -> None:
        self._found: list[tuple[Any, str, str, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._walk(holder, name, _DEPTH)
        self._now = [was for *_, was in self._found]

    def _walk(self, holder: object, name: str, depth: int) -> None:
        if id(holder) in self._seen:
            return
        self._seen.add(id(holder))
        for key, value in list(getattr(holder, "__dict__", {}).items()):
            if len(self._found) >= _NUM_ATTRIBUTES:
                return
            if isinstance(value, int | float | complex):
                self._found.append((holder, key, f"{name}.{key}", value))
            elif isinstance(value, _GENERATORS):
                self._found.append((value, "", f"{name}.{key}", _state_of(value)))
                self._generators.append((value, self._found[-1][3]))
            elif depth and hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor):
                self._walk(value, f"{name}.{key}", depth - 1)

    def moved(self) -> list[str]:
        """Return the names of those that have moved since this was asked last."""
        before, self._now = self._now, [self._value(*one[:2]) for one in self._found]
        return [one[2] for one, was, now in zip(self._found, before, self._now, strict=True) if not _same(was, now)]

    @staticmethod
    def _value(holder: Any, key: str) -> Any:
        return getattr(holder, "__dict__", {}).get(key) if key else _state_of(holder)

    def exchange(self, names: Collection[str], values: list[Any] | None = None) -> list[Any]:
        """Give the numbers of these names their first values, or others, and return those of now."""
        now = [self._value(*one[:2]) for one in self._found]
        for (holder, key, name, was), value in zip(self._found, values or [one[3] for one in self._found], strict=True):
            if name in names and key:
                holder.__dict__[key] = was if values is None else value
        return now

    def put_back(self) -> None:
        """Put back the generators. Of numbers only their owner knows what belongs to them."""
        for generator, state in self._generators:
            _set_state(generator, state)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _same(one: Any, other: Any, seen: Collection[tuple[int, int]] = ()) -> bool:
    """Return whether two batches hold the same bytes; NaN is the same as itself.
    >>> _same({"x": torch.ones(2), "n": [1, "a"]}, {"x": torch.ones(2), "n": [1, "a"]}), _same([1.0], [2.0])
    (True, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
            return False
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        return bool(torch.equal(one, other) or (one.is_floating_point() and _bytes_of(one) == _bytes_of(other)))
    if isinstance(one, np.ndarray | np.generic):
        if one.dtype.hasobject:  # its bytes are addresses
            return _same(one.tolist(), other.tolist(), seen)
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, str | bytes | int | float | complex | None):
        return one == other or (one != one and other != other)
    if (id(one), id(other)) in seen:  # in a circle
        return True
    seen = {*seen, (id(one), id(other))}
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key], seen) for key, value in one.items())
    if isinstance(one, Sequence):
        return len(one) == len(other) and all(_same(*pair, seen) for pair in zip(one, other, strict=True))
    mine, theirs = getattr(one, "__dict__", None), getattr(other, "__dict__", None)  # a batch of a class of its own
    return _same(dict(mine), dict(theirs), seen) if mine and theirs else True


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()

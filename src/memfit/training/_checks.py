"""Refuse settings of the wrong type or range with errors that say what to pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args, get_type_hints

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

#: What follows when memory runs out on one rank of several.
Recovery = Literal["repeat", "restart"]

_CHECKED = "checked"
#: The type of an argument that ``checked_arguments`` checks, converting nothing.
Checked = Annotated[T, _CHECKED]

_CONFIG = ConfigDict(arbitrary_types_allowed=True, strict=True)

_NORM = "use GroupNorm or LayerNorm"

#: Compared by name: importing torch.distributed.fsdp only to compare takes seconds.
_RANK_CLASSES = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule"})


def _ranked(model: torch.nn.Module) -> list[tuple[str, str]]:
    found = [(name, kind) for name, one in model.named_modules() for kind in _classes(one) if kind in _RANK_CLASSES]
    return found + [(name, "DTensor") for name, one in model.named_parameters() if type(one).__name__ == "DTensor"]


def _classes(module: torch.nn.Module) -> list[str]:
    return [base.__name__ for base in type(module).__mro__]


def bad_setting(name: str, value: Any, rule: str, remedy: str = "") -> UsageError:
    text = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.80} ({type(value).__name__})"
    return UsageError(f"{name} is {text}.", rule=f"{rule}.", remedy=remedy or f"set {name} to another value")


def checked_arguments(call: Callable[P, T]) -> Callable[P, T]:
    """Refuse an argument whose ``Checked`` type excludes its value."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def wrapped(*args: P.args, **settings: P.kwargs) -> T:
        types, given = get_type_hints(call, include_extras=True), dict[str, Any]()
        with suppress(TypeError):  # Python's own error names the function
            given = signature.bind(*args, **settings).arguments
        for name, value in given.items():
            if _CHECKED in get_args(types.get(name))[1:]:
                _check(name, value, types[name])
        return call(*args, **settings)

    return wrapped


def _check(name: str, value: Any, kind: Any) -> None:
    try:
        TypeAdapter(kind, config=_CONFIG).validate_python(value)
    except ValidationError as error:
        text = " or ".join(dict.fromkeys(one["msg"] for one in error.errors(include_url=False)))
        raise bad_setting(name, value, text.replace("Input should be", "it is")) from None


def alone(what: str, remedy: str) -> UsageError:
    rule = "a rank makes its gradients alone, and again when memory runs out; then memfit sums those of all ranks."
    return UsageError(what, rule=rule, remedy=remedy)


class Given(NamedTuple):
    """A model as it was given: without its wrapper, as the loss gets it, and the group of ranks that train it.
    ``check`` looks at the wrapper before each step; None if its passes hold collectives."""

    model: Any
    called: Any
    group: Any = None
    check: Callable[[], None] | None = None
    is_sharded: bool = False


def take_off_wrapper(model: Any, group: Literal["auto"] | None, recovery: Recovery = "repeat") -> Given:
    """Return the model that a ``DistributedDataParallel`` wraps, or a sharded one as it is."""
    if group is not None and isinstance(model, torch.nn.Module) and "FSDPModule" in _classes(model):
        meshes = {one.device_mesh for one in model.parameters() if type(one).__name__ == "DTensor"}  # type: ignore[attr-defined]
        if len(meshes) != 1 or (mesh := meshes.pop()).ndim != 1:
            raise UsageError(
                "The model is sharded over meshes of several dimensions.",
                rule="one group of ranks shards all weights: fully_shard over a mesh of one dimension.",
                remedy="leave mesh= out, or train it in a loop of your own",
            )
        return Given(model, model, mesh.get_group(), is_sharded=True)
    if not isinstance(model, DistributedDataParallel) or group is None:
        is_grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_grouped and group is not None and isinstance(model, torch.nn.Module) and not _ranked(model):
            raise UsageError(
                f"The model is a plain one, and a group of {dist.get_world_size()} ranks is there.",
                rule="with several ranks, the model says by its wrapper whether they train it together.",
                remedy="wrap it: DistributedDataParallel(model); or pass group=None if this process trains it alone",
            )
        return Given(model, model)
    wrapper = model
    if recovery == "restart":
        return Given(wrapper.module, wrapper, wrapper.process_group)
    _check_wrapper(wrapper)
    for name, module in wrapper.module.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise alone(f"{name!r} in the model is a SyncBatchNorm: it waits for all ranks in its forward pass.", _NORM)
    return Given(wrapper.module, wrapper.module, wrapper.process_group, functools.partial(_check_wrapper, wrapper))


def _check_wrapper(wrapper: DistributedDataParallel) -> None:
    """Refuse a wrapper that does what memfit takes over from it."""
    if wrapper._lazy_init_ran:
        raise alone(
            "The DistributedDataParallel wrapper was called before.",
            "call wrapper.module, for validation too; build a new wrapper for a model that was trained with it",
        )
    if not wrapper.require_backward_grad_sync:
        raise alone("no_sync() is active.", "leave it out: pass the batches to accumulate to one step")
    if wrapper._comm_hooks or wrapper.mixed_precision is not None:
        what = "a communication hook" if wrapper._comm_hooks else "mixed_precision"
        raise alone(f"The DistributedDataParallel wrapper has {what}.", "leave it out; the Trainer has precision=")


def check_parts(model: Any, optimizer: Any, loss: Any, split: Any, *, is_sharded: bool = False) -> None:
    """Refuse a model, optimizer, loss or split that is something else, arguments in another order above all."""
    if not isinstance(model, torch.nn.Module):
        raise bad_setting("the model", model, "it is a torch.nn.Module", "pass for example torch.nn.Linear(8, 1)")
    if not isinstance(optimizer, torch.optim.Optimizer):
        remedy = "pass for example torch.optim.AdamW(model.parameters())"
        raise bad_setting("the optimizer", optimizer, "it is made over the model's parameters", remedy)
    if not is_sharded and (ranked := _ranked(model)):
        name, kind = ranked[0]
        raise UsageError(
            f"{f'{name!r} in the model' if name else 'The model'} is a {kind}: several ranks train it.",
            rule="the ranks train a model that is wrapped in DistributedDataParallel, or by fully_shard, as a whole.",
            remedy="wrap the whole model, or pass the plain one with group=None and train in one process",
        )
    of_torch = getattr(loss, "__module__", "") in ("torch.nn.modules.loss", "torch.nn.functional")
    if not callable(loss) or isinstance(loss, type) or of_torch:
        remedy = (
            "pass loss=lambda model, batch: (torch.nn.functional.mse_loss(model(batch[0]), batch[1], reduction='sum'), "
            "len(batch[0]))"
        )
        raise bad_setting(
            "the loss", loss, "loss(model, batch) returns the sum of a batch's losses and its weight", remedy
        )
    is_split = hasattr(split, "count") and hasattr(split, "take") and not isinstance(split, type)
    if split is not None and not is_split:
        raise bad_setting("split", split, "it has count(batch) and take(batch, start, stop)", "pass split=BySample()")


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
            raise UsageError(
                f"model.{name} replays a CUDA graph, whose draws were not shown to follow the seed of each step.",
                rule="exact: a stopped training goes on to the same bytes; graphs hold random states of their own.",
                remedy='train without it; or, if it draws nothing, pass allow=("cuda_graph",)',
            )


def _compiler_of(module: torch.nn.Module) -> Any:
    """Return what a module was compiled by: torch.compile(module), module.compile(), or Lightning's of a module."""
    if (call := getattr(module, "_compiled_call_impl", None)) is not None:
        return inspect.getclosurevars(call).nonlocals.get("self")
    kept_by_lightning = getattr(module, "_compiler_ctx", None) or {}
    return vars(module).get("dynamo_ctx", kept_by_lightning.get("dynamo_ctx"))

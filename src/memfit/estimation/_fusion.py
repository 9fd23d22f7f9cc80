"""Which tensors of a graph torch's inductor makes on CUDA, and when each begins and ends.

Inductor computes a pointwise value where it is used, unless something needs it whole; it runs loops over the same
numbers in one kernel, within which no buffer is needed; and it lets a kernel write into a buffer that ends with it.

Source: PyTorch 2.13, torch/_inductor/ir.py (``StorageBox``: what becomes a buffer; ``Reduction.create``), graph.py
(``run_node``), codegen/simd.py (``can_fuse``), scheduler.py (in-place reuse), codegen/wrapper.py (deaths).
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

_LOOPS = tuple[int, int, bool]
#: torch/_inductor/config.py: a pointwise value becomes a buffer when it reads more buffers, or takes more operations;
#: a reduction of no more numbers than that is written out.
_MAX_READS_OF_REUSED = 4
_MAX_READS = 8
_MAX_OPERATIONS = 30
_MAX_UNROLLED = 8
_REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "var", "var_mean", "std", "std_mean", "prod", "any", "all"),
    *("argmax", "argmin", "max", "min", "logsumexp", "linalg_vector_norm"),
}
_SCATTERS = {"index_put", "_unsafe_index_put", "scatter", "scatter_add", "scatter_reduce", "index_add"}
#: Lowered to loops over their result, though PyTorch does not tag them as pointwise.
_POINTWISE = {
    *("_to_copy", "clone", "copy", "copy_", "convert_element_type", "device_put", "lift_fresh_copy"),
    *("full", "full_like", "zeros", "ones", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"),
    *("arange", "iota", "scalar_tensor", "one_hot", "rand", "randn", "rand_like"),
    *("inductor_random", "inductor_lookup_seed", "inductor_randint"),
    *("embedding", "gather", "index", "_unsafe_index", "index_select", "cat", "stack", "constant_pad_nd"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "flip", "roll", "repeat"),
    *("where", "tril", "triu", "avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d"),
    *("_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices"),
}


@dataclass(eq=False)
class _Value:
    """A tensor of a graph that is no view: a buffer, or something computed where it is used.

    Attributes:
        number: Its key.
        kind: ``input``, ``pointwise``, ``reduction``, ``scatter`` or ``extern``.
        example: A tensor like it.
        reads: The buffers it is computed from, by number and offset.
        inlined: The numbers of the values computed within it.
        realized: Whether it may be a buffer.
        loops: Of its kernel: sizes of the outer and the reduced loops, and whether rows are reduced; None if the kernel
            can take in no other.
        target: The input that the value is written into, if any.
    """

    number: int
    kind: str
    example: torch.Tensor
    reads: frozenset[tuple[int, int]] = frozenset()
    inlined: frozenset[int] = frozenset()
    realized: bool = True
    loops: _LOOPS | None = None
    target: int | None = None


@dataclass(frozen=True)
class _View:
    """Where a tensor lies in a buffer. ``size`` is None for the buffer as it is."""

    number: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


@dataclass
class _Step:
    """A kernel: what it calls, if it is not made of loops, and which buffers begin and end with it.

    Attributes:
        call: A function with its arguments, tensors as :class:`_View`.
        made: Numbers of the results of the call; None for one that is no tensor.
        births: The other new buffers: number, size, stride, dtype, and the buffer whose memory it takes over, if any.
        deaths: Buffers that nothing reads after.
    """

    call: tuple[Any, Any, Any] | None = None
    made: list[int | None] = field(default_factory=list)
    births: list[tuple[int, Any, Any, torch.dtype, int | None]] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)


def _kind(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return "extern"
    name = target._schema.name.partition("::")[2]
    if name in _SCATTERS:
        return "scatter"
    if name in _REDUCTIONS:
        return "reduction"
    if name == "_unsafe_view" or any(one.alias_info and not one.alias_info.is_write for one in target._schema.returns):
        value, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
        retyped = isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor) and value.dtype != source.dtype
        return "pointwise" if retyped else "view"
    return "pointwise" if torch.Tag.pointwise in target.tags or name in _POINTWISE else "extern"


class _Planner:
    """Reads a graph into values and says which of them are buffers, as inductor's lowering does."""

    def __init__(self, graph: fx.Graph) -> None:
        self.values: list[_Value] = []
        self.of_node: dict[fx.Node, Any] = {}
        self.calls: dict[int, fx.Node] = {}
        self.inputs: list[int] = []
        self.donated: set[int] = set()
        self.constants: dict[int, torch.Tensor] = {}
        for node in graph.nodes:
            if node.op != "output":
                self._read(node)
            if node.op == "get_attr":
                self.constants[self.of_node[node].number] = getattr(graph.owning_module, str(node.target))

    def _add(self, kind: str, example: Any, **more: Any) -> _Value:
        value = _Value(len(self.values), kind, example, **more)
        self.values.append(value)
        return value

    def _read(self, node: fx.Node) -> None:
        example = node.meta.get("val")
        if node.target is operator.getitem:
            found = self.of_node.get(node.all_input_nodes[0])
            self.of_node[node] = found[int(str(node.args[1]))] if isinstance(found, list) else found
            return
        kind = _kind(node)
        if kind == "input":
            value = self.of_node[node] = self._add("input", example)
            if node.op == "placeholder":
                self.inputs.append(value.number)
                # torch/_functorch/config.py, donated_buffer: what the forward graph made only for the backward one
                if not node.name.startswith(("primals", "tangents", "arg")):
                    self.donated.add(value.number)
            return
        if kind == "view" or self._changes_nothing(node):
            self.of_node[node] = self.of_node[node.all_input_nodes[0]]
            return
        several = example if isinstance(example, tuple | list) else (example,)
        made = [self._make(node, kind, one) if isinstance(one, torch.Tensor) else None for one in several]
        self.of_node[node] = made if several is example else made[0]
        if kind == "extern":
            self.calls.update((one.number, node) for one in made if one is not None)

    def _make(self, node: fx.Node, kind: str, example: torch.Tensor) -> _Value:
        reads: set[tuple[int, int]] = set()
        inlined: set[int] = set()
        for source in node.all_input_nodes:
            value = self.of_node.get(source)
            if not isinstance(value, _Value):
                continue
            if value.realized:
                reads.add((value.number, source.meta["val"].storage_offset()))
            else:
                reads |= value.reads
                inlined |= {*value.inlined, value.number}
        made = self._add(kind, example, reads=frozenset(reads), inlined=frozenset(inlined))
        if kind == "pointwise":
            made.loops = (example.numel(), 1, False)
            made.realized = self._is_realized(node, made)
        elif kind == "reduction":
            made.loops = _reduction_loops(node, example)
            if made.loops[1] <= _MAX_UNROLLED:
                made.kind, made.loops = "pointwise", (example.numel(), 1, False)
                made.reads |= {(number, offset + 1) for number, offset in reads}
                made.realized = self._is_realized(node, made)
        if str(node.target).startswith("aten.copy_"):
            target = self.of_node[node.all_input_nodes[0]]
            made.realized, made.target = True, target.number
        return made

    def _is_realized(self, node: fx.Node, value: _Value) -> bool:
        num_users = 0
        waiting = [node]
        while waiting:
            for user in waiting.pop().users:
                kind = "view" if user.target is operator.getitem else _kind(user) if user.op != "output" else "extern"
                if kind == "extern":
                    return True
                num_users += kind != "view"
                if kind == "view":
                    waiting.append(user)
        if len(value.reads) > _MAX_READS or len(value.reads) + len(value.inlined) > _MAX_OPERATIONS:
            return True
        return num_users > 1 and len(value.reads) > _MAX_READS_OF_REUSED

    def _changes_nothing(self, node: fx.Node) -> bool:
        """Whether a node is a copy that inductor drops."""
        if str(node.target) not in ("aten.clone.default", "aten.lift_fresh_copy.default"):
            return False
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        kept = any(user.op == "output" for user in node.users)
        return not kept and before.stride() == after.stride() and before.storage_offset() == after.storage_offset()

    def view(self, node: fx.Node) -> _View | None:
        """Where a node's tensor lies."""
        value, example = self.of_node.get(node), node.meta.get("val")
        if not isinstance(value, _Value) or not isinstance(example, torch.Tensor):
            return None
        base = value.example
        number = value.number if value.target is None else value.target
        offset = int(example.storage_offset()) - int(base.storage_offset())
        if example.shape == base.shape and example.stride() == base.stride() and not offset:
            return _View(number)
        return _View(number, tuple(example.shape), example.stride(), offset)


def _reduction_loops(node: fx.Node, example: torch.Tensor) -> _LOOPS:
    source = node.all_input_nodes[0].meta["val"]
    dims = [number for number, size in enumerate(source.shape) if size != 1]
    rows = not _reduced_dims(node, source.dim()).isdisjoint(dims[-1:])
    return example.numel(), source.numel() // max(example.numel(), 1), rows


def _reduced_dims(node: fx.Node, num_dims: int) -> set[int]:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not dims:
        return set(range(num_dims))
    return {int(dim) % max(num_dims, 1) for dim in dims}


def _fuse_loops(one: _LOOPS | None, other: _LOOPS | None) -> _LOOPS | None:
    """The loops of a kernel that runs two others' work; None if there is none."""
    if one is None or other is None:
        return None
    if one[1] == 1 and other[1] == 1:
        return one if one[0] == other[0] else None
    if one[1] > 1 and other[1] > 1:
        return one if one == other else None
    reduction, pointwise = (one, other) if one[1] > 1 else (other, one)
    return reduction if pointwise[0] in (reduction[0], reduction[0] * reduction[1]) else None


@dataclass(eq=False)
class _Kernel:
    members: list[_Value]
    loops: _LOOPS | None

    def reads(self) -> list[int]:
        """The numbers of the buffers that it reads."""
        return sorted({number for member in self.members for number, _ in member.reads})


def _fuse(planner: _Planner) -> list[_Kernel]:
    """The kernels of a graph in the order in which they run."""
    kernel_of: dict[int, _Kernel] = {}
    by_call: dict[fx.Node, _Kernel] = {}
    for value in planner.values:
        if value.kind == "input" or not value.realized:
            continue
        call = planner.calls.get(value.number)
        if call is not None and call in by_call:
            kernel = by_call[call]
        else:
            kernel = _Kernel([], value.loops)
            if call is not None:
                by_call[call] = kernel
        kernel.members.append(value)
        kernel_of[value.number] = kernel
        for source in sorted(_sources(kernel, kernel_of), key=lambda one: -one.members[-1].number):
            loops = _fuse_loops(source.loops, kernel.loops)
            if loops is None or _reaches(kernel, source, kernel_of):
                continue
            source.loops = loops
            source.members = sorted([*source.members, *kernel.members], key=lambda one: one.number)
            kernel_of.update((member.number, source) for member in kernel.members)
            kernel = source
    return _order(list(dict.fromkeys(kernel_of.values())), kernel_of)


def _sources(kernel: _Kernel, kernel_of: dict[int, _Kernel]) -> set[_Kernel]:
    """The kernels that another reads from."""
    return {kernel_of[number] for number in kernel.reads() if number in kernel_of} - {kernel}


def _reaches(kernel: _Kernel, source: _Kernel, kernel_of: dict[int, _Kernel]) -> bool:
    """Whether a kernel also depends on another through a third, so that the two cannot be one."""
    first = source.members[0].number
    waiting = list(_sources(kernel, kernel_of) - {source})
    seen = set(waiting)
    while waiting:
        current = waiting.pop()
        if current is source:
            return True
        if current.members[-1].number < first:
            continue
        new = _sources(current, kernel_of) - seen
        seen |= new
        waiting.extend(new)
    return False


def _order(kernels: list[_Kernel], kernel_of: dict[int, _Kernel]) -> list[_Kernel]:
    """Kernels after those that they read from, and else in the order of the graph."""
    users: dict[_Kernel, list[_Kernel]] = {kernel: [] for kernel in kernels}
    missing: dict[_Kernel, int] = {}
    for kernel in kernels:
        sources = _sources(kernel, kernel_of)
        missing[kernel] = len(sources)
        for source in sources:
            users[source].append(kernel)
    ready = [(kernel.members[-1].number, kernel) for kernel in kernels if not missing[kernel]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, kernel = heapq.heappop(ready)
        ordered.append(kernel)
        for user in users[kernel]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (user.members[-1].number, user))
    return ordered


def _fits(old: _Value, new: _Value) -> bool:
    """Whether a buffer can be written over number by number while it is read."""
    same = old.example.dtype == new.example.dtype and old.example.numel() == new.example.numel()
    return same and [offset for number, offset in new.reads if number == old.number] in ([], [0])


@dataclass
class _Runner:
    """Runs a plan. It empties the list of its arguments, as inductor's wrappers do, so that each can die early."""

    steps: list[_Step]
    results: list[_View | None]
    inputs: list[int]
    unread: list[int]
    constants: dict[int, torch.Tensor]
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> list[Any]:
        held: dict[int, torch.Tensor] = {**dict(zip(self.inputs, args, strict=True)), **self.constants}
        args.clear()

        def fetch(view: _View) -> torch.Tensor:
            base = held[view.number]
            if view.size is None:
                return base
            return base.as_strided(view.size, view.stride, base.storage_offset() + view.offset)

        for number in self.unread:
            del held[number]
        for step in self.steps:
            if step.call is not None:
                target, arguments, named = step.call
                # casts are operations of the graph
                with torch.autocast("cpu", enabled=False):
                    made = target(*tree_map_only(_View, fetch, arguments), **tree_map_only(_View, fetch, named))
                several = made if isinstance(made, tuple | list) else (made,)
                held.update((key, one) for key, one in zip(step.made, several, strict=True) if key is not None)
                del made, several
            for number, size, stride, dtype, reused in step.births:
                if reused is None:
                    held[number] = torch.empty_strided(size, stride, dtype=dtype)
                else:
                    held[number] = held.pop(reused).as_strided(size, stride)
            for number in step.deaths:
                held.pop(number, None)
        return [None if view is None else fetch(view) for view in self.results]


def plan(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> _Runner:
    """What runs in a graph's place: it makes and drops the buffers that the compiled graph would."""
    planner = _Planner(gm.graph)
    kernels = _fuse(planner)
    output = next(node for node in gm.graph.nodes if node.op == "output")
    results = [planner.view(one) if isinstance(one, fx.Node) else None for one in output.args[0]]
    kept = {one.number for one in results if one is not None}
    readers: dict[int, list[int]] = {}
    for place, kernel in enumerate(kernels):
        for number in kernel.reads():
            readers.setdefault(number, []).append(place)
    steps = [_Step() for _ in kernels]
    owned = {one.number for one in planner.values if one.kind != "input"} | planner.donated
    for place, (kernel, step) in enumerate(zip(kernels, steps, strict=True)):
        inner = {one.number for one in kernel.members if set(readers.get(one.number, ())) == {place}} - kept
        step.deaths = [number for number in kernel.reads() if readers[number][-1] == place and number not in kept]
        free = [number for number in step.deaths if number in owned and number not in inner]
        step.deaths += [one.number for one in kernel.members if one.number not in readers and one.number not in kept]
        call = planner.calls.get(kernel.members[0].number)
        if call is not None:
            view: Any = planner.view
            arguments: Any = fx.node.map_arg((call.args, dict(call.kwargs)), view)
            step.call = (call.target, *arguments)
            found = planner.of_node[call]
            step.made = [one and one.number for one in (found if isinstance(found, list) else [found])]
            continue
        for one in kernel.members:
            if one.target is None and one.number not in inner:
                reused = next((number for number in free if _fits(planner.values[number], one)), None)
                if reused is not None:
                    free.remove(reused)
                example = one.example
                step.births.append((one.number, tuple(example.shape), example.stride(), example.dtype, reused))
    unread = [number for number in planner.inputs if number not in readers and number not in kept]
    return _Runner(steps, results, planner.inputs, unread, planner.constants)

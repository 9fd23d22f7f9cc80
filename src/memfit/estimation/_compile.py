"""The memory of ``torch.compile``: what it keeps for the backward pass, and what it never makes at all.

A block runs through AOTAutograd with inductor's decompositions, passes and partitioner, on fake tensors; so what is
kept is what inductor keeps. The two graphs are run, not compiled: a buffer is made only if a value is needed whole.

Source: PyTorch 2.13, torch/_functorch/aot_autograd.py (``aot_function``), torch/_inductor/compile_fx.py
(``partition_fn``).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from memfit.estimation._program import Program, find_blocks

#: Attributes that name a block's place in the model: equal blocks differ in them.
_PLAIN = bool | int | float | str | torch.dtype
_PLACES = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_id", "idx", "index", "name"}


def compile_blocks(program: Program, blocks: Sequence[nn.Module] | None = None) -> Program:
    """Make each block run as ``torch.compile`` runs it; one that cannot be compiled runs as it is, with a note."""
    compiler = _Compiler(program)
    for block in find_blocks(program.model) if blocks is None else blocks:
        block.forward = compiler.wrap(block.forward, block, type(block).__name__)
    return program


class _Compiler:
    """Compiles functions, each once for all that are equal."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.done: dict[Any, Callable[..., Any] | None] = {}

    def wrap(self, function: Callable[..., Any], owner: nn.Module, name: str) -> Callable[..., Any]:
        body = _Body(owner, function)
        own = () if isinstance(getattr(function, "__self__", None), nn.Module) else (id(function),)

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            state = {**dict(body.named_parameters()), **dict(body.named_buffers())}
            tensors = [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
            mode = detect_fake_mode(tensors)
            if mode is None:
                return function(*args, **kwargs)
            rest = tuple(None if isinstance(leaf, torch.Tensor) else _describe(leaf) for leaf in leaves)
            context = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            key = (own, _describe_module(owner), _describe_tensors(tensors), rest, str(spec), context)
            if key not in self.done:
                self.done[key] = self._compile(name, body, (state, leaves, spec), mode, context)
            compiled = self.done[key]
            return function(*args, **kwargs) if compiled is None else compiled(tensors)

        return run

    def _compile(self, name: str, *given: Any) -> Callable[..., Any] | None:
        """Compile in a thread of its own, whose modes, hooks and autocast no recorder or checkpoint sees."""
        with ThreadPoolExecutor(1) as thread, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of torch's own code about itself, should they be errors here
            try:
                return thread.submit(_trace_and_plan, *given).result()
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                note = f"{name} runs without torch.compile: {type(error).__name__}: {reason}"
        self.program.notes = tuple(dict.fromkeys((*self.program.notes, note)))
        return None


class _Body(nn.Module):
    """A function as a module, whose parameters can be exchanged."""

    def __init__(self, owner: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.owner = owner
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _describe(value: Any) -> Any:
    """Return a key of an argument that is no tensor."""
    return (type(value), value) if isinstance(value, _PLAIN | torch.device | None) else id(value)


def _describe_module(module: nn.Module) -> Any:
    """Return a key that equal blocks share: their classes, and their plain attributes without the place."""

    def plain(part: nn.Module) -> dict[str, Any]:
        return {key: one for key, one in vars(part).items() if isinstance(one, _PLAIN) and key not in _PLACES}

    parts = ((name, type(part), sorted(plain(part).items())) for name, part in module.named_modules())
    return tuple((name, kind, tuple((key, _describe(one)) for key, one in found)) for name, kind, found in parts)


def _describe_tensors(tensors: Sequence[torch.Tensor]) -> Any:
    first: dict[int, int] = {}
    return tuple(
        (tuple(one.shape), one.stride(), one.dtype, one.requires_grad, first.setdefault(id(one), number))
        for number, one in enumerate(tensors)
    )


def _trace_and_plan(body: _Body, call: tuple[Any, ...], mode: Any, context: Any) -> Callable[..., Any]:
    """Compile a call of a body; the result takes the list of its parameters, buffers and tensor arguments."""
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    state, leaves, spec = call
    grad, autocast, autocast_dtype = context
    copies: dict[int, torch.Tensor] = {}
    with mode:
        inputs = [_copy(one, copies) for one in (*state.values(), *leaves) if isinstance(one, torch.Tensor)]
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    names = tuple(state)

    def flat(tensors: list[torch.Tensor]) -> Any:
        filled: list[Any] = list(rest)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        with torch.autocast("cpu", autocast_dtype, enabled=autocast, cache_enabled=False):
            exchanged = dict(zip(names, tensors[: len(names)], strict=True))
            return torch.func.functional_call(body, exchanged, args, kwargs, tie_weights=False)

    compiler: Any = _Runner
    compiled: Callable[..., Any] = aot_function(
        flat,
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with mode, V.set_fake_mode(mode), torch.set_grad_enabled(grad):
        compiled(inputs)
    return compiled


def _copy(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return an own copy of a tensor, so that the original can die; one for each original."""
    if id(tensor) not in copies:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        copies[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return copies[id(tensor)]


#: Loops that always end in a buffer, and loops that PyTorch does not tag as pointwise.
_ALWAYS_MADE = {
    *("sum", "mean", "amax", "amin", "var", "var_mean", "std", "std_mean", "prod", "any", "all", "argmax", "argmin"),
    *("max", "min", "logsumexp", "linalg_vector_norm", "index_put", "_unsafe_index_put", "scatter", "scatter_add"),
    *("scatter_reduce", "index_add"),
}
_LOOPS = {
    *("_to_copy", "clone", "copy", "convert_element_type", "device_put", "full", "full_like", "zeros", "ones"),
    *("zeros_like", "ones_like", "new_full", "new_zeros", "new_ones", "arange", "iota", "scalar_tensor", "one_hot"),
    *("inductor_random", "inductor_lookup_seed", "embedding", "gather", "index", "_unsafe_index", "index_select"),
    *("cat", "stack", "constant_pad_nd", "slice_scatter", "select_scatter", "flip", "roll", "repeat", "where", "tril"),
    *("triu", "avg_pool2d", "_adaptive_avg_pool2d", "_low_memory_max_pool_with_offsets"),
    "_low_memory_max_pool_offsets_to_indices",
}
#: torch/_inductor/config.py, ``realize_reads_threshold``, and ``realize_opcount_threshold`` for values that are reused.
_MOST_READS, _MOST_READS_OF_REUSED = 8, 4


def _kind(node: fx.Node) -> str:
    """Return input, view, loop, made (a loop that ends in a buffer), into (an input) or call."""
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if node.target is operator.getitem:
        return "view"
    if not isinstance(node.target, torch._ops.OpOverload):
        return "call"
    name = node.target._schema.name.partition("::")[2]
    if name == "copy_":
        return "into"
    if name in _ALWAYS_MADE:
        return "made"
    if name == "_unsafe_view" or any(
        one.alias_info and not one.alias_info.is_write for one in node.target._schema.returns
    ):
        return "view"
    return "loop" if torch.Tag.pointwise in node.target.tags or name in _LOOPS else "call"


def _is_needed_whole(node: fx.Node) -> bool:
    """Whether something other than a loop reads a value."""
    return any(
        _is_needed_whole(user) if (kind := _kind(user)) == "view" else user.op == "output" or kind == "call"
        for user in node.users
    )


class _Runner:
    """Makes and drops the buffers that the compiled graph would, in its place.

    Inductor computes a pointwise value where it is used, unless something needs it whole (_inductor/ir.py), and lets a
    loop write into a buffer that ends with it (_inductor/scheduler.py). Which loops become one kernel is not modelled.
    """

    _boxed_call = True

    def __init__(self, gm: fx.GraphModule, _: Sequence[Any]) -> None:
        self.gm = gm
        self.nodes = list(gm.graph.nodes)
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.computed: set[fx.Node] = set()  # without a buffer, where they are used
        self.last: dict[fx.Node, int] = {}
        reads: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            kind, sources = _kind(node), node.all_input_nodes
            if kind == "view":
                reads[node] = reads.get(sources[0], set())
                if sources[0] in self.computed:
                    self.computed.add(node)
            elif kind == "loop":
                found = {source for one in sources for source in (reads[one] if one in self.computed else {one})}
                reads[node] = found
                most = _MOST_READS_OF_REUSED if len(node.users) > 1 else _MOST_READS
                if len(found) <= most and not _is_needed_whole(node):
                    self.computed.add(node)
        for place, node in reversed(list(enumerate(self.nodes))):
            at = self.last.get(node, place) if node in self.computed else place
            for source in node.all_input_nodes:
                self.last[source] = max(self.last.get(source, 0), at)
        self.deaths: dict[int, list[fx.Node]] = {}
        for node, place in self.last.items():
            self.deaths.setdefault(place, []).append(node)
        # torch/_functorch/config.py, donated_buffer: what the forward graph made only for the backward one
        kept = ("primals", "tangents", "arg")
        self.foreign = {node for node in self.inputs if node.name.startswith(kept)}

    def __call__(self, args: list[Any]) -> Any:
        held: dict[fx.Node, Any] = {node: one for node, one in zip(self.inputs, args, strict=True) if node in self.last}
        args.clear()
        result: Any = None
        for place, node in enumerate(self.nodes):
            if node.op == "output":
                result = fx.node.map_arg(node.args[0], held.get)
            elif node.op != "placeholder" and node not in self.computed:
                made = self._run(node, place, held)
                if node in self.last:
                    held[node] = made
                del made
            for dead in self.deaths.get(place, ()):
                held.pop(dead, None)
        return list(result)

    def _run(self, node: fx.Node, place: int, held: dict[fx.Node, Any]) -> Any:
        kind = _kind(node)
        if kind == "input":
            return getattr(self.gm, str(node.target))
        if kind == "into":
            return held.get(node.all_input_nodes[0])
        if kind in ("view", "call"):
            target: Any = node.target
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), held.get)
            with torch.autocast("cpu", enabled=False):  # casts are operations of the graph
                return target(*args, **kwargs)
        example = node.meta["val"]
        if kind == "loop":
            for dead in self.deaths.get(place, ()):  # its buffer is written over
                one = held.get(dead)
                same = isinstance(one, torch.Tensor) and (one.dtype, one.numel()) == (example.dtype, example.numel())
                if same and dead not in self.foreign:
                    del held[dead], one
                    break
        return tree_map_only(torch.Tensor, _empty_like, example)


def _empty_like(example: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)

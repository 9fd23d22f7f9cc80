"""The trace counts what lives on the device, names it, and says clearly what it cannot follow."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.errors import UntraceableError
from memfit.estimation import Program, Setup, Trace, build_optimizer, find_peaks, find_tensors, map_tensors, part, trace

WIDTH = 64
CLASSES = 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = nn.functional.gelu(self.up(self.norm(x)))
        result: Tensor = self.down(hidden)
        return x + result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(tokens)))
        return logits


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def make_program(loss: Callable[[nn.Module, Any], Tensor] = compute_loss, **options: Any) -> Program:
    model = Model()
    return Program(model, torch.zeros(4, 128, dtype=torch.long), loss, torch.optim.AdamW(model.parameters()), **options)


def sum_births(traced: Trace, name: str, phase: str | None = None) -> int:
    return sum(
        event.num_bytes for event in traced.events if traced.parts[event.block] == name and phase in (None, event.phase)
    )


NUM_WEIGHT_BYTES = 4 * sum(parameter.numel() for parameter in Model().parameters())


@pytest.mark.proves("C-10")
def test_the_peak_is_the_one_that_torch_finds_with_its_own_tracker() -> None:
    traced = trace(make_program, cuda=False)
    with FakeTensorMode():
        program = make_program()
        assert program.optimizer is not None
        from torch.distributed._tools.mem_tracker import MemTracker  # two seconds of imports

        tracker = MemTracker()
        tracker.track_external(program.model, program.optimizer, program.batch)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                program.loss(program.model, program.batch).backward()  # type: ignore[no-untyped-call]
                program.optimizer.step()
                program.optimizer.zero_grad()
        (theirs,) = tracker.get_tracker_snapshot("peak").values()

    ours = max(peak.num_bytes for peak in find_peaks(traced).values())

    assert ours == pytest.approx(theirs["Total"], abs=4096)  # they count Adam's step numbers, which stay on the host


def test_every_part_has_the_size_that_it_must_have() -> None:
    traced = trace(make_program)
    peaks = find_peaks(traced)

    assert list(peaks) == ["build", "forward", "backward", "step"]
    assert peaks["build"].parts == {"weights": NUM_WEIGHT_BYTES, "inputs": 4 * 128 * 8}
    assert peaks["step"].parts["gradients"] == NUM_WEIGHT_BYTES
    assert peaks["step"].parts["optimizer"] == 2 * NUM_WEIGHT_BYTES
    assert sum_births(traced, "optimizer") == 2 * NUM_WEIGHT_BYTES


def test_what_is_left_at_the_end_is_what_a_loop_keeps() -> None:
    traced = trace(make_program)
    born = {event.block: event.num_bytes for event in traced.events if event.num_bytes}
    dead = [event.block for event in traced.events if not event.num_bytes]
    left = born.keys() - set(dead)

    assert len(dead) == len(set(dead))
    assert set(dead) <= set(born)
    assert {traced.parts[block] for block in left} == {"weights", "inputs", "optimizer", "workspaces"}


def test_gradients_wait_for_the_next_microbatch() -> None:
    alone = find_peaks(trace(make_program))["forward"]
    second = find_peaks(trace(lambda: make_program(num_microbatches=2)))["forward"]

    assert "gradients" not in alone.parts
    assert second.parts["gradients"] == NUM_WEIGHT_BYTES


def test_gradients_that_are_dropped_within_the_backward_pass_never_meet() -> None:
    def make() -> Program:
        program = make_program()
        setup = Setup(dtype="fp32", optimizer="sgd", optimizer_in_backward=True)
        program.optimizer, _ = build_optimizer(program.model, setup)
        return program

    traced = trace(make, num_iterations=1)

    assert sum_births(traced, "gradients", "backward") == NUM_WEIGHT_BYTES
    assert find_peaks(traced)["backward"].parts.get("gradients", 0) < NUM_WEIGHT_BYTES


def test_update_runs_over_all_weights_at_once_as_on_cuda() -> None:
    assert find_peaks(trace(make_program))["step"].parts["temporaries"] >= NUM_WEIGHT_BYTES
    assert find_peaks(trace(make_program, cuda=False))["step"].parts["temporaries"] < NUM_WEIGHT_BYTES


def test_functions_around_the_update_run_in_its_phase() -> None:
    kept: list[Tensor] = []

    def gather() -> None:
        with part("communication"):
            kept.append(torch.empty(1000))

    def make() -> Program:
        program = make_program(clip_grad_norm=True)
        assert program.optimizer is not None
        program.optimizer.register_step_pre_hook(lambda *_: gather())
        program.optimizer.register_step_post_hook(lambda *_: kept.clear())
        return program

    traced = trace(make)

    assert find_peaks(traced)["step"].parts["communication"] == 4000
    assert "communication" not in find_peaks(traced)["backward"].parts


def test_weights_that_autocast_casts_are_a_part_of_their_own() -> None:
    peaks = find_peaks(trace(lambda: make_program(autocast_dtype=torch.bfloat16)))
    num_cast = sum(parameter.numel() for name, parameter in Model().named_parameters() if "norm" not in name)

    assert peaks["forward"].parts["cast_weights"] <= 2 * num_cast
    assert peaks["forward"].parts["cast_weights"] >= 2 * (num_cast - CLASSES * WIDTH)


def test_numbers_read_from_the_device_are_guessed_and_noted() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        longest = int((batch != 0).sum(1).max())
        result = compute_loss(model, batch[:, :longest])
        return result if result.item() > 0 else result * 2

    traced = trace(lambda: make_program(loss))

    assert any("assumed to be 128" in note for note in traced.notes)
    assert any("assumed to be 1.0" in note for note in traced.notes)


def test_a_mask_is_taken_to_pick_everything() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        chosen = batch.flatten().nonzero()[:, 0]
        targets = batch.masked_select(batch != 0)[chosen]
        return nn.functional.cross_entropy(model(batch)[batch != 0], targets)

    traced = trace(lambda: make_program(loss), num_iterations=1)
    full = trace(make_program, num_iterations=1)

    assert any("mask" in note for note in traced.notes)
    assert find_peaks(traced)["backward"].num_bytes >= find_peaks(full)["backward"].num_bytes


def test_what_cannot_be_followed_is_named_with_its_module() -> None:
    class Chooser(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[torch.unique(x.argmax(-1)).clamp(0, 3)]

    def make() -> Program:
        program = make_program()
        program.model.blocks = nn.Sequential(Block(), Chooser())
        return program

    with pytest.raises(UntraceableError, match="unique") as caught:
        trace(make)
    assert caught.value.module == "blocks.1"


def test_a_program_without_an_optimizer_only_runs_forward() -> None:
    def make() -> Program:
        program = make_program()
        program.optimizer = None
        return program

    assert list(find_peaks(trace(make))) == ["build", "forward"]


def test_a_model_that_is_converted_keeps_its_ties_and_what_is_frozen_and_torch_is_left_as_it_was() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.table.weight
            self.norm = nn.BatchNorm1d(16).requires_grad_(False)

    found: list[nn.Module] = []

    def make() -> Program:
        model = Tied()
        owned = list(model.parameters())
        found.extend((model.half(), copy.deepcopy(model)))
        assert all(one is other for one, other in zip(owned, model.parameters(), strict=True)), "optimizers keep theirs"
        return Program(model, torch.zeros(2, 16, dtype=torch.half), lambda model, batch: model.head(batch).sum())

    before = nn.Module._apply, Tensor.__deepcopy__
    weights = sum_births(trace(make), "weights")
    assert (nn.Module._apply, Tensor.__deepcopy__) == before
    assert weights == 2 * (32 * 16 + 2 * 16)
    for model in found:
        assert model.head.weight is model.table.weight
        assert isinstance(model.head.weight, nn.Parameter)
        assert {one.dtype for one in model.parameters()} == {torch.half} == {model.norm.running_mean.dtype}
        assert [one.requires_grad for one in model.parameters()] == [True, False, False]


def test_tensors_are_found_in_mappings_of_any_kind_and_in_dataclasses() -> None:
    @dataclass(frozen=True)
    class Pair:
        left: Tensor
        name: str

    x = torch.zeros(3)
    tree = [MappingProxyType({"a": x}), UserDict(b=Pair(x, "pair")), OrderedDict(c=(x, None))]
    assert [len(one) for one in find_tensors(tree)] == [3, 3, 3]
    made = map_tensors(lambda one: one.new_zeros(5), tree)
    assert [type(one) for one in made] == [dict, UserDict, OrderedDict]
    assert (type(made[1]["b"]), made[1]["b"].name) == (Pair, "pair")
    assert [len(one) for one in find_tensors(made)] == [5, 5, 5]
    assert [len(one) for one in find_tensors(tree)] == [3, 3, 3], "the one that was given is left as it is"

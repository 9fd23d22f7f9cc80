"""``memfit.estimate`` in Python: a torch model and a batch of its shapes, traced without allocating either."""

import collections
import dataclasses
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import memfit  # noqa: E402
from memfit.errors import (  # noqa: E402
    ConfigError,
    UntraceableError,
    UsageError,
)
from memfit.estimation import METRICS, Setup  # noqa: E402

FP32 = Setup(dtype="fp32")


class Mlp(torch.nn.Module):
    """Two linear maps and a loss of its own, where it is asked for."""

    def __init__(self, width=256):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x, y=None):
        out = self.second(torch.relu(self.first(x)))
        return out if y is None else ((out - y) ** 2).mean()


class Blocks(torch.nn.Module):
    """Blocks that can be checkpointed."""

    def __init__(self, count=4, width=256):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Mlp(width) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def convolutions():
    """A net with running statistics, as for images."""
    layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(16 * 16 * 16, 10))


class Doubled(torch.autograd.Function):
    """Doubles, and keeps its input although it need not."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (_,) = ctx.saved_tensors
        return grad * 2


def traced(model, batch, **words):
    words.setdefault("setup", FP32)
    found = memfit.estimate(model, batch, **words)
    sizes = [found.device[metric] for metric in METRICS]
    assert found.method == "traced"
    assert all(one.upper >= one.value for one in (*sizes, *found.parts.values(), *found.by_phase.values()))
    assert sizes[0].value <= sizes[2].value <= sizes[3].value
    return found


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_weights_gradients_and_states_are_counted_to_the_byte():
    found = traced(Mlp, torch.zeros(2, 256), setup=Setup(dtype="fp32", foreach=False))
    size = 4 * count(Mlp())
    assert abs(found.parts["weights"].value - size) < 8 * 512
    assert abs(found.parts["optimizer"].value - 2 * size) < 20 * 512


def test_a_custom_autograd_function_keeps_what_it_saves():
    def times(double):
        return lambda model, batch: double(double(double(double(model(batch))))).sum()

    batch = torch.zeros(4096, 256)
    plain, saved = (
        traced(lambda: torch.nn.Linear(256, 256), batch, loss=times(double))
        for double in (lambda x: x * 2, Doubled.apply)
    )
    forward = [found.by_phase["forward"].value for found in (plain, saved)]
    lasting = 3 * 4096 * 256 * 4  # of five tensors in a row, two live at once without it
    assert forward[1] - forward[0] == pytest.approx(lasting, rel=0.01)


def test_a_net_with_running_statistics_is_traced():
    found = traced(convolutions, torch.zeros(8, 3, 32, 32), loss=lambda model, x: model(x).logsumexp(1).sum())
    assert found.device["allocated_bytes"].value > 4 * count(convolutions()) * 4


def test_nothing_of_a_model_beyond_any_memory_is_allocated():
    found = traced(lambda: torch.nn.Linear(1 << 18, 1 << 18, bias=False), torch.zeros(1, 1 << 18))
    assert found.parts["weights"].value == 4 << 36


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "metric"),
    [
        ({"gradient_checkpointing": "full"}, "allocated_bytes"),
        ({"dtype": "bf16"}, "allocated_bytes"),
        ({"dtype": "bf16-amp"}, "allocated_bytes"),
    ],
)
def test_a_setup_counts(words, metric):
    batch = torch.zeros(2048, 256)
    usual, changed = (traced(Blocks, batch, setup=Setup(**{"dtype": "fp32", **more})) for more in ({}, words))
    assert changed.device[metric].value < usual.device[metric].value


def test_a_device_gives_a_verdict():
    assert traced(Mlp, torch.zeros(8, 256), gpu="24GiB").verdict == "fits"
    refused = traced(lambda: Mlp(8192), torch.zeros(8, 8192), gpu="4GiB")
    assert refused.verdict == "does not fit"


def test_a_bound_above_the_device_is_shown_where_the_allocator_gives_back_its_cache():
    def build():
        return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4)))

    bound = traced(build, torch.zeros(512, 4096)).device["device_bytes"].upper
    found = traced(build, torch.zeros(512, 4096), gpu=f"{int(bound * 0.97)} B")
    assert found.verdict == "tight"
    assert found.device["device_bytes"].upper > int(bound * 0.97)


def test_the_allocators_settings_change_what_is_reserved():
    def build():
        return Mlp(1500)

    batch = torch.zeros(1500, 1500)
    split, whole = (
        traced(build, batch, allocator=text).device["reserved_bytes"].value for text in ("max_split_size_mb:20", "")
    )
    assert split != whole


@pytest.mark.parametrize(
    ("words", "error"), [({"gpu": "RTX 4091"}, ConfigError), ({"allocator": "max_split_size_mb:1"}, UsageError)]
)
def test_a_bad_device_or_setting_is_refused(words, error):
    with pytest.raises(error):
        memfit.estimate(Mlp, torch.zeros(8, 256), **words)


def test_an_error_of_the_models_own_names_the_module():
    with pytest.raises(UntraceableError, match="first"):
        memfit.estimate(Mlp, torch.zeros(8, 255), setup=FP32)


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda one: one.half(), torch.half),
        (lambda one: one.to(torch.bfloat16), torch.bfloat16),
        (lambda one: one.double(), torch.double),
    ],
)
def test_a_model_may_be_converted_where_it_is_built(convert, dtype):
    found = traced(lambda: convert(Mlp()), torch.zeros(2, 256, dtype=dtype))
    assert found.parts["weights"].value == pytest.approx(dtype.itemsize * count(Mlp()), abs=8 * 512)


@dataclasses.dataclass
class Pair:
    x: object
    y: object


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (dict, None),
        (lambda both: tuple(both.values()), None),
        (collections.UserDict, None),
        (types.MappingProxyType, None),
        (lambda both: Pair(**both), lambda model, batch: model(batch.x, batch.y)),
    ],
)
def test_a_batch_is_any_tree_of_tensors(kind, loss):
    batch = kind({"x": torch.zeros(64, 256), "y": torch.zeros(64, 256)})
    assert traced(Mlp, batch, loss=loss).parts["inputs"].value == 2 * 64 * 256 * 4


def test_real_tensors_of_the_loss_count_and_are_noted():
    weights, teacher = torch.ones(64, 256), torch.nn.Linear(256, 256, bias=False)

    def loss(model, batch):
        return ((model(batch) - teacher(batch)) * weights).sum()

    plain, found = (
        traced(Mlp, torch.zeros(64, 256), **more)
        for more in ({"loss": lambda model, x: model(x).sum()}, {"loss": loss})
    )
    assert found.parts["inputs"].value - plain.parts["inputs"].value == 64 * 256 * 4
    assert found.parts["weights"].value - plain.parts["weights"].value == 256 * 256 * 4
    assert any("real tensors" in note for note in found.notes) and not plain.notes


@pytest.mark.slow
def test_rows_that_cannot_be_traced_get_a_remedy_that_works_for_them(tmp_path):
    def loss_of(pick):
        def loss(model, batch):
            rows = model(batch)
            return rows[pick(rows > 0)].sum()

        return loss

    with pytest.raises(UntraceableError, match="nonzero") as caught:
        traced(lambda: torch.nn.Linear(64, 64), torch.zeros(32, 64), loss=loss_of(lambda mask: torch.where(mask)[0]))
    assert "--hf-config" not in caught.value.remedy
    mask, _, command = caught.value.remedy.partition("), or measure a run: ")
    assert mask.endswith("torch.where((experts == 1).any(-1))") and command == "memfit run -- python train.py"
    rows_of = loss_of(lambda mask: torch.where(mask.any(-1))[0])
    found = traced(lambda: torch.nn.Linear(64, 64), torch.zeros(32, 64), loss=rows_of)
    assert "masks are assumed to pick all elements" in found.notes
    (tmp_path / "train.py").write_text("print('trained')")
    words = [sys.executable, "-m", *command.split()]
    assert "trained" in subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore::DeprecationWarning")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_under_torch_compile_is_counted_without_it_and_a_note_says_so(in_place):
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        if not in_place:
            return torch.compile(model)
        model.compile()
        return model

    found = traced(build, torch.zeros(32, 64))
    [note] = found.notes
    assert note.startswith("torch.compile is left out")
    plain = traced(
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)),
        torch.zeros(32, 64),
    )
    assert plain.notes == () and plain.parts["weights"] == found.parts["weights"]

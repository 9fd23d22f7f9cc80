"""The mean of checkpoints: strict on what goes in, and on where it comes from."""

import hashlib

import numpy as np
import pytest
import torch

from memfit.errors import DamagedError, UsageError
from memfit.training import load_checkpoint, save_checkpoint
from memfit_workloads.averages import average_checkpoints


def weights(seed, **changes):
    generator = torch.Generator().manual_seed(seed)
    state = {
        "layer.weight": torch.randn(4, 3, generator=generator),
        "layer.half": torch.randn(5, generator=generator).bfloat16(),
        "phase": torch.randn(2, generator=generator, dtype=torch.complex64),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "scores": torch.tensor([0.0, -torch.inf]),
    }
    return {name: value for name, value in {**state, **changes}.items() if value is not None}


@pytest.fixture
def save(tmp_path):
    """Writes a checkpoint as a training does, and gives its path."""

    def write(name, state, *, fit="f1", epoch=None, **more):
        path = tmp_path / name
        content = {"memfit_checkpoint": 1, "model": state, "fit": fit, "epoch": epoch, "identity": {}, **more}
        save_checkpoint(path, content, prove=False)
        return path

    return write


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.proves("S0-25")
def test_the_mean_of_three_is_that_of_numpy(save, tmp_path):
    told = {"run": "ab", "fold": 3}
    paths = [save(f"ema_epoch_{epoch}.pt", weights(epoch), epoch=epoch, provenance=told) for epoch in (3, 6, 10)]
    sources = average_checkpoints(paths, tmp_path / "out" / "blended.pt")
    found = load_checkpoint(tmp_path / "out" / "blended.pt")
    for name in ("layer.weight", "phase"):
        stacked = np.stack([weights(epoch)[name].numpy() for epoch in (3, 6, 10)])
        wide = np.complex128 if np.iscomplexobj(stacked) else np.float64
        assert np.array_equal(found["model"][name].numpy(), stacked.mean(0, dtype=wide).astype(stacked.dtype))
    half = torch.stack([weights(epoch)["layer.half"].double() for epoch in (3, 6, 10)]).mean(0).bfloat16()
    assert torch.equal(found["model"]["layer.half"], half)
    assert found["model"]["scores"].tolist() == [0.0, -np.inf]
    assert found["model"]["steps"].item() == 7
    assert found["model"]["mask"].tolist() == [True, False]
    assert [(source["path"], source["epoch"], source["fit"]) for source in found["sources"]] == [
        (str(path), epoch, "f1") for path, epoch in zip(paths, (3, 6, 10), strict=True)
    ]
    assert [source.sha256 for source in sources] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert (found["fit"], found["epoch"], found["provenance"]) == ("f1", 10, told)
    assert "memfit_checkpoint" not in found  # a fit refuses it in the place of a checkpoint


def test_one_input_is_the_identity(save, tmp_path):
    average_checkpoints([save("a.pt", weights(1), fit=None)], tmp_path / "out.pt")
    assert equal(load_checkpoint(tmp_path / "out.pt")["model"], weights(1))


@pytest.mark.proves("S0-25")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (weights(2, extra=torch.ones(1)), r"'extra' is only in .*b\.pt"),
        (weights(2, steps=None), r"'steps' is only in .*a\.pt"),
        (weights(2, **{"layer.weight": torch.ones(3, 4)}), r"float32\[4, 3\] in .* float32\[3, 4\]"),
        (weights(2, **{"layer.weight": torch.ones(4, 3).double()}), r"float32\[4, 3\] in .* float64\[4, 3\]"),
        (weights(2, steps=torch.tensor(8)), r"'steps' differs between .*: 7 and 8"),
        (weights(2, mask=torch.tensor([True, True])), "'mask' differs"),
        (weights(2, phase=None, late=torch.ones(1)), r"'late' is only in .*b\.pt; 'phase' is only in .*a\.pt"),
        (weights(2, **{"layer.weight": torch.full((4, 3), torch.nan)}), r"b\.pt holds values that are not numbers"),
    ],
)
def test_files_that_do_not_agree_are_refused(save, tmp_path, other, message):
    with pytest.raises(UsageError, match=message):
        average_checkpoints([save("a.pt", weights(1)), save("b.pt", other)], tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_counters_can_be_taken_from_the_last_file(save, tmp_path):
    paths = [save("a.pt", weights(1)), save("b.pt", weights(2, steps=torch.tensor(8)))]
    average_checkpoints(paths, tmp_path / "out.pt", integer_buffers="last")
    assert load_checkpoint(tmp_path / "out.pt")["model"]["steps"].item() == 8


@pytest.mark.proves("C-46")
def test_different_trainings_are_refused_unless_told(save, tmp_path):
    a, b = save("a.pt", weights(1)), save("b.pt", weights(2), fit="f2")
    with pytest.raises(
        UsageError, match=r"b\.pt: nothing there says that it is of the training that wrote .*a\.pt \(f1\)"
    ):
        average_checkpoints([a, b], tmp_path / "out.pt")
    silent = save("c.pt", weights(3), fit=None)
    with pytest.raises(UsageError, match=r"c\.pt: nothing there says"):
        average_checkpoints([a, silent], tmp_path / "out.pt")
    average_checkpoints([a, b, silent], tmp_path / "out.pt", allow_unrelated=True)
    with pytest.raises(
        UsageError, match=r"a\.pt: nothing there says .* wrote .*out\.pt \(not said\)"
    ):  # the mean of two is of neither
        average_checkpoints([tmp_path / "out.pt", a], tmp_path / "again.pt")


def test_wrapped_and_prefixed_files_are_unwrapped(tmp_path):
    plain = {"weight": torch.ones(2), "bias": torch.zeros(1)}
    forms = [
        plain,
        {"model": plain, "optimizer": {"lr": torch.ones(1)}},
        {"state_dict": {f"module.{name}": value for name, value in plain.items()}},
        {"model_state_dict": {f"module._orig_mod.{name}": value for name, value in plain.items()}},
        {"n_averaged": torch.tensor(3), **{f"module.{name}": value for name, value in plain.items()}},
    ]
    for number, form in enumerate(forms):
        torch.save(form, tmp_path / f"{number}.pt")
    paths = [tmp_path / f"{number}.pt" for number in range(len(forms))]
    average_checkpoints(paths, tmp_path / "out.pt", allow_unrelated=True)
    assert equal(load_checkpoint(tmp_path / "out.pt")["model"], plain)


def test_damaged_and_foreign_files_are_refused(save, tmp_path):
    good = save("good.pt", weights(1))
    content = good.read_bytes()
    weight = content.index(weights(1)["layer.weight"].numpy().tobytes())
    for name, broken in {
        "flipped.pt": content[:weight] + bytes([content[weight] ^ 1]) + content[weight + 1 :],
        "short.pt": content[:-200],
        "text.pt": b"not a checkpoint",
    }.items():
        (tmp_path / name).write_bytes(broken)
        with pytest.raises((DamagedError, UsageError), match=name):
            average_checkpoints([tmp_path / name], tmp_path / "out.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(UsageError, match=r"The state in .*module\.pt cannot be loaded"):
        average_checkpoints([tmp_path / "module.pt"], tmp_path / "out.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    torch.save({"weight": torch.ones(1), "name": "a"}, tmp_path / "dict.pt")
    for name, found in (("list", "list"), ("dict", "the keys \\['weight', 'name'\\]")):
        with pytest.raises(UsageError, match=rf"{name}\.pt holds no state dict of tensors: found {found}"):
            average_checkpoints([tmp_path / f"{name}.pt"], tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_files_that_are_not_there_or_named_twice_are_refused(save, tmp_path):
    a = save("ema_epoch_3.pt", weights(1))
    with pytest.raises(UsageError, match=r"ema_epoch_6\.pt cannot be read"):
        average_checkpoints([a, tmp_path / "ema_epoch_6.pt"], tmp_path / "out.pt")
    with pytest.raises(UsageError, match="named twice"):
        average_checkpoints([a, tmp_path / "." / "ema_epoch_3.pt"], tmp_path / "out.pt")
    with pytest.raises(UsageError, match="named twice"):
        average_checkpoints([a], a)
    with pytest.raises(UsageError, match="nothing to average"):
        average_checkpoints([], tmp_path / "out.pt")
    assert equal(load_checkpoint(a)["model"], weights(1))

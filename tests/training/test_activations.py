"""Activations that are computed again: the same gradients, fewer bytes kept."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.training import checkpoint_activations


class Block(nn.Module):
    """A residual block that drops."""

    def __init__(self, width=32, norm=nn.LayerNorm):
        super().__init__()
        self.norm = norm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width))

    def forward(self, x, *, scale=1.0):
        return x + scale * self.inner(self.norm(x))


class Model(nn.Module):
    """Four blocks between two layers, and a shorter list that is not theirs."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block(norm=norm) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return sum(head(x).sum() for head in self.heads)


def make(norm=nn.LayerNorm):
    torch.manual_seed(0)
    return Model(norm)


def saved_bytes_and_gradients(model):
    """What autograd holds at the end of a forward pass, each storage once, and the gradients after the backward."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(64, 8))
    loss.backward()
    return sum(saved.values()), [parameter.grad for parameter in model.parameters()]


def equal(some, others):
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_gradients_are_equal_bit_for_bit_with_dropout_and_fewer_bytes_are_kept():
    plain, checkpointed = make(), make()
    found = checkpoint_activations(checkpointed)
    assert found.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert found.by == "memfit"
    plain_bytes, plain_gradients = saved_bytes_and_gradients(plain)
    fewer_bytes, gradients = saved_bytes_and_gradients(checkpointed)
    assert equal(gradients, plain_gradients)
    assert fewer_bytes < plain_bytes / 3
    after = torch.rand(3)
    saved_bytes_and_gradients(plain)
    assert torch.equal(after, torch.rand(3))  # the random state goes on as without


def test_the_blocks_can_be_named_by_class_or_one_by_one():
    assert checkpoint_activations(make(), Block).names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    model = make()
    assert checkpoint_activations(model, [model.blocks[2], model.first]).names == ("first", "blocks.2")
    model = make()  # what lies inside another is left to the outer one
    assert checkpoint_activations(model, [model.blocks[1].inner, model.blocks[1]]).names == ("blocks.1",)


def test_of_an_encoder_and_a_decoder_of_equal_length_both_are_taken():
    transformer = nn.Transformer(
        16, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16, batch_first=True
    )
    assert checkpoint_activations(transformer).names == (
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    )


def test_names_of_weights_copies_and_pickles_stay():
    model = make()
    state = model.state_dict()
    checkpoint_activations(model)
    assert list(model.state_dict()) == list(state)
    assert all(isinstance(block, Block) and type(block).__name__ == "Block" for block in model.blocks)
    fewer_bytes, gradients = saved_bytes_and_gradients(model)
    model.zero_grad()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other_bytes, other_gradients = saved_bytes_and_gradients(other)
        assert equal(other_gradients, gradients)
        assert other_bytes == fewer_bytes
        assert not {id(one) for one in other.parameters()} & {id(one) for one in model.parameters()}


def test_a_checkpointed_model_is_freed_at_once():
    model = make()
    checkpoint_activations(model)
    saved_bytes_and_gradients(model)
    dead = weakref.ref(model.blocks[0])
    gc.disable()
    try:
        del model
        assert dead() is None
    finally:
        gc.enable()


def test_without_gradients_nothing_is_different():
    plain, checkpointed = make().eval(), make().eval()
    checkpoint_activations(checkpointed)
    with torch.no_grad():
        x = torch.randn(4, 8)
        assert torch.equal(plain(x), checkpointed(x))


def test_batch_norm_in_training_mode_is_refused_by_name_and_nothing_is_changed():
    model = make(nn.BatchNorm1d)
    with pytest.raises(UsageError, match=r"'blocks.0.norm' \(BatchNorm1d\) updates its running statistics"):
        checkpoint_activations(model)
    assert {type(block) for block in model.blocks} == {Block}
    model.eval()
    checkpoint_activations(model)
    saved_bytes_and_gradients(model)  # its statistics are fixed now
    model.train()
    with pytest.raises(UsageError, match=r"'Block.norm' \(BatchNorm1d\) updates its running"):
        saved_bytes_and_gradients(model)


def test_batch_norm_that_keeps_no_statistics_or_lies_outside_is_none_of_this():
    model = make(lambda width: nn.BatchNorm1d(width, track_running_stats=False))
    checkpoint_activations(model)
    assert equal(
        saved_bytes_and_gradients(model)[1],
        saved_bytes_and_gradients(make(lambda width: nn.BatchNorm1d(width, track_running_stats=False)))[1],
    )
    checkpoint_activations(nn.Sequential(nn.BatchNorm1d(8), make()))


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_any_other_block_that_changes_its_buffers_is_refused_in_its_first_pass():
    model = nn.ModuleList([Counting()])
    checkpoint_activations(model)
    with pytest.raises(UsageError, match="Counting changes its buffer 'calls'"):
        model[0](torch.ones(2, requires_grad=True))


def test_no_block_a_foreign_one_and_a_second_time_are_refused():
    with pytest.raises(UsageError, match="0 of 0 blocks were found in Linear"):
        checkpoint_activations(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="0 of 1 blocks were found in Model"):
        checkpoint_activations(make(), [Block()])
    model = make()
    checkpoint_activations(model)
    with pytest.raises(UsageError, match=r"'blocks\.0' is checkpointed already"):
        checkpoint_activations(model)


class Config:
    """What Transformers calls a model's config."""

    def __init__(self):
        self.use_cache = True


class GradientCheckpointingLayer(nn.Linear):
    """What Transformers derives its blocks from."""

    gradient_checkpointing = False


class Pretrained(nn.Module):
    """A model with Transformers' interface; its decoder has a config of its own, as T5's has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(GradientCheckpointingLayer(2, 2) for _ in range(2))
        self.decoder = nn.Linear(2, 2)
        self.config, self.decoder.config = Config(), Config()
        self.asked = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.asked = gradient_checkpointing_kwargs
        self.gradient_checkpointing = True  # as its stack of blocks has
        for layer in self.layers:
            layer.gradient_checkpointing = True


def test_a_transformers_model_checkpoints_itself_and_its_generation_caches_are_off():
    model = Pretrained()
    found = checkpoint_activations(model)
    assert model.asked == {"use_reentrant": False, "preserve_rng_state": True}
    assert (found.by, found.names) == ("transformers", ("layers.0", "layers.1"))
    assert found.caches_off == ("Pretrained", "decoder")
    assert (model.config.use_cache, model.decoder.config.use_cache) == (False, False)


def test_with_blocks_named_a_transformers_model_is_left_to_memfit():
    model = Pretrained()
    found = checkpoint_activations(model, [model.decoder])
    assert (model.asked, found.by, found.names) == (None, "memfit", ("decoder",))
    assert not model.config.use_cache

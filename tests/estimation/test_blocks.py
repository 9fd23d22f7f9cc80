"""What blocks keep for their backward pass: checkpointed, and the loss in pieces."""

import weakref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.estimation import ChunkedHead, checkpoint_blocks

ROWS, WIDTH = 64, 32


class Block(nn.Module):
    """Two products and what lies between them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)).square())


def make(num_blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_checkpointed_blocks_give_the_same_gradients_and_run_twice():
    model, x = make(), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    for kind in ("full", "selective"):
        other, runs = make(), []
        for block in other:
            block.up.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        checkpoint_blocks(other, kind)
        for ours, theirs in zip(gradients(other, x), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert len(runs) == 8
        with torch.no_grad():
            other(x)
        assert len(runs) == 12


class Count(TorchDispatchMode):
    """Bytes of the tensors that were made within it and live."""

    def __init__(self, *known):
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        return result


def rows_alive_after_forward(kind="none"):
    """In rows of one hidden state."""
    with FakeTensorMode():
        model, x = make(), torch.empty(ROWS, WIDTH)
        checkpoint_blocks(model, kind)
        with Count(x, *model.parameters()) as count:
            result = model(x)
            alive = sum(count.alive.values())
            result.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    return alive / (ROWS * WIDTH * 4)


def test_full_checkpointing_keeps_the_inputs_of_blocks_and_selective_one_product_more():
    assert rows_alive_after_forward("full") == 4  # what each block gives
    assert rows_alive_after_forward("selective") == 4 + 4 * 4  # and the first of its two products
    assert rows_alive_after_forward() == 4 + 4 * (4 + 4)  # and both inputs of what follows it


def test_the_loss_in_pieces_is_the_loss():
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 50, bias=False)
    hidden = torch.randn(2, 32, WIDTH, requires_grad=True)
    labels = torch.randint(0, 50, (2, 32))
    whole = nn.functional.cross_entropy(head(hidden).flatten(end_dim=-2), labels.flatten())
    whole.backward()
    expected = hidden.grad.clone()
    hidden.grad = None
    chunked = ChunkedHead(head, 5)
    assert chunked(hidden) is hidden
    loss = chunked(hidden, labels)
    loss.backward()
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(hidden.grad, expected)

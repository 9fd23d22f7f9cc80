"""What a note of the user's own state leaves behind: nothing."""

import gc
import weakref

import torch

from memfit.training._notes import note_of


def test_a_note_keeps_nothing_alive():
    models = [torch.nn.Linear(2, 1)]
    gc.disable()
    try:
        note_of(models, [])
        gone = weakref.ref(models.pop())
        assert gone() is None
    finally:
        gc.enable()

"""A step of transformers' Trainer that runs out of memory is repeated in smaller parts, or its split is refused."""

import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the optimizers import it: once, for all children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_device"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
transformers = pytest.importorskip("transformers")

import forked  # noqa: E402
from integrations import bert  # noqa: E402
from memfit.errors import DoesNotFitError, SampleTooLargeError, UsageError  # noqa: E402
from memfit.integrations.huggingface import exact, stoppable  # noqa: E402
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, read_events  # noqa: E402

FIRST = 3  # the first step, from 0, in which more than two samples do not fit
OPTIONS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def causal():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def questions():
    torch.manual_seed(0)
    return transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES, intermediate_size=16))


def places(items):
    """A batch whose loss is a mean over samples."""
    words = torch.tensor([item["input_ids"] for item in items])
    return {"input_ids": words, "start_positions": words[:, 1] % 6, "end_positions": words[:, 2] % 6}


#: A model, a collation, and what the loss is a mean over (of a causal model transformers makes it a sum).
TASKS = {
    "labels": (bert.model, bert.Mask(), lambda batch: int((batch["labels"] != -100).sum())),
    "sum": (causal, bert.Mask(), None),
    "samples": (questions, places, lambda batch: len(batch["input_ids"])),
}


class Short(transformers.TrainerCallback):
    """Lets a model run out of memory from a batch of a step on, where it meets more than ``most`` samples."""

    def __init__(self, how, first=FIRST, skip=0, most=2):
        self.how, self.first, self.skip, self.most = how, first, skip, most
        self.is_armed, self.num_failed = False, 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen = 0
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.get_input_embeddings().weight.register_hook(lambda _: self._fail("backward"))  # the last gradient

    def on_step_begin(self, args, state, control, **kwargs):
        self.is_armed = state.global_step >= self.first
        if self.is_armed and self.how == "limit":
            status = Path("/proc/self/status").read_text()
            data = int(re.search(r"VmData:\s+(\d+)", status)[1]) << 10
            resource.setrlimit(resource.RLIMIT_DATA, (data + (700 << 20), resource.RLIM_INFINITY))

    def _before(self, model, args, kwargs):
        self.size = len(kwargs["input_ids"])
        if self.is_armed and model.training:
            self.seen += 1
            if self.how == "limit":
                torch.empty(self.size << 28, dtype=torch.uint8)
            self._fail("forward")

    def _fail(self, how):
        if self.how == how and self.is_armed and self.seen > self.skip and self.size > self.most:
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class ByHand(transformers.Trainer):
    """Splits each batch in halves from a step on, as one would write it without memfit."""

    count = None
    share = 1.0

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step < FIRST:
            return super().training_step(model, inputs, num_items_in_batch)
        losses = []
        for half in ({name: one[place] for name, one in inputs.items()} for place in (slice(0, 2), slice(2, 4))):
            self.share = 1.0 if self.count is None else self.count(half) / self.count(inputs)
            losses.append(super().training_step(model, half, num_items_in_batch))
        return sum(losses)

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * self.share


def train(folder, task="labels", short=None, mode=exact, **settings):
    net, collator, _ = TASKS[task]
    callbacks = [*settings.pop("callbacks", ()), *([] if short is None else [short])]
    trainer = bert.make(folder, net=net(), collator=collator, callbacks=callbacks, **OPTIONS | settings)
    mode(trainer, recover=True)
    trainer.train()
    return bert.digest(trainer)


def by_hand(folder, task, **settings):
    net, collator, count = TASKS[task]
    trainer = bert.make(folder, kind=ByHand, net=net(), collator=collator, **OPTIONS | settings)
    trainer.count = count
    stoppable(trainer)
    trainer.train()
    return bert.digest(trainer)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("how", "skip", "accumulation"), [("forward", 1, 2), ("backward", 1, 3)])
def test_a_step_out_of_memory_ends_in_the_bytes_of_one_that_was_split_from_the_start(
    tmp_path, task, how, skip, accumulation
):
    options = {"gradient_accumulation_steps": accumulation}
    expected = by_hand(tmp_path / "hand", task, **options)
    short = Short(how, skip=skip)
    assert train(tmp_path / "own", task, short, stoppable, **options) == expected
    assert short.num_failed == 1, "then the size that fits is known"


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 3}])
def test_as_long_as_all_fits_recovery_changes_no_byte(tmp_path, settings):
    plain = train(tmp_path / "plain", mode=lambda *_, **__: None, **settings)
    assert train(tmp_path / "own", mode=stoppable, **settings) == plain


def test_memory_that_is_really_short_is_survived_and_the_events_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(JOB_ID_VARIABLE, "fold_1")
    found = forked.call(train, tmp_path / "own", "labels", Short("limit"), stoppable)
    assert found == by_hand(tmp_path / "hand", "labels")
    events = [event for event in read_events(tmp_path / "events") if event["kind"] in ("oom", "microbatch", "retry")]
    assert [event["kind"] for event in events] == ["oom", "microbatch", "retry"]
    assert events[0] | {"memory": "host", "epoch": 1, "step": FIRST + 1, "phase": "forward"} == events[0]
    assert (events[1]["previous_size"], events[2]["size"]) == (4, 2)


def test_a_largest_batch_that_must_be_split_passes_the_rehearsal(tmp_path):
    def always(trainer, **settings):
        short.is_armed = True
        stoppable(trainer, **settings)

    short = Short("forward", first=0)
    train(tmp_path, short=short, mode=always)
    assert short.num_failed == 2, "in the rehearsal, and in the first step"
    with pytest.raises(DoesNotFitError, match="The largest batch does not fit"):
        train(tmp_path / "whole", short=short, mode=lambda trainer, recover, **settings: always(trainer, **settings))


def test_a_resume_goes_on_with_the_size_that_fits(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == FIRST + 1:
                os.kill(os.getpid(), signal.SIGTERM)

    whole = train(tmp_path / "whole", short=Short("forward"))
    with pytest.raises(SystemExit):
        train(tmp_path / "own", short=Short("forward"), callbacks=[Stop()])
    assert train(tmp_path / "own") == whole, "nothing fails any more, and it stays split"
    with pytest.raises(UsageError, match="recover: True then, False now"):
        train(tmp_path / "own", mode=lambda trainer, **_: exact(trainer))


class Batchwise(bert.transformers.BertForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        self.over_batch = torch.nn.BatchNorm1d(16)
        self.bert.encoder.register_forward_hook(self._normalise)

    def _normalise(self, module, args, output):
        output.last_hidden_state = self.over_batch(output.last_hidden_state.mT).mT
        return output


@pytest.mark.parametrize(
    ("net", "told"), [("statistics", r"over_batch' takes statistics over the batch"), ("loss", "is not the sum")]
)
def test_what_cannot_be_split_exactly_is_refused_by_name(tmp_path, monkeypatch, net, told):
    if net == "loss":
        torch.manual_seed(0)
        model = bert.model()

        def coupled(module, args, output):
            output.loss = output.loss + 100 * output.logits.std(0).mean()
            return output

        model.register_forward_hook(coupled)
    else:
        model = Batchwise(bert.model().config)
    monkeypatch.setitem(TASKS, "other", (lambda: model, bert.Mask(), None))
    with pytest.raises(UsageError, match=told) as caught:
        train(tmp_path, "other", Short("forward"))
    assert "per_device_train_batch_size" in caught.value.remedy


def test_a_single_sample_that_does_not_fit_ends_the_training(tmp_path):
    with pytest.raises(SampleTooLargeError, match="A single unit of the batch does not fit, in epoch 1, step 4 of 4"):
        train(tmp_path, short=Short("forward", most=0))


def pairs(items):
    """Two rows for each sample, as the collators of TRL make them: the halves of a batch belong together."""
    words = torch.tensor([item["input_ids"] for item in items])
    return {"input_ids": torch.cat([words, words.flip(1)]), "labels": torch.cat([words, words])}


def test_rows_that_are_no_samples_are_never_split(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "pairs", (bert.model, pairs, None))
    with pytest.raises(SampleTooLargeError, match="The batch, which is not split, does not fit"):
        train(tmp_path, "pairs", Short("forward", most=4))


class Counted(transformers.Trainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(bert.Words())


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"kind": Counted}, "_prepare_inputs"),
        ({"optim": "lomo"}, "backward pass"),
        ({"data": Stream(), "max_steps": 4}, "stream"),
    ],
)
def test_what_cannot_be_repeated_is_refused_before_anything_is_trained(tmp_path, settings, part):
    with pytest.raises(UsageError, match=part):
        stoppable(bert.make(tmp_path, **settings), recover=True)


def test_recover_is_refused_on_several_ranks(tmp_path, monkeypatch):
    trainer = bert.make(tmp_path)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(UsageError, match="with recover") as caught:
        stoppable(trainer, recover=True)
    assert "begins again" in caught.value.remedy

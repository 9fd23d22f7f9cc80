"""A tiny model of masked words, trained by transformers in forked children that signals reach."""

import hashlib
import multiprocessing
import os
import signal
import traceback

import torch
import transformers

from memfit.integrations.huggingface import MemfitCallback, exact, stoppable

STEPS = 16  # two epochs of 32 samples in batches of 2, two of which are a step


class Words(torch.utils.data.Dataset):
    def __init__(self, number=32):
        self.rows = torch.randint(5, 40, (number, 6), generator=torch.Generator().manual_seed(3)).tolist()
        self.lengths = [6] * number

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


class Mask:
    """Masks a third of the words, drawn from the global generator."""

    def __call__(self, items):
        words = torch.tensor([item["input_ids"] for item in items])
        hidden = torch.rand(words.shape) < 0.3
        hidden[:, 0] = True
        return {"input_ids": words.masked_fill(hidden, 4), "labels": words.masked_fill(~hidden, -100)}


class At(transformers.TrainerCallback):
    """Sends a signal in a step, or in an evaluation."""

    def __init__(self, step, send, where="on_step_begin"):
        self.step, self.send, self.where = step, send, where

    def _hear(self, where, state):
        if state.global_step == self.step and self.where == where:
            self.send()

    def on_step_begin(self, args, state, control, **kwargs):
        self._hear("on_step_begin", state)

    def on_prediction_step(self, args, state, control, **kwargs):
        self._hear("on_prediction_step", state)


SENDS = {
    "TERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "USR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "INT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "GROUP": lambda: os.killpg(0, signal.SIGTERM),
    "KILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def model(**settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    config = transformers.BertConfig(vocab_size=40, **{"intermediate_size": 16} | sizes | settings)
    return transformers.BertForMaskedLM(config)


def make(folder, *, kind=transformers.Trainer, callbacks=(), data=None, collator=None, net=None, **settings):
    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "save_steps": 3,
        "logging_steps": 5,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **settings,
    }
    args = transformers.TrainingArguments(str(folder), **given)
    data = Words() if data is None else data
    valid = Words(4) if given.get("eval_strategy", "no") != "no" else None
    return kind(
        model() if net is None else net,
        args,
        data_collator=collator or Mask(),
        train_dataset=data,
        eval_dataset=valid,
        callbacks=list(callbacks),
    )


def digest(trainer):
    """Return the SHA-256 of weights, optimizer and schedule, and the losses that were logged."""
    sha = hashlib.sha256()
    for one in (trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()):
        _add(sha, one)
    losses = [(one["step"], one[name]) for one in trainer.state.log_history for name in one if "loss" in name]
    return sha.hexdigest(), losses


def _add(sha, value):
    if isinstance(value, torch.Tensor):
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for name in sorted(value, key=str):
            sha.update(str(name).encode())
            _add(sha, value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            _add(sha, one)
    else:
        sha.update(repr(value).encode())


def train(folder, mode="exact", at=None, send="TERM", where="on_step_begin", allow=(), **settings):
    """Train in this process; return the digest."""
    callbacks = [*settings.pop("callbacks", ()), *([] if at is None else [At(at, SENDS[send], where)])]
    trainer = make(folder, callbacks=callbacks, **settings)
    if mode == "exact":
        exact(trainer, allow=allow)
    elif mode == "stoppable":
        stoppable(trainer, allow=allow)
    trainer.train()
    return digest(trainer)


class Tells(transformers.TrainerCallback):
    """Tells which moment of five batches and three steps an epoch a training passes."""

    def __init__(self, at):
        self.at = at

    def on_train_begin(self, args, state, control, **kwargs):
        self.at(("begin", state.global_step // 3))

    def on_substep_end(self, args, state, control, **kwargs):
        self.at(("batch", state.global_step // 3, state.global_step % 3 * 2 + 1))

    def on_step_end(self, args, state, control, **kwargs):
        if (step := state.global_step - 1) % 3 == 2:
            self.at(("batch", step // 3, 5))
        else:
            self.at(("batch", step // 3, step % 3 * 2 + 2))

    def on_prediction_step(self, args, state, control, **kwargs):
        self.at(("evaluation", (state.global_step - 1) // 3))


class Sees(transformers.Trainer):
    """Notes the samples of each batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen.append(inputs["labels"][:, 0].tolist())
        return super().training_step(model, inputs, num_items_in_batch)


def train_by_moments(folder, at, *, mode="exact", workers=0, rate=1e-2, width=16, allow=()):
    """Train as the contract's other loops do; return the hash of what it leaves, and the samples of each batch."""
    settings = {
        "per_device_train_batch_size": 4, "num_train_epochs": 3, "save_steps": 2, "learning_rate": rate,
        "eval_strategy": "epoch", "dataloader_num_workers": workers,
    }  # fmt: skip
    callbacks = [Tells(at), *[MemfitCallback()] * (mode == "watch")]
    trainer = make(
        folder, kind=Sees, callbacks=callbacks, data=Words(20), net=model(intermediate_size=width), **settings
    )
    trainer.seen = []
    if mode in ("exact", "stop"):
        (exact if mode == "exact" else stoppable)(trainer, allow=allow)
    trainer.train()
    return digest(trainer)[0], trainer.seen


def child(*arguments, **settings):
    """Train in a child with a process group of its own; return its exit code, and the digest or what went wrong."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run():
        os.setsid()
        try:
            sender.send(train(*arguments, **settings))
        except Exception:
            sender.send(traceback.format_exc())
            raise

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = None
    process.join()
    return process.exitcode, found

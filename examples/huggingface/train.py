"""A small BERT on images of handwritten digits, a token for each pixel; `exact(trainer)` makes its resume exact."""

import hashlib

import torch
from sklearn.datasets import load_digits
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from memfit.integrations.huggingface import exact


class Say(TrainerCallback):
    """Prints the steps."""

    def on_train_begin(self, args, state, control, **kwargs):
        print(f"begins after step {state.global_step} of {state.max_steps}")

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.3f}")


torch.set_num_threads(1)  # the model is small
logging.disable_progress_bar()
logging.set_verbosity_error()
images, labels = load_digits(return_X_y=True)
tokens = torch.tensor(images).long()  # grey values from 0 to 16
data = [{"input_ids": one, "labels": int(label)} for one, label in zip(tokens, labels, strict=True)]

torch.manual_seed(0)
size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=17, max_position_embeddings=64, num_labels=10, **size))
arguments = TrainingArguments(
    "out",
    max_steps=1000,
    learning_rate=1e-3,
    per_device_train_batch_size=16,
    logging_steps=10,
    save_steps=10,
    save_total_limit=2,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Say])
trainer.remove_callback(PrinterCallback)
exact(trainer)
trainer.train()

weights = torch.cat([one.detach().flatten() for one in model.parameters()])
print("SHA-256 of the weights:", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:32])

"""The recipe fine-tune as stages: ``RECIPES`` is what a config names. Importing this module loads no torch."""

from __future__ import annotations

from typing import Any

from memfit.pipeline import Context, Probe, Stage, Workload
from memfit_workloads.recipes import text
from memfit_workloads.recipes.params import SETTINGS, RecipesParams, plan_of


def train(context: Context, params: RecipesParams) -> dict[str, Any]:
    from memfit_workloads.recipes import training

    return training.train(context, params)


def evaluate(context: Context, params: RecipesParams) -> dict[str, Any]:
    from memfit_workloads.recipes import training

    return training.evaluate(context, params)


_MODEL = ("pretrained_model", "tiny", "max_source_length", "max_target_length")
_TRAIN = (
    "model_output", "epochs", "batch_size", "gradient_accumulation_steps", "auto_batch_size",
    "max_tokens", "optimizer", "learning_rate", "warmup_steps", "max_grad_norm", "precision",
    "gradient_checkpointing", "compile", "lora",
)  # fmt: skip

RECIPES = Workload(
    params=RecipesParams,
    check=text.check,
    fingerprint=lambda params: dict.fromkeys(("tokenize", "train"), text.fingerprint(params)),
    stages=(
        Stage("tokenize", text.tokenize, reads=("data", *_MODEL, "@seed"), phases=("load", "build")),
        Stage(
            "train",
            train,
            needs=("tokenize",),
            reads=(*_MODEL, *_TRAIN, "@seed"),
            phases=("load", "train", "checkpoint", "validate"),
            probe=Probe(model=plan_of, settings=SETTINGS),
        ),
        Stage(
            "evaluate",
            evaluate,
            needs=("tokenize", "train"),
            reads=(*_MODEL, "num_samples", "num_rouge", "baseline", "max_tokens", "precision", "@seed"),
        ),
    ),
)

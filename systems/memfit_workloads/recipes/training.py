"""Train a T5 on token ids within a plan, and judge what it writes."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from memfit.data import PackedDataset, Padding, SequenceLoader
from memfit.errors import DoesNotFitError
from memfit.estimation import LEAST_SHARE, equation_of_batch, estimate_formula, share_that_moves
from memfit.memory import Budget
from memfit.pipeline import Context
from memfit.rundir import phase, record
from memfit.training import StepOutcome, Trainer, autocast, find_device, seed_everything
from memfit.units import format_bytes
from memfit_workloads.recipes.params import RecipesParams, find_file, model_config, setup_of, unreadable
from memfit_workloads.recipes.text import load_tokenizer

#: What a process takes that has imported torch and transformers, and reads the data, beside the training step.
BASE_BYTES = 700 << 20


def make_model(params: RecipesParams, vocab_size: int) -> torch.nn.Module:
    """Return the model as it is trained: checkpointed, and with adapters beside frozen weights, as the settings say."""
    found = load_model(params, vocab_size)
    found.config.use_cache = False
    if params.gradient_checkpointing:
        is_new = hasattr(found, "activation_checkpointing_enable")  # its name since transformers 5.23
        enable = found.activation_checkpointing_enable if is_new else found.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    lora = params.lora
    if not lora.rank:
        return found  # type: ignore[no-any-return]
    import peft

    adapters = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
        target_modules="all-linear" if "all-linear" in lora.modules else list(lora.modules) or None,
    )  # fmt: skip
    return peft.get_peft_model(found, adapters)


def load_model(params: RecipesParams, vocab_size: int) -> Any:
    """Return the pretrained model, or a small T5 with fresh weights."""
    import transformers

    found: Any
    model = params.pretrained_model
    if model is not None:
        # A name's commit is that of its config.json, so that an attempt that goes on begins with the same weights.
        commit = {} if Path(model).is_dir() else {"revision": find_file(model, "config.json").parent.name}
        try:
            found = transformers.AutoModelForSeq2SeqLM.from_pretrained(model, **commit)
        except (OSError, ValueError) as error:
            raise unreadable(model, error) from None
    else:
        config = transformers.T5Config.from_dict(model_config(params, vocab_size))
        found = transformers.T5ForConditionalGeneration(config)
    return found.to(torch.bfloat16) if params.precision == "bf16" else found


def loss(model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the summed cross-entropy of a batch's target tokens, and their number; padding (-100) counts nothing."""
    logits, labels = logits_of(model, batch)
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, int((labels != -100).sum())


def logits_of(model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-odds of each target token, shape (n, length, vocabulary), and the labels, both on its device."""
    device = next(model.parameters()).device
    found = {name: torch.as_tensor(value, device=device) for name, value in batch.items()}
    inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
    decoder = model._shift_right(found["labels"].clamp(min=0))
    logits = model(**inputs, decoder_input_ids=decoder).logits
    return logits.float() if logits.dtype.itemsize < 4 else logits, found["labels"]


def plan(params: RecipesParams, model: Any) -> dict[str, Any]:
    """Return how many pairs are taken at once, with the forecast of the step's memory."""
    device = find_device("auto")
    on_gpu, config, tried = device.type == "cuda", json.loads(model.config.to_json_string()), []
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else Budget.read().headroom_bytes - BASE_BYTES

    def bound(batch: int) -> int:
        found = estimate_formula(config, setup_of(params, batch)).device["allocated_bytes"].upper
        tried.append(f"{batch}: {format_bytes(found)}")
        return found

    total = params.total
    is_auto = params.auto_batch_size and params.batch_size is None
    sizes = [one for one in range(total, 0, -1) if total % one == 0] if is_auto else [params.sizes(8)[0]]
    for batch in sizes:
        if (peak := bound(batch)) <= free or not is_auto:
            found = {"batch_size": batch, "gradient_accumulation_steps": params.sizes(batch)[1], "auto": is_auto}
            return found | {"forecast_bytes": peak, "equation": equation_of_batch(*params.sizes(batch), 1)}
    raise DoesNotFitError(
        f"not even one pair fits {format_bytes(free)}; tried {', '.join(tried)}.",
        rule="the bound of a step at the longest lengths must fit the free memory.",
        remedy="--set params.gradient_checkpointing=true, a shorter params.max_target_length, or a smaller model",
    )


def loaders(context: Context, params: RecipesParams, batch: int) -> dict[str, SequenceLoader]:
    """Return the batches to train on, in another order each epoch, and those to validate with."""
    output = context["tokenize"]
    found = {}
    for part in ("train", "valid"):
        ids = PackedDataset.open(output.path(part))
        lengths = output.arrays(f"{part}_lengths")["longest"]
        found[part] = SequenceLoader(
            ids, Padding(pad_id=0), batch=batch, max_tokens=params.max_tokens, lengths=lengths,
            shuffle=context.seed if part == "train" else None, num_workers=1,
        )  # fmt: skip
    return found


def make_optimizer(params: RecipesParams, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the weights that are trained; say how many these are where it is not all."""
    trained = [one for one in model.parameters() if one.requires_grad]
    if params.lora.rank:
        few, all_ = (sum(one.numel() for one in some) for some in (trained, model.parameters()))
        record("adapters", num_trained=few, text=f"trains {few:,} of {all_:,} weights, by adapters")
    kind: Any = torch.optim.AdamW if params.optimizer == "adamw" else torch.optim.Adafactor
    return kind(trained, lr=params.learning_rate, foreach=False)  # type: ignore[no-any-return]


def train(context: Context, params: RecipesParams) -> dict[str, Any]:
    """Fine-tune the model; save it as ``model``."""
    phase("load")
    folders = [context.dir / "model", *filter(None, [params.model_output])]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)  # one that cannot be written to ends this before the training
    seed_everything(context.seed)
    model: Any = make_model(params, context["tokenize"].result["vocab_size"])
    # Chosen once: an attempt that goes on has other free memory, and must have the same batches.
    chosen = context.once("batch_plan", lambda: plan(params, model))
    told = f"{'automatic' if chosen['auto'] else 'given'}: {chosen['equation']}"
    record("batch_plan", **chosen, text=f"trains with the batch {told}")
    batches = loaders(context, params, chosen["batch_size"])
    optimizer = make_optimizer(params, model)
    warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (params.warmup_steps + 1)))
    able = {"attention": model.config._attn_implementation, "flash_attention": bool(model._supports_flash_attn)}
    record(
        "capabilities", **able, text="attention: {attention}; has flash attention: {flash_attention}".format_map(able)
    )
    graphs = [num_graphs()] if params.compile else []
    sizes = SizesTold(chosen["batch_size"], params.total)

    trainer = Trainer(
        model,
        loss=compile_blocks(model) if params.compile else loss,
        optimizer=optimizer,
        schedule=warmup,
        device="auto",
        precision=_autocast(params),
        seed=context.seed,
        global_batch_size=params.total if params.max_tokens is None else None,
        checkpoint_dir=context.dir,
        max_grad_norm=params.max_grad_norm,
        on_step=sizes,
        on_epoch=(lambda epoch: graphs.append(num_graphs())) if params.compile else None,
    )
    moves, how = share_that_moves(setup_of(params, 1), model.parameters())
    if moves < LEAST_SHARE:
        told = f"all-bf16: {how}, about {moves:.0%} of them move in a step; bf16-mixed keeps fp32 weights"
        warnings.warn(told, stacklevel=1)
    result = trainer.fit(batches["train"], batches["valid"], num_epochs=params.epochs)
    if params.lora.rank:
        model = model.merge_and_unload()  # adapters become part of the weights
    model.config.use_cache = True
    for folder in folders:
        model.save_pretrained(folder)
        shutil.copy(context["tokenize"].path("tokenizer"), folder / "tokenizer.json")
    context.save("model", folders[0])
    compiled = {"warm_up": graphs[1] - graphs[0], "later": graphs[-1] - graphs[1]} if params.compile else None
    if compiled:
        record(
            "compiled",
            **compiled,
            text="compiled {warm_up} graphs in the first epoch, {later} later".format_map(compiled),
        )
    last = result.history[-1]
    assert last.metrics is not None
    return {
        **chosen,
        "microbatch_size": sizes.smallest,
        "train_loss": last.train_loss,
        "valid_loss": last.metrics["valid_loss"],
        "num_epochs": len(result.history),
        "num_trained": sum(one.numel() for group in optimizer.param_groups for one in group["params"]),
        "share_that_moves": moves,
        "capabilities": able,
        "compile": compiled,
    }


class SizesTold:
    """After each step: says so once when fewer pairs than planned are taken at once."""

    def __init__(self, batch: int, total: int) -> None:
        self.smallest, self.total = batch, total

    def __call__(self, outcome: StepOutcome) -> None:
        if outcome.num_ooms and 0 < outcome.microbatch_size < self.smallest:
            before, self.smallest = self.smallest, outcome.microbatch_size
            now = f"{self.smallest} x {-(-self.total // self.smallest)}"
            text = f"ran out of memory at {before} x {self.total // before} and goes on at {now}: still {self.total}"
            record("batch_changed", size=self.smallest, previous_size=before, text=text)


def compile_blocks(model: torch.nn.Module) -> Any:
    """Let the compiler make the layers of encoder and decoder, for all lengths; return the loss that runs them so.

    What it cannot compile runs as it is, with a warning. Validation runs without it: that would need graphs of its own.
    """
    import torch._dynamo

    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=find_device("auto")))
    except (RuntimeError, OSError) as error:
        told = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
        warnings.warn(f"torch.compile fails, so nothing is compiled: {told}", stacklevel=2)
        return loss
    torch._dynamo.config.suppress_errors = True
    for blocks in (one for one in model.modules() if isinstance(one, torch.nn.ModuleList)):
        if any(hasattr(block, "layer") for block in blocks):  # not the parts of a block
            for block in blocks:
                block.compile(dynamic=True)

    def chosen(model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        with torch.compiler.set_stance("default" if model.training else "force_eager"):
            return loss(model, batch)

    return chosen


def num_graphs() -> int:
    """Return how many graphs this process has compiled; ``torch.compiler`` has no count of its own."""
    from torch._dynamo import utils

    return int(utils.counters["stats"]["unique_graphs"])


def _autocast(params: RecipesParams) -> Literal["bf16-mixed"] | None:
    return "bf16-mixed" if params.precision == "bf16-mixed" else None


def evaluate(context: Context, params: RecipesParams) -> dict[str, Any]:
    """Judge the model on the validation pairs, before the training too if that is wanted, and show texts of it."""
    phase("validate")
    import transformers

    device, vocab_size = find_device("auto"), context["tokenize"].result["vocab_size"]
    seed_everything(context.seed)
    before = judge(context, params, load_model(params, vocab_size).to(device))[0] if params.baseline else None
    trained: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(context["train"].path("model"))
    found, texts = judge(context, params, trained.to(device))
    context.save("samples", texts[: params.num_samples])
    lines = []
    for name, one in (("before the training", before), ("validation", found)):
        if one is not None:
            lines += [f"{name}: {one['loss']:.3f} nats a token, {one['token_accuracy']:.1%} of tokens right"]
        if one is not None and "rouge1" in one:
            lines += [f"  ROUGE-1 {one['rouge1']:.3f}, ROUGE-L {one['rougeL']:.3f} over {one['num_rouge']} texts"]
    for text in texts[: params.num_samples]:
        lines += [f"given: {text['source']}", f"  written: {text['written']}"]
    return found | ({"before": before} if before else {}) | {"report": lines}


def judge(context: Context, params: RecipesParams, model: Any) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return loss and accuracy of a token, batch by batch, ROUGE (F1) of the first texts that it writes, and these."""
    model.eval()
    batches = loaders(context, params, context["train"].result["microbatch_size"])["valid"]
    sums = np.zeros(3)
    with torch.no_grad(), autocast(model, _autocast(params)):
        for batch in batches:
            logits, labels = logits_of(model, batch)
            kept = labels != -100
            total = cross_entropy(logits[kept], labels[kept], reduction="sum")
            sums += [float(total), float((logits.argmax(-1)[kept] == labels[kept]).sum()), float(kept.sum())]
            del logits  # reduced here: those of all batches together are what ends evaluations
        texts = generate(context, params, model)
    found = {"loss": sums[0] / sums[2], "token_accuracy": sums[1] / sums[2], "num_tokens": int(sums[2])}
    if scored := texts[: params.num_rouge]:
        from torchmetrics.functional.text import rouge_score

        written, wanted = ([one[name] for one in scored] for name in ("written", "wanted"))
        rouge = rouge_score(written, wanted, rouge_keys=("rouge1", "rougeL"))
        found |= {name: float(rouge[f"{name}_fmeasure"]) for name in ("rouge1", "rougeL")}
        found["num_rouge"] = len(scored)
    return found, texts


def generate(context: Context, params: RecipesParams, model: Any) -> list[dict[str, str]]:
    """Return what the model writes for the first validation pairs, as many at once as the training took."""
    tokenizer = load_tokenizer(context["train"].path("model"))
    ids = PackedDataset.open(context["tokenize"].path("valid"))[: max(params.num_samples, params.num_rouge)]
    at_once = context["train"].result["microbatch_size"]  # fits: it takes less than a step of the training
    found: list[dict[str, str]] = []
    for at in range(0, len(ids), at_once):
        pairs = list(ids[at : at + at_once])
        batch = {name: torch.as_tensor(one, device=model.device) for name, one in Padding(pad_id=0)(pairs).items()}
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        written = model.generate(**inputs, max_new_tokens=params.max_target_length, num_beams=1, do_sample=False)
        for pair, new in zip(pairs, written.tolist(), strict=True):
            texts = (pair["input_ids"].tolist(), pair["labels"].tolist(), new)
            names = ("source", "wanted", "written")
            decoded = (tokenizer.decode(one, skip_special_tokens=True) for one in texts)
            found.append(dict(zip(names, decoded, strict=True)))
    return found

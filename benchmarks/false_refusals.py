# mypy: ignore-errors
# It puts stand-ins in place of the functions of others.
"""False refusals: does *exact* take the frameworks' own example scripts, as they are?

    python benchmarks/false_refusals.py [--accelerate DIR] [--transformers DIR] [--trl DIR] [--lightning DIR]
        [--peft DIR] [--only WORD] [--steps 6] [--json FILE]

Each DIR is a checkout of a framework. Each example runs in a process of its own for a few optimizer steps, with *exact*
put on from outside. What an example downloads has a stand-in (``_example_stand_ins.py``); its loop, collators,
samplers and callbacks stay. It needs ``datasets`` and ``evaluate``, and for some examples ``trl``, ``torchvision``,
``timm`` and ``schedulefree``.

A refusal counts as false, unless ``RIGHT`` says why it is right. Exit status 0: at most 1 example in 20 that runs here
is refused falsely.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from memfit.errors import UsageError

_MINUTES = 5
_MOST = 1 / 20

#: Refusals that are right: the example, the part, and why it cannot be exact.
RIGHT: dict[str, tuple[str, str]] = {
    "demos.LightningLSTM": ("model.hidden", "the hidden state goes from batch to batch, and no checkpoint holds it"),
}

_HF = "examples/pytorch"
_DATA = "{dir}/tests/fixtures/tests_samples"
_RUN = "--output_dir out --per_device_train_batch_size 2 --per_device_eval_batch_size 2"
_TRAINER = f"{_RUN} --do_train --max_steps {{steps}} --use_cpu --report_to none"
_LOOP = f"{_RUN} --num_train_epochs 3"
_BERT, _T5 = "--model_name_or_path bert-base", "--model_name_or_path t5-small"
_JSON = "--train_file {0}/{1}/sample.json --validation_file {0}/{1}/sample.json"
_CONLL, _SQUAD, _SWAG, _XSUM, _WMT = (_JSON.format(_DATA, one) for one in ("conll", "SQUAD", "swag", "xsum", "wmt16"))
_TEXT = "--train_file text.txt --validation_file text.txt"
_WMT += " --source_lang en_XX --target_lang ro_RO"
_CATS = "--dataset_name cats_vs_dogs --train_val_split 0.1"
_GLUE = "--cpu"

#: The arguments of the examples, for transformers and Accelerate mostly those of transformers' own tests.
_TRANSFORMERS = {
    "text-classification/run_glue": f"{_BERT} --task_name mrpc --max_seq_length 64",
    "text-classification/run_classification": f"{_BERT} --dataset_name texts --text_column_names text"
    " --label_column_name label --shuffle_train_dataset --max_seq_length 64",
    "text-classification/run_xnli": f"{_BERT} --language en --max_seq_length 64",
    "language-modeling/run_clm": f"--model_name_or_path gpt2 {_TEXT} --block_size 64",
    "language-modeling/run_mlm": f"--model_name_or_path roberta {_TEXT} --max_seq_length 64",
    "language-modeling/run_plm": f"--model_name_or_path xlnet {_TEXT} --max_seq_length 64",
    "language-modeling/run_fim": f"--model_name_or_path gpt2 {_TEXT} --block_size 64",
    "token-classification/run_ner": f"{_BERT} {_CONLL}",
    "question-answering/run_qa": f"{_BERT} {_SQUAD} --version_2_with_negative",
    "question-answering/run_qa_beam_search": f"--model_name_or_path xlnet {_SQUAD} --version_2_with_negative",
    "question-answering/run_seq2seq_qa": f"{_T5} {_SQUAD} --context_column context --question_column question"
    " --answer_column answers --version_2_with_negative",
    "multiple-choice/run_swag": f"{_BERT} {_SWAG}",
    "summarization/run_summarization": f"{_T5} {_XSUM}",
    "translation/run_translation": f"--model_name_or_path mbart {_WMT} --max_source_length 128",
    "image-classification/run_image_classification": f"--model_name_or_path vit {_CATS} --label_column_name labels"
    " --remove_unused_columns False --dataloader_num_workers 1",
    "image-pretraining/run_mae": f"{_CATS} --remove_unused_columns False --mask_ratio 0.5",
    "image-pretraining/run_mim": f"{_CATS} --model_type swin --remove_unused_columns False --image_size 32"
    " --patch_size 4 --mask_patch_size 8",
    "speech-recognition/run_speech_recognition_ctc": "",
    "audio-classification/run_audio_classification": "",
    "object-detection/run_object_detection": "",
}
_NO_TRAINER = {
    "text-classification/run_glue": f"{_BERT} --task_name mrpc",
    "language-modeling/run_clm": f"--model_name_or_path gpt2 {_TEXT} --block_size 64",
    "language-modeling/run_mlm": f"--model_name_or_path roberta {_TEXT} --max_seq_length 64",
    "language-modeling/run_fim": f"--model_name_or_path gpt2 {_TEXT} --block_size 64",
    "token-classification/run_ner": f"{_BERT} {_CONLL}",
    "question-answering/run_qa": f"{_BERT} {_SQUAD}",
    "question-answering/run_qa_beam_search": f"--model_name_or_path xlnet {_SQUAD}",
    "multiple-choice/run_swag": f"{_BERT} {_SWAG}",
    "summarization/run_summarization": f"{_T5} {_XSUM}",
    "translation/run_translation": f"--model_name_or_path mbart {_WMT} --max_source_length 128",
    "image-classification/run_image_classification": f"--model_name_or_path vit {_CATS} --label_column_name labels",
    "image-pretraining/run_mim": f"{_CATS} --model_type swin --image_size 32 --patch_size 4 --mask_patch_size 8",
}
_TRL_RUN = "--output_dir out --max_steps {steps} --use_cpu --report_to none --bf16 False"
_TRL_RUN += " --per_device_train_batch_size 2 --gradient_accumulation_steps 1"
_TRL = {
    "trl/scripts/sft": "--dataset_name capybara",
    "trl/scripts/sft --packing": "--dataset_name capybara --packing --max_length 64",
    "trl/scripts/dpo": "--dataset_name ultrafeedback",
    "trl/scripts/kto": "--dataset_name kto",
    "trl/scripts/reward": "--dataset_name ultrafeedback",
    "examples/scripts/reward_modeling": "--dataset_name ultrafeedback --use_peft --lora_task_type SEQ_CLS",
    "examples/scripts/orpo": "--dataset_name ultrafeedback",
    "examples/scripts/cpo": "--dataset_name ultrafeedback",
    "examples/scripts/bco": "--dataset_name kto",
    "examples/scripts/grpo_agent": "--num_generations 2",
}
_PEFT = {
    "sequence_classification/peft_no_lora_accelerate": "",
    "olora_finetuning/olora_finetuning": "--base_model llama",
    "waveft_finetuning/waveft_finetuning": "--base_model llama",
    "shira_finetuning/shira_finetuning": "--base_model llama",
    "dora_finetuning/dora_finetuning": "--base_model llama",
    "randlora_finetuning/randlora_finetuning": "--base_model llama",
    "road_finetuning/road_finetuning": "--base_model llama",
    "lily_finetuning/lily_finetuning": "--base_model llama",
}
_BY_FEATURE = {
    **dict.fromkeys(("automatic_gradient_accumulation", "checkpointing", "cross_validation", "ddp_comm_hook"), _GLUE),
    **dict.fromkeys(("early_stopping", "gradient_accumulation", "local_sgd", "memory"), _GLUE),
    **dict.fromkeys(("multi_process_metrics", "profiler", "schedule_free", "tracking"), _GLUE),
    "gradient_accumulation_for_autoregressive_models": "--cpu",
    "fsdp_with_peak_mem_tracking": f"--model_name_or_path bert --output_dir out {_GLUE}",
    "deepspeed_with_config_support": "",
    "megatron_lm_gpt_pretraining": "",
}
_FIT = "--trainer.accelerator cpu --trainer.max_steps {steps} --trainer.limit_val_batches 2"
_FIT += " --trainer.limit_test_batches 2"
_LIGHTNING = {
    "bug_report/bug_report_model": "",
    "basics/autoencoder": _FIT,
    "basics/backbone_image_classifier": _FIT,
    "basics/profiler_example": _FIT,
    "basics/transformer": "",
    "servable_module/production": _FIT,
    "domain_templates/generative_adversarial_net": "",
    "domain_templates/imagenet": f"fit --model.data_path pictures --model.workers 0 --model.batch_size 4 {_FIT}",
    "domain_templates/computer_vision_fine_tuning": "fit --data.dl_path . --data.num_workers 0 --data.batch_size 2"
    f" --model.backbone resnet18 {_FIT}",
    "domain_templates/semantic_segmentation": "--data_path pictures --num_layers 2 --features_start 4",
    "domain_templates/reinforce_learn_Qnet": "",
    "domain_templates/reinforce_learn_ppo": "",
}
_DEMOS = ("BoringModel", "BoringDataModule", "ManualOptimBoringModel", "LightningLSTM", "LightningTransformer")


def examples(folders: argparse.Namespace) -> list[tuple[str, str, Path, list[str]]]:
    """Return for each example its framework, name, file and arguments."""
    found = []

    def add(
        framework: str, folder: Path | None, under: str, table: dict[str, str], more: str = "", end: str = ""
    ) -> None:
        for name, options in table.items() if folder is not None else ():
            path = folder / under / f"{name.split()[0]}{end}.py"
            filled = f"{options} {more}".format(dir=folder, steps=folders.steps).split()
            found.append((framework, f"{name}{end}", path, filled))

    add("transformers", folders.transformers, _HF, _TRANSFORMERS, _TRAINER)
    add("transformers (trl)", folders.trl, "", _TRL, f"--model_name_or_path llama {_TRL_RUN}")
    add("transformers (peft)", folders.peft, "examples", _PEFT)
    plain = dict.fromkeys(("nlp_example", "complete_nlp_example"), _GLUE)
    add("accelerate", folders.accelerate, "examples", plain)
    pictures = dict.fromkeys(("cv_example", "complete_cv_example"), "--cpu --data_dir pictures/pets")
    add("accelerate", folders.accelerate, "examples", pictures)
    add("accelerate", folders.accelerate, "examples/by_feature", _BY_FEATURE)
    add("accelerate (transformers)", folders.transformers, _HF, _NO_TRAINER, _LOOP, end="_no_trainer")
    add("lightning", folders.lightning, "examples/pytorch", _LIGHTNING)
    if folders.lightning is not None:
        found += [("lightning", f"demos.{name}", Path(f"demos.{name}"), []) for name in _DEMOS]
    return [one for one in found if folders.only in f"{one[0]} {one[1]}"]


# --- in the process of one example


class _Enough(BaseException):
    """So many steps were trained with *exact* on."""


class _Verdict:
    """What one example came to."""

    def __init__(self, steps: int) -> None:
        self.steps, self.count, self.is_on = steps, 0, False

    def step(self) -> None:
        self.count += 1
        if self.count >= self.steps and self.is_on:
            raise _Enough


def put_on_transformers(verdict: _Verdict) -> None:
    """Let each Trainer train with ``exact``."""
    import transformers

    from memfit.integrations import huggingface

    train = transformers.Trainer.train

    class Counter(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            verdict.step()

    def exact(self: Any, *args: Any, **options: Any) -> Any:
        if "train" in vars(self):
            return train(self, *args, **options)
        verdict.is_on = True
        huggingface.exact(self)
        self.add_callback(Counter())
        return self.train()

    transformers.Trainer.train = exact


def put_on_accelerate(verdict: _Verdict) -> None:
    """Let each loop train on what ``Exact.loader`` makes, and try its model in the first forward pass."""
    import accelerate
    import torch

    from memfit.integrations.accelerate import Exact
    from memfit.training import check_first_forward

    prepare, step = accelerate.Accelerator.prepare, accelerate.optimizer.AcceleratedOptimizer.step

    def is_shuffled(loader: Any) -> bool:
        inner = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        return any(isinstance(one, torch.utils.data.RandomSampler) for one in inner)

    def exact(self: Any, *parts: Any, **options: Any) -> Any:
        loaders = [one for one in parts if isinstance(one, torch.utils.data.DataLoader)]
        training = [one for one in loaders if is_shuffled(one)] or ([] if verdict.is_on else loaders[:1])
        changed = list(parts)
        for one in training:
            keyed = Exact(self, "checkpoints", seed=1, every=10**6).loader(one)
            changed = [keyed if part is one else part for part in changed]
            verdict.is_on = True
        for one in changed:
            if isinstance(one, torch.nn.Module):
                check_first_forward(one)
        return prepare(self, *changed, **options)

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        made = step(self, *args, **options)
        if self.gradient_state.sync_gradients:
            verdict.step()
        return made

    accelerate.Accelerator.prepare, accelerate.optimizer.AcceleratedOptimizer.step = exact, counted


def put_on_lightning(verdict: _Verdict) -> None:
    """Let each Trainer fit with ``Exact``."""
    import lightning.pytorch

    from memfit.integrations.lightning import Exact

    fit = lightning.pytorch.Trainer.fit

    class Counter(lightning.pytorch.Callback):
        def on_train_batch_end(self, *args: Any, **options: Any) -> None:
            verdict.step()

    def exact(self: Any, model: Any, train: Any = None, val: Any = None, datamodule: Any = None, **options: Any) -> Any:
        train = options.pop("train_dataloaders", train)
        if verdict.is_on:
            return fit(self, model, train, val, datamodule, **options)
        made = Exact("checkpoints", seed=1, every=10**6)
        verdict.is_on = True
        self.callbacks += [made, Counter()]
        if isinstance(train, lightning.pytorch.LightningDataModule) or datamodule is not None:
            data = datamodule or train
            data.prepare_data()
            data.setup("fit")
            train, val = data.train_dataloader(), data.val_dataloader()
        elif train is None:
            model.trainer = self
            model.prepare_data()
            model.setup("fit")
            train = model.train_dataloader()
            val = model.val_dataloader() if "val_dataloader" in vars(type(model)) else None
        return made.fit(self, model, train, options.pop("val_dataloaders", val))

    lightning.pytorch.Trainer.fit = exact


def run_example(framework: str, path: str, steps: int, arguments: list[str]) -> dict[str, Any]:
    """Run one example in this process and folder.

    Returns:
        Its ``verdict`` (``exact``, ``refused`` or ``cannot run``), and ``why``.
    """
    import _example_stand_ins as stand_ins

    verdict, (kind, *_) = _Verdict(steps), framework.split()
    Path("text.txt").write_text("\n".join(stand_ins.sentences(400, 9)))
    stand_ins.without_downloads()
    try:
        {"transformers": put_on_transformers, "accelerate": put_on_accelerate, "lightning": put_on_lightning}[kind](
            verdict
        )
        (stand_ins.without_downloads_of_lightning if kind == "lightning" else stand_ins.without_hub)()
        sys.argv = [path, *arguments]
        sys.path.insert(0, str(Path(path).parent))
        if path.startswith("demos."):
            _fit_demo(path.removeprefix("demos."))
        else:
            runpy.run_path(path, run_name="__main__")
    except _Enough:
        pass
    except UsageError as error:
        return {"verdict": "refused", "why": error.what, "steps": verdict.count}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"verdict": "cannot run", "why": f"{type(error).__name__}: {error}"[:300], "steps": verdict.count}
    if not verdict.is_on or not verdict.count:
        return {"verdict": "cannot run", "why": "it trains no step", "steps": verdict.count}
    return {"verdict": "exact", "why": "", "steps": verdict.count}


def _fit_demo(name: str) -> None:
    """Fit one of the modules that Lightning ships with their own data."""
    import lightning.pytorch
    from lightning.pytorch.demos import boring_classes, lstm, transformer

    kind: type[Any] = next(
        getattr(module, name) for module in (boring_classes, lstm, transformer) if hasattr(module, name)
    )
    trainer = lightning.pytorch.Trainer(max_epochs=1, accelerator="cpu", limit_val_batches=2)
    if issubclass(kind, lightning.pytorch.LightningDataModule):
        lightning.pytorch.Trainer.fit(trainer, boring_classes.BoringModel(), kind())
    else:
        lightning.pytorch.Trainer.fit(trainer, kind())


# --- the process that runs them


def run_one(example: tuple[str, str, Path, list[str]], steps: int) -> dict[str, Any]:
    framework, name, path, arguments = example
    with tempfile.TemporaryDirectory(prefix="memfit-example-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--run", framework, str(path), str(steps), *arguments]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_MINUTES * 60)
            lines = done.stdout.splitlines() or [""]
            said = json.loads(lines[-1]) if lines[-1].startswith("{") else {}
            log = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            said, log = {"verdict": "cannot run", "why": f"not done after {_MINUTES} minutes"}, ""
    said = said or {"verdict": "cannot run", "why": log[-300:]}
    if said["verdict"] == "refused":
        part, why = RIGHT.get(name, ("", ""))
        said["verdict"] = f"refused, right: {why}" if part and part in said["why"] else "refused, false"
    return {"framework": framework, "name": name, "log": log[-8000:], **said}


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        framework, path, steps, *arguments = sys.argv[2:]
        print("\n" + json.dumps(run_example(framework, path, int(steps), arguments)), flush=True)
        os._exit(0)  # some leave threads
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("accelerate", "transformers", "trl", "peft", "lightning"):
        parser.add_argument(f"--{name}", type=lambda path: Path(path).resolve(), metavar="DIR")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        rows = []
        for row in pool.map(lambda one: run_one(one, args.steps), examples(args)):
            rows.append(row)
            print(f"{row['framework']:26} {row['name']:60} {row['verdict']}  {row['why']}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return conclude(rows)


def conclude(rows: list[dict[str, Any]]) -> int:
    """Print the counts of each framework, and return the exit status."""
    print()
    for framework in (*dict.fromkeys(row["framework"] for row in rows), ""):
        verdicts = [row["verdict"] for row in rows if framework in ("", row["framework"])]
        num_run = sum(one != "cannot run" for one in verdicts)
        num_false = verdicts.count("refused, false")
        num_right = sum(one.startswith("refused, right") for one in verdicts)
        share = f"{num_false} of {num_run}"
        print(
            f"{framework or 'all':26} {verdicts.count('exact')} exact, {num_right} refused rightly, "
            f"{share} falsely, {len(verdicts) - num_run} cannot run here"
        )
    return 0 if num_run and num_false <= _MOST * num_run else 1


if __name__ == "__main__":
    sys.exit(main())

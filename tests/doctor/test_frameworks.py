"""The framework that a script trains with, by its imports, and the lines for it."""

import pytest

from memfit.doctor import explain_steps


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from transformers import Trainer, TrainingArguments", "train.py:1 uses transformers."),
        ("import transformers\nt = transformers.Seq2SeqTrainer(model)", "train.py:2 uses transformers."),
        ("from trl import SFTTrainer", "train.py:1 uses transformers."),
        ("import lightning as L", "train.py:1 uses Lightning."),
        ("from pytorch_lightning import Trainer", "train.py:1 uses Lightning."),
        ("from transformers import AutoModel\nfrom accelerate import Accelerator", "train.py:2 uses Accelerate."),
        ("from lib import main", "lib.py:1 uses Lightning."),
        ("from transformers import AutoModel", ""),
        ("from memfit.integrations.lightning import Exact\nimport lightning", ""),
    ],
)
def test_a_framework_is_known_by_what_trains_and_not_told_to_who_uses_memfit(tmp_path, text, told):
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "lib.py").write_text("import lightning")
    said = explain_steps(["python", "train.py"], cwd=tmp_path, env={})
    assert said.startswith(told) and bool(said) == bool(told)
    assert [line.split()[0] for line in said.splitlines()[1:]] == (["watch", "stop", "exact"] if told else [])


def test_doctor_names_it_with_the_lines(diagnose):
    [check] = diagnose("from accelerate import Accelerator\n")["framework"]
    assert check.verdict == "ok" and "Exact(accelerator" in check.finding
    assert "framework" not in diagnose("import torch\n")

"""The framework that a script trains with, by its imports, and the lines for it."""

from pathlib import Path

import pytest

from memfit.doctor import explain_cores, explain_stop

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from transformers import Trainer, TrainingArguments", "train.py:1 uses transformers:"),
        ("import transformers\nt = transformers.Seq2SeqTrainer(model)", "train.py:2 uses transformers:"),
        ("from trl import SFTTrainer", "train.py:1 uses transformers:"),
        ("import lightning as L", "train.py:1 uses Lightning:"),
        ("from pytorch_lightning import Trainer", "train.py:1 uses Lightning:"),
        ("from transformers import AutoModel\nfrom accelerate import Accelerator", "train.py:2 uses Accelerate:"),
        ("from lib import main", "lib.py:1 uses Lightning:"),
        ("from transformers import AutoModel", "docs/your-script.md"),
        ("from memfit.integrations.lightning import Exact\nimport lightning", "docs/your-script.md"),
    ],
)
def test_a_framework_is_known_by_what_trains_and_not_told_to_who_uses_memfit(tmp_path, text, told):
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "lib.py").write_text("import lightning")
    assert explain_stop(["python", "train.py"], cwd=tmp_path, env={}).startswith(told)


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_what_is_told_stands_on_the_page_of_the_framework(name):
    text = f"from {name} import {'Accelerator' if name == 'accelerate' else 'Trainer'}\n"
    page = (ROOT / "docs/frameworks" / f"{name.replace('transformers', 'huggingface')}.md").read_text()
    told = explain_stop(["python", "-c", text], cwd=ROOT, env={})
    form = told.partition(": ")[2].partition(" saves at a stop")[0]
    assert f"| stop | `{form}`" in page


def test_a_script_of_several_jobs_that_asks_for_all_cores_is_named(tmp_path):
    (tmp_path / "train.py").write_text("import lightgbm\nlightgbm.LGBMRegressor(n_jobs=-1)\nfit(n_jobs=2)\n")
    five = explain_cores(["python", "train.py"], 5, cwd=tmp_path, env={})
    assert five.startswith("train.py:2: n_jobs=-1 asks for all cores in each of 5 jobs.")
    assert "write n_jobs=int(os.environ['OMP_NUM_THREADS'])" in five

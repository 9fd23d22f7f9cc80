"""A T5 from a folder as the hub gives it, fine-tuned in full and by adapters: planned, measured, and ROUGE.

    make bench NAME=recipes ARGS="--pairs 800"

A T5 first learns to write recipes from ingredients, and is saved as config.json, model.safetensors and tokenizer.json.
From that folder it learns other recipes in other words.
Exit status 0: no training took more host memory than its bound, and ROUGE rose.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import parser, print_table, told, write_json
from memfit.estimation import estimate_formula
from memfit.memory import read_series
from memfit.pipeline import Output
from memfit.rundir import read_events
from memfit.units import format_bytes
from memfit_workloads.benches import run
from memfit_workloads.recipes.params import LoraParams, RecipesParams, plan_of
from memfit_workloads.recipes.text import make_recipes
from memfit_workloads.recipes.training import BASE_BYTES

CONFIG = Path(__file__).with_name("config.yaml")
OTHER_WORDS = {"chop the": "take and cut", "mix with the": "put it all into", "for ": "during about "}


def evening(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a fine-tune, and return what was planned, measured and reached."""
    path = Path(run(CONFIG, settings | {"runs_dir": folder})["run"])
    judged, trained = (Output(path / f"checkpoints/stage_{name}.json").result for name in ("evaluate", "train"))
    lora = LoraParams.model_validate({key[5:]: value for key, value in settings.items() if key.startswith("lora.")})
    params = RecipesParams(pretrained_model=settings["pretrained_model"], lora=lora)
    parts = estimate_formula(*plan_of(params)[:2])
    epochs = [one for one in read_events(path / "events") if one["kind"] == "epoch"]
    return {
        "trained": trained["num_trained"],
        "optimizer": parts.parts["optimizer"].value,
        "planned": BASE_BYTES + parts.device["allocated_bytes"].upper,
        "measured": max(one.private_bytes for one in read_series(path / "jobs/train/memory.jsonl")),
        "samples_per_second": epochs[-1]["samples_per_second"],
        "before": {name: judged["before"][name] for name in ("rouge1", "rougeL")},
        "after": {name: judged[name] for name in ("rouge1", "rougeL")},
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=800)
    options.add_argument("--epochs", type=int, default=4)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="recipes-") as name:
        folder, ways = Path(name).resolve(), dict[str, dict[str, Any]]()
        model, pairs = str(folder / "t5"), folder / "pairs.jsonl"
        run(CONFIG, {"num_rouge": 0, "model_output": model, "runs_dir": folder})
        make_recipes(pairs, args.pairs, 7)
        text = pairs.read_text()
        for old, new in OTHER_WORDS.items():
            text = text.replace(old, new)
        pairs.write_text(text)
        data = {"source": "files", "path": pairs, "source_field": "ingredients", "target_field": "recipe"}
        given: dict[str, Any] = {f"data.{key}": value for key, value in data.items()}
        given |= {"pretrained_model": model, "epochs": args.epochs, "baseline": True, "gradient_accumulation_steps": 1}
        changes: dict[str, dict[str, Any]] = {
            "all weights": {"learning_rate": 0.001},
            "adapters": {"lora.rank": 16, "lora.modules": ["all-linear"], "learning_rate": 0.003},
        }
        for way, more in changes.items():
            ways[way] = evening(folder, given | more)
    head = ("optimizer", "planned", "measured")
    print_table([("", "weights trained", *head, "ROUGE-L before", "after", "samples/s")] + [
        (way, one["trained"], *(format_bytes(one[key]) for key in head), f"{one['before']['rougeL']:.3f}",
         f"{one['after']['rougeL']:.3f}", f"{one['samples_per_second']:.0f}") for way, one in ways.items()
    ])  # fmt: skip
    write_json(args.json, ways)
    good = []
    for way, one in ways.items():
        good += [told(one["measured"] <= one["planned"], f"{way}: within the plan")]
        good += [told(one["before"]["rougeL"] < one["after"]["rougeL"], f"{way}: ROUGE-L rose")]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

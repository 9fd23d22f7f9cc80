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
from memfit.memory import read_series
from memfit.pipeline import Output
from memfit.units import format_bytes
from memfit_workloads.benches import run
from memfit_workloads.recipes.text import make_recipes
from memfit_workloads.recipes.training import BASE_BYTES

CONFIG = Path(__file__).with_name("config.yaml")
OTHER_WORDS = {"chop the": "take and cut", "mix with the": "put it all into", "for ": "during about "}


def evening(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a fine-tune, and return what was planned, measured and reached."""
    path = Path(run(CONFIG, settings | {"runs_dir": folder})["run"])
    judged, trained = (Output(path / f"checkpoints/stage_{name}.json").result for name in ("evaluate", "train"))
    return {
        "trained": trained["num_trained"],
        "planned": BASE_BYTES + trained["forecast_bytes"],
        "measured": max(one.private_bytes for one in read_series(path / "jobs/train/memory.jsonl")),
        "rouge_before": judged["before"]["rougeL"],
        "rouge": judged["rougeL"],
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
        given: dict[str, Any] = {"data.source": "files", "data.path": pairs, "pretrained_model": model}
        given |= {"epochs": args.epochs, "baseline": True, "gradient_accumulation_steps": 1}
        changes: dict[str, dict[str, Any]] = {
            "all weights": {"learning_rate": 0.001},
            "adapters": {"lora.rank": 16, "lora.modules": ["all-linear"], "learning_rate": 0.003},
        }
        for way, more in changes.items():
            ways[way] = evening(folder, given | more)
    head = ("", "weights trained", "planned", "measured", "ROUGE-L before", "after")
    print_table([head] + [
        (way, one["trained"], format_bytes(one["planned"]), format_bytes(one["measured"]),
         f"{one['rouge_before']:.3f}", f"{one['rouge']:.3f}")
        for way, one in ways.items()
    ])  # fmt: skip
    write_json(args.json, ways)
    good = []
    for way, one in ways.items():
        good += [told(one["measured"] <= one["planned"], f"{way}: within the plan")]
        good += [told(one["rouge_before"] < one["rouge"], f"{way}: ROUGE-L rose")]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

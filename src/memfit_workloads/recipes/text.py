"""From JSON Lines to token ids: recipes are made, rows indexed and judged, a tokenizer trained. Loads no torch."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.data import JsonLines, PackedDataset, Tokenized, pack
from memfit.errors import ConfigError, DataError, MissingExtraError
from memfit.pipeline import Context, fingerprint_files
from memfit.rundir import phase, write_atomic
from memfit_workloads.recipes.params import DataParams, RecipesParams, model_config, unreadable

_BASES = ("flour", "rice", "lentils", "potatoes", "noodles", "beans", "oats", "polenta")
_MORE = ("butter", "eggs", "milk", "onions", "garlic", "carrots", "cheese", "tomatoes", "honey", "lemon", "ginger",
         "spinach", "mushrooms", "almonds", "apples", "basil")  # fmt: skip
_DISHES = {"flour": "cake", "rice": "risotto", "lentils": "stew", "potatoes": "gratin", "noodles": "soup",
           "beans": "salad", "oats": "porridge", "polenta": "pie"}  # fmt: skip
_WAYS = ("bake", "simmer", "fry", "steam")
_MOST_NAMED = 20


def make_recipes(path: Path, num_pairs: int, seed: int) -> None:
    """Write recipes as JSON Lines: what is in the kitchen, and what to do with it, by one grammar."""
    rng = np.random.default_rng(seed)

    def lines() -> Iterator[str]:
        for _ in range(num_pairs):
            base = str(rng.choice(_BASES))
            more = [str(one) for one in rng.choice(_MORE, rng.integers(1, 5), replace=False)]
            way, minutes = _WAYS[len(more) % 4], 10 + 5 * len(more)
            steps = f"chop the {' and the '.join(more)}. mix with the {base}. {way} for {minutes} minutes."
            row = {"ingredients": ", ".join([base, *more]), "recipe": f"{more[0]} {_DISHES[base]}: {steps}"}
            yield json.dumps(row)

    write_atomic(path, "\n".join(lines()) + "\n")


def fingerprint(params: RecipesParams) -> str:
    """Return a digest of the user's own files; what is generated follows from the settings."""
    path, model = params.data.path, params.pretrained_model
    try:
        return fingerprint_files(*filter(None, (path, model)))
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename} is not there.",
            rule="data.path names a JSON Lines file, pretrained_model a folder.",
            remedy="correct the path; it begins at the current folder",
        ) from None


def check(params: RecipesParams) -> None:
    """Refuse packages, files and folders that are not there, before a training of hours needs them.

    Raises:
        UsageError: With the settings to change.
    """
    for package in ("tokenizers", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError.of(package, "recipes", "the recipe fine-tune")
    path, model, output, tiny = params.data.path, params.pretrained_model, params.model_output, params.tiny
    if path is not None and not path.is_file():
        raise ConfigError(
            f"{path} is {'a folder' if path.is_dir() else 'not there'}.",
            rule="data.path names a JSON Lines file; it begins at the current folder.",
            remedy="--set params.data.path=<a file>",
        )
    if model is None and tiny.num_heads > tiny.d_model:
        raise ConfigError(
            f"tiny.num_heads is {tiny.num_heads}, and tiny.d_model {tiny.d_model}.",
            rule="each attention head has at least one number of a token.",
            remedy=f"--set params.tiny.num_heads={tiny.d_model} or fewer",
        )
    if model is not None:
        model_config(params, 0)
        weights = next((one.name for end in ("safetensors", "bin") for one in model.glob(f"*.{end}")), "")
        if weights:
            load_tokenizer(model)
        elif (model / "tokenizer.json").exists():  # a folder without either serves a plan of its memory
            raise unreadable(model, FileNotFoundError("it holds no weights (*.safetensors, *.bin)"))
    above = next((one for one in (output, *output.absolute().parents) if one.exists()), None) if output else None
    if above is not None and not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(
            f"the model cannot be saved in {output}: {above} is {'read-only' if above.is_dir() else 'a file'}.",
            rule="model_output is a folder, made if it is not there, in one that may be written to.",
            remedy="--set params.model_output=<a folder>",
        )


class Pairs(Sequence[Any]):
    """The good rows of a JSON Lines file, as texts ``input_ids`` and ``labels``."""

    def __init__(self, rows: JsonLines, numbers: npt.NDArray[np.int64], settings: DataParams) -> None:
        self.rows, self.numbers = rows, numbers
        self.fields = settings.source_field, settings.target_field

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        row = self.rows[int(self.numbers[index])]
        return {"input_ids": row[self.fields[0]], "labels": row[self.fields[1]]}


def index(context: Context, params: RecipesParams) -> dict[str, Any]:
    """Index the file, look at each row once, and save which rows are good, and why others are not."""
    phase("load")
    settings = params.data
    path = settings.path
    if path is None:
        path = context.dir / "recipes.jsonl"
        make_recipes(path, settings.num_pairs, settings.data_seed)
        context.save("recipes", path)
    rows = JsonLines(path, context.dir / "lines.index")
    good = array("q")
    why, named = Counter[str](), list[dict[str, Any]]()
    for number, line in enumerate(rows.lines()):
        fault = _fault(rows, line, number, settings)
        if not fault:
            good.append(number)
            continue
        why[fault] += 1
        if len(named) < _MOST_NAMED:
            named.append({"row": number, "why": fault})
    num_bad = why["no JSON"] + why["no such fields"]
    if num_bad > settings.most_bad * len(rows) or len(good) < 2:
        raise DataError(
            f"{len(rows) - len(good)} of {len(rows)} rows of {path} are left out: "
            f"{', '.join(f'{count} {one}' for one, count in why.most_common())}; first row {named[0]['row']}.",
            rule=f"a row has the texts {settings.source_field} and {settings.target_field}; at most "
            f"{settings.most_bad:.0%} may be unreadable (params.data.most_bad).",
            remedy="name the fields: params.data.source_field and params.data.target_field",
        )
    order = np.random.default_rng(context.seed).permutation(len(good))
    num_valid = max(1, round(settings.valid_share * len(good)))
    numbers = np.frombuffer(good, np.int64)
    context.save("rows", {"train": numbers[np.sort(order[num_valid:])], "valid": numbers[np.sort(order[:num_valid])]})
    context.save("left_out", named)
    return {
        "path": str(path.relative_to(context.dir)) if path.is_relative_to(context.dir) else str(path.resolve()),
        "num_rows": len(rows),
        "num_train": len(good) - num_valid,
        "num_valid": num_valid,
        "left_out": dict(why),
        "torn_bytes": rows.torn_bytes,
    }


def _fault(rows: JsonLines, line: bytes, number: int, settings: DataParams) -> str:
    """Return why a row is left out; nothing if it is good."""
    try:
        row = rows.parse(line, number)
    except DataError:
        return "no JSON"
    texts = [row.get(name) for name in (settings.source_field, settings.target_field)] if isinstance(row, dict) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        return "no such fields"
    words = str(texts[1]).split()
    if len(words) < settings.min_words:
        return "too short"
    return "repeats itself" if max(Counter(words).values()) > max(1, settings.max_repeats * len(words)) else ""


def pairs_of(context: Context, params: RecipesParams, part: str) -> Pairs:
    """Return the training or validation pairs."""
    output = context["index"]
    rows = JsonLines(output.dir / output.result["path"], output.dir / "lines.index")
    return Pairs(rows, output.arrays("rows")[part], params.data)


def tokenize(context: Context, params: RecipesParams) -> dict[str, Any]:
    """Take the model's tokenizer or train one, and save the token ids of all pairs once for all epochs."""
    phase("build")
    train = pairs_of(context, params, "train")
    tokenizer = load_tokenizer(params.pretrained_model) if params.pretrained_model else train_tokenizer(train, params)
    path = context.dir / "tokenizer.json"
    tokenizer.save(str(path))
    context.save("tokenizer", path)
    counts: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "num_cut": 0}
    for part in ("train", "valid"):
        folder = context.dir / part
        if not folder.exists():
            pack(Tokenized(pairs_of(context, params, part), Encode(tokenizer, params), batched=True,
                           fields={"input_ids": "input_ids", "labels": "labels"}), folder)  # fmt: skip
        ids = PackedDataset.open(folder)
        each = itertools.chain.from_iterable((len(one["input_ids"]), len(one["labels"])) for one in ids)
        lengths = np.fromiter(each, np.int32, 2 * len(ids)).reshape(-1, 2)
        context.save(part, folder)
        context.save(f"{part}_lengths", pa.table({"source": lengths[:, 0], "target": lengths[:, 1]}))
        limits = params.max_source_length, params.max_target_length
        counts |= {f"{part}_tokens": int(lengths.sum()), "num_cut": counts["num_cut"] + int((lengths >= limits).sum())}
    return counts


class Encode:
    """Turns texts into ids by the Rust tokenizer, several at once, cut to the longest that is allowed."""

    def __init__(self, tokenizer: Any, params: RecipesParams) -> None:
        self.tokenizer, self.longest = tokenizer, max(params.max_source_length, params.max_target_length)
        tokenizer.enable_truncation(self.longest)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [one.ids for one in self.tokenizer.encode_batch_fast(texts)]


def train_tokenizer(pairs: Pairs, params: RecipesParams) -> Any:
    """Train a byte-pair tokenizer on the pairs, with T5's special pieces: 0 pads, 1 ends, 2 is unknown."""
    tokenizers = _tokenizers()
    found = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    found.pre_tokenizer, found.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=params.tiny.vocab_size, special_tokens=special, show_progress=False
    )
    found.train_from_iterator((text for pair in pairs for text in pair.values()), trainer)
    found.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return found


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder with a ``tokenizer.json``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json.",
            rule="pretrained_model is a folder with config.json, weights and tokenizer.json.",
            remedy="save it there: AutoTokenizer.from_pretrained(...).save_pretrained(folder); or name another: "
            "--set params.pretrained_model=<a folder>",
        )
    return _tokenizers().Tokenizer.from_file(str(path))


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("tokenizers", "recipes", "the recipe fine-tune") from error
    return tokenizers

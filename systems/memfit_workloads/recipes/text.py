"""From JSON Lines to token ids: recipes are made, rows read and judged, a tokenizer trained. Loads no torch."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.data import PackedDataset, pack
from memfit.errors import ConfigError, DataError, MissingExtraError
from memfit.estimation import estimate_formula
from memfit.files import write_atomic
from memfit.pipeline import Context, fingerprint_files
from memfit.rundir import phase
from memfit_workloads.recipes.params import DataParams, RecipesParams, find_file, model_config, setup_of, unreadable

_BASES = ("flour", "rice", "lentils", "potatoes", "noodles", "beans", "oats", "polenta")
_MORE = ("butter", "eggs", "milk", "onions", "garlic", "carrots", "cheese", "tomatoes", "honey", "lemon", "ginger",
         "spinach", "mushrooms", "almonds", "apples", "basil")  # fmt: skip
_DISHES = {"flour": "cake", "rice": "risotto", "lentils": "stew", "potatoes": "gratin", "noodles": "soup",
           "beans": "salad", "oats": "porridge", "polenta": "pie"}  # fmt: skip
_WAYS = ("bake", "simmer", "fry", "steam")
_MOST_NAMED = 20
_AT_ONCE = 256  # pairs that are tokenised in one call


try:
    import orjson

    _loads: Callable[[bytes], Any] = orjson.loads
except ImportError:
    warnings.warn("orjson is not installed: Python reads the JSON, slower; pip install orjson", stacklevel=2)

    def _refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON number")

    _loads = functools.partial(json.loads, parse_constant=_refuse)


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
    """Return a digest of the user's own files; of a model of the hub, its commit."""
    found, model, commit = [params.data.path], params.pretrained_model, ""  # they are there: `check` was first
    if model is not None and Path(model).is_dir():
        found.append(Path(model))
    elif model is not None:
        commit = find_file(model, "config.json").parent.name
    return fingerprint_files(*filter(None, found)) + commit


def check(params: RecipesParams) -> None:
    """Refuse packages, files and folders that are not there, before a training of hours needs them."""
    wanted = {"tokenizers": True, "transformers": True, "peft": params.lora.rank, "torchmetrics": params.num_rouge}
    for package in (name for name, is_needed in wanted.items() if is_needed):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError.of(package, "recipes", "the recipe fine-tune", "memfit-systems")
    path, model = params.data.path, params.pretrained_model
    if path is not None and not path.is_file():
        raise ConfigError(
            f"{path} is {'a folder' if path.is_dir() else 'not there'}.",
            rule="data.path names a JSON Lines file; it begins at the current folder.",
            remedy="--set params.data.path=<a file>",
        )
    if model is not None:
        shape, folder = model_config(params, 0), Path(model)
        if params.lora.modules:
            estimate_formula(shape, setup_of(params, 1))  # refuses layers that the model has not
        if not folder.is_dir() or any(one for end in ("safetensors", "bin") for one in folder.glob(f"*.{end}")):
            load_tokenizer(model)
        elif (folder / "tokenizer.json").exists():  # a folder without either serves a plan of its memory
            raise unreadable(model, FileNotFoundError("it holds no weights (*.safetensors, *.bin)"))


def read_pair(line: bytes, settings: DataParams) -> dict[str, str] | str:
    """Return a row's two texts, or why it is left out."""
    try:
        row = _loads(line)
    except ValueError:
        return "no JSON"
    fields = {"input_ids": settings.source_field, "labels": settings.target_field}
    pair: dict[str, Any] = {name: row.get(field) for name, field in fields.items()} if isinstance(row, dict) else {}
    if not pair or not all(isinstance(text, str) and text.strip() for text in pair.values()):
        return "no such fields"
    words = pair["labels"].split()
    if len(words) < settings.min_words:
        return "too short"
    if max(Counter(words).values()) > max(1, settings.max_repeats * len(words)):
        return "repeats itself"
    return pair


def rows(path: Path, settings: DataParams) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yield the number of each line of a file that is not empty, and its pair, or why it is left out."""
    with open(path, "rb", buffering=1 << 17) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, read_pair(line, settings)


def judge_rows(path: Path, settings: DataParams) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    """Return the numbers of the lines that are good, and how many are not, why, with the first of them."""
    good, why, named = array("q"), Counter[str](), list[dict[str, Any]]()
    for number, pair in rows(path, settings):
        if isinstance(pair, dict):
            good.append(number)
            continue
        why[pair] += 1
        if len(named) < _MOST_NAMED:
            named.append({"line": number, "why": pair})
    num_rows = len(good) + why.total()
    if why["no JSON"] + why["no such fields"] > settings.most_bad * num_rows or len(good) < 2:
        raise DataError(
            f"{why.total()} of {num_rows} rows of {path} are left out: "
            f"{', '.join(f'{count} {one}' for one, count in why.most_common()) or 'none'}; "
            f"first line {named[0]['line'] if named else 'none'}.",
            rule=f"a row has the texts {settings.source_field} and {settings.target_field}; at most "
            f"{settings.most_bad:.0%} may be unreadable (params.data.most_bad).",
            remedy="name the fields: params.data.source_field and params.data.target_field",
        )
    return np.frombuffer(good, np.int64), {"num_rows": num_rows, "left_out": dict(why), "named": named}


def tokenize(context: Context, params: RecipesParams) -> dict[str, Any]:
    """Judge each row, take the model's tokenizer or train one, and save the ids of all good pairs for all epochs."""
    phase("load")
    settings = params.data
    path = settings.path or context.dir / "recipes.jsonl"
    if settings.path is None:
        make_recipes(path, settings.num_pairs, 0)
        context.save("recipes", path)
    before = fingerprint_files(path)
    good, judged = judge_rows(path, settings)
    order = np.random.default_rng(context.seed).permutation(len(good))
    num_valid = max(1, round(settings.valid_share * len(good)))
    chosen = {"train": np.sort(good[order[num_valid:]]), "valid": np.sort(good[order[:num_valid]])}

    def pairs(part: str) -> Iterator[dict[str, str]]:
        wanted = iter(chosen[part].tolist())
        number = next(wanted, None)
        for line, pair in rows(path, settings):
            if line == number and isinstance(pair, dict):
                number = next(wanted, None)
                yield pair

    phase("build")
    given = params.pretrained_model
    tokenizer = load_tokenizer(given) if given else train_tokenizer(pairs("train"), params)
    tokenizer.save(str(context.dir / "tokenizer.json"))
    context.save("tokenizer", context.dir / "tokenizer.json")
    for part in chosen:
        if not (context.dir / part).exists():
            pack(encode(tokenizer, pairs(part), params), context.dir / part)
        ids = PackedDataset.open(context.dir / part)
        context.save(part, context.dir / part)
        lengths = np.fromiter((max(map(len, one.values())) for one in ids), np.int64, len(ids))
        context.save(f"{part}_lengths", {"longest": lengths})
    if fingerprint_files(path) != before:
        raise DataError(
            f"{path} has changed while it was read.",
            rule="the rows that are tokenised are those that were judged.",
            remedy="let its writer finish, then run again",
        )
    counts = {f"num_{part}": len(numbers) for part, numbers in chosen.items()}
    return {"vocab_size": tokenizer.get_vocab_size(), **counts, **judged}


def encode(
    tokenizer: Any, pairs: Iterator[dict[str, str]], params: RecipesParams
) -> Iterator[dict[str, npt.NDArray[np.int32]]]:
    """Yield the ids of pairs of texts by the Rust tokenizer, many in one call, cut to the longest that is allowed."""
    tokenizer.enable_truncation(max(params.max_source_length, params.max_target_length))
    while chunk := list(itertools.islice(pairs, _AT_ONCE)):
        found = iter(tokenizer.encode_batch_fast([text for pair in chunk for text in pair.values()]))
        for pair in chunk:
            yield {name: np.asarray(next(found).ids, np.int32) for name in pair}


def train_tokenizer(pairs: Iterable[dict[str, str]], params: RecipesParams) -> Any:
    """Train a byte-pair tokenizer on the pairs, with T5's special pieces: 0 pads, 1 ends, 2 is unknown."""
    import tokenizers

    found = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    found.pre_tokenizer, found.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=params.tiny.vocab_size, special_tokens=special, show_progress=False
    )
    found.train_from_iterator((text for pair in pairs for text in pair.values()), trainer)
    found.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return found


def load_tokenizer(model: Path | str) -> Any:
    """Return the tokenizer of a folder with a ``tokenizer.json``, or of a model on the hub."""
    from tokenizers import Tokenizer

    path = find_file(str(model), "tokenizer.json")
    if not path.is_file():
        raise unreadable(str(model), FileNotFoundError("it has no tokenizer.json"))
    return Tokenizer.from_file(str(path))

"""From JSON Lines to token ids: recipes are made, rows read and judged, a tokenizer trained. Loads no torch."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
        shape, folder = model_config(params, 0), Path(model)
        if params.lora.modules:
            estimate_formula(shape, setup_of(params, 1))  # refuses layers that the model has not
        if not folder.is_dir() or any(one for end in ("safetensors", "bin") for one in folder.glob(f"*.{end}")):
            load_tokenizer(model)
        elif (folder / "tokenizer.json").exists():  # a folder without either serves a plan of its memory
            raise unreadable(model, FileNotFoundError("it holds no weights (*.safetensors, *.bin)"))
    above = next((one for one in (output, *output.absolute().parents) if one.exists()), None) if output else None
    if above is not None and not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(
            f"the model cannot be saved in {output}: {above} is {'read-only' if above.is_dir() else 'a file'}.",
            rule="model_output is a folder, made if it is not there, in one that may be written to.",
            remedy="--set params.model_output=<a folder>",
        )


class Lines:
    """The lines of a JSON Lines file, read one by one. Empty lines are no rows; a last line that was cut off is none.

    After a pass, ``torn_bytes`` is the length of a last line that was cut off, and ``digest`` a hash of what was read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.torn_bytes, self.digest = path, 0, ""

    def __iter__(self) -> Iterator[bytes]:
        found = blake2b(digest_size=16)
        try:
            with open(self.path, "rb", buffering=1 << 17) as file:
                for line in file:
                    found.update(line)
                    if not line.endswith(b"\n") and not _is_json(line):
                        self.torn_bytes = len(line)
                    elif line.strip():
                        yield line
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read: {error.strerror}.",
                rule="the pairs are lines of a file.",
                remedy="name a file that can be read: --set params.data.path=<a file>",
            ) from None
        self.digest = found.hexdigest()


@functools.cache
def _parser() -> Callable[[bytes], Any]:
    """Return orjson's parser, or Python's with the same rules."""
    if importlib.util.find_spec("orjson") is not None:
        import orjson

        return orjson.loads
    warnings.warn("orjson is not installed: Python reads the JSON, slower; pip install orjson", stacklevel=2)

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON number")

    return lambda line: json.loads(line.decode(), parse_constant=refuse)


def _is_json(line: bytes) -> bool:
    try:
        _parser()(line)
    except ValueError:
        return False
    return True


def pairs_of(context: Context, params: RecipesParams, part: str) -> Iterator[dict[str, str]]:
    """Yield the training or validation pairs in order, as texts ``input_ids`` and ``labels``."""
    output, settings = context["index"], params.data
    lines = Lines(output.dir / output.result["path"])
    wanted = iter(output.arrays("rows")[part].tolist())
    chosen = next(wanted, None)
    for number, line in enumerate(lines):
        if number == chosen:
            chosen = next(wanted, None)
            try:
                row = _parser()(line)
                pair = {"input_ids": row[settings.source_field], "labels": row[settings.target_field]}
            except (ValueError, KeyError, TypeError):
                raise _changed(lines.path) from None
            yield pair
    if lines.digest != output.result["digest"]:
        raise _changed(lines.path)


def _changed(path: Path) -> DataError:
    return DataError(
        f"{path} has changed since its rows were judged.",
        rule="the rows that are tokenised are those that were judged.",
        remedy="let its writer finish, then run again",
    )


def index(context: Context, params: RecipesParams) -> dict[str, Any]:
    """Look at each row of the file once, and save which rows are good, and why others are not."""
    phase("load")
    settings = params.data
    path = settings.path
    if path is None:
        path = context.dir / "recipes.jsonl"
        make_recipes(path, settings.num_pairs, settings.data_seed)
        context.save("recipes", path)
    lines, num_rows = Lines(path), 0
    good = array("q")
    why, named = Counter[str](), list[dict[str, Any]]()
    for number, line in enumerate(lines):
        num_rows, fault = number + 1, _fault(line, settings)
        if not fault:
            good.append(number)
            continue
        why[fault] += 1
        if len(named) < _MOST_NAMED:
            named.append({"row": number, "why": fault})
    num_bad = why["no JSON"] + why["no such fields"]
    if num_bad > settings.most_bad * num_rows or len(good) < 2:
        raise DataError(
            f"{num_rows - len(good)} of {num_rows} rows of {path} are left out: "
            f"{', '.join(f'{count} {one}' for one, count in why.most_common()) or 'none'}; "
            f"first row {named[0]['row'] if named else 'none'}.",
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
        "num_rows": num_rows,
        "num_train": len(good) - num_valid,
        "num_valid": num_valid,
        "left_out": dict(why),
        "torn_bytes": lines.torn_bytes,
        "digest": lines.digest,
    }


def _fault(line: bytes, settings: DataParams) -> str:
    """Return why a row is left out; nothing if it is good."""
    try:
        row = _parser()(line)
    except ValueError:
        return "no JSON"
    texts = [row.get(name) for name in (settings.source_field, settings.target_field)] if isinstance(row, dict) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        return "no such fields"
    words = str(texts[1]).split()
    if len(words) < settings.min_words:
        return "too short"
    return "repeats itself" if max(Counter(words).values()) > max(1, settings.max_repeats * len(words)) else ""


def tokenize(context: Context, params: RecipesParams) -> dict[str, Any]:
    """Take the model's tokenizer or train one, and save the token ids of all pairs once for all epochs."""
    phase("build")
    if params.pretrained_model:
        tokenizer = load_tokenizer(params.pretrained_model)
    else:
        tokenizer = train_tokenizer(pairs_of(context, params, "train"), params)
    path = context.dir / "tokenizer.json"
    tokenizer.save(str(path))
    context.save("tokenizer", path)
    counts: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "num_cut": 0}
    for part in ("train", "valid"):
        folder = context.dir / part
        if not folder.exists():
            encode, pairs = Encode(tokenizer, params), pairs_of(context, params, part)
            chunks = iter(lambda pairs=pairs: list(itertools.islice(pairs, _AT_ONCE)), [])  # type: ignore[misc]
            pack(itertools.chain.from_iterable(map(encode, chunks)), folder)
        ids = PackedDataset.open(folder)
        each = itertools.chain.from_iterable((len(one["input_ids"]), len(one["labels"])) for one in ids)
        lengths = np.fromiter(each, np.int32, 2 * len(ids)).reshape(-1, 2)
        context.save(part, folder)
        context.save(f"{part}_lengths", pa.table({"source": lengths[:, 0], "target": lengths[:, 1]}))
        limits = params.max_source_length, params.max_target_length
        counts |= {f"{part}_tokens": int(lengths.sum()), "num_cut": counts["num_cut"] + int((lengths >= limits).sum())}
    return counts


class Encode:
    """Turns pairs of texts into pairs of ids by the Rust tokenizer, cut to the longest that is allowed."""

    def __init__(self, tokenizer: Any, params: RecipesParams) -> None:
        self.tokenizer, self.longest = tokenizer, max(params.max_source_length, params.max_target_length)
        tokenizer.enable_truncation(self.longest)

    def __call__(self, pairs: list[dict[str, str]]) -> list[dict[str, npt.NDArray[np.int32]]]:
        """Return the ids of several pairs, all texts in one call."""
        found = iter(self.tokenizer.encode_batch_fast([text for pair in pairs for text in pair.values()]))
        return [{name: np.asarray(next(found).ids, np.int32) for name in pair} for pair in pairs]


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
        raise DataError(
            f"{model} has no tokenizer.json.",
            rule="pretrained_model is a folder with config.json, weights and tokenizer.json.",
            remedy="save it there: AutoTokenizer.from_pretrained(...).save_pretrained(folder); or name another: "
            "--set params.pretrained_model=<a folder>",
        )
    return Tokenizer.from_file(str(path))

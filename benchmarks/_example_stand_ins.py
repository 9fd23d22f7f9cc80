# mypy: ignore-errors
# It puts stand-ins in place of the functions of others.
"""Stand-ins for what public example scripts download: tokenizers, weights, data sets, metrics and pictures.

The loops, collators, samplers and callbacks of the examples stay theirs.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

#: Each field of a configuration that makes a model small.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "encoder_hidden_size"), 16),
    **dict.fromkeys(("decoder_hidden_size",), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 32),
    **dict.fromkeys(("decoder_intermediate_size", "ffn_dim"), 32),
    **dict.fromkeys(("d_kv", "head_dim", "d_head"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 640),
    "vocab_size": 1000,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}
KINDS = ("distilbert", "xlm-roberta", "roberta", "albert", "electra", "bert", "gpt2", "t5", "mbart", "bart", "xlnet")
KINDS = (*KINDS, "marian", "opt", "llama", "qwen2", "qwen3", "vit_mae", "swin", "vit")
WORDS = [
    "the",
    "a",
    "model",
    "data",
    "loss",
    "step",
    "batch",
    "seed",
    "order",
    "key",
    "draws",
    "trains",
    "stops",
    "saves",
    "resumes",
    "same",
    "bytes",
]


def sentences(count: int, seed: int, words: int = 12) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(words // 2, words))) for _ in range(count)]


def tokenizer(*args: Any, **options: Any) -> Any:
    """Return a small tokenizer with the special tokens of BERT and a chat template."""
    import tokenizers
    import transformers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = tokenizers.decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "en_XX", "ro_RO"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator(sentences(50, 0), trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": 4, "bos": 1, "eos": 2}
    kept = {name: options[name] for name in ("padding_side", "truncation_side", "model_max_length") if name in options}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        **{f"{name}_token": special[number] for name, number in names.items()},
        **{"model_max_length": 512, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"], **kept},
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' }}{% generation %}{{ m['content'] + eos_token }}"
        "{% endgeneration %}{% endfor %}"
    )
    return made


def configuration(name: Any, **options: Any) -> Any:
    """Return a small configuration of the model that a name says, BERT where it says none."""
    import transformers

    lower = str(name).lower().replace("smollm", "llama")
    kind = next((one for one in KINDS if one.replace("_", "-") in lower or one in lower), "bert")
    made = small(transformers.CONFIG_MAPPING[kind], options)
    made.architectures = [transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)]
    return made


def small(cls: Any, options: Any) -> Any:
    fields = {*cls().to_dict(), *getattr(cls, "attribute_map", {})}
    kept = {key: value for key, value in options.items() if key in {*fields, "num_labels", "return_dict"}}
    sizes = {key: value for key, value in SIZES.items() if key in fields}
    if "swin" in cls.model_type:
        sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}
        sizes |= {"window_size": 2, "encoder_stride": 8}
    made = cls(**{**sizes, **{key: value for key, value in kept.items() if value is not None}})
    if made.is_encoder_decoder:
        made.decoder_start_token_id = 1
    return made


def is_saved(name: Any) -> bool:
    """Return whether a name is a folder; a model that was made from a configuration has none."""
    return bool(name) and Path(name).is_dir()


def without_hub() -> None:
    """Put the stand-ins in place of what transformers, datasets and evaluate download."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(Path("cache").resolve()), "WANDB_MODE": "disabled"}
    import datasets
    import evaluate
    import transformers
    from transformers.models.auto import auto_factory

    real_model, real_data = transformers.PreTrainedModel.from_pretrained.__func__, datasets.load_dataset
    real_tokenizer = transformers.AutoTokenizer.from_pretrained

    def auto(cls: Any, name: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        if "CausalLM" in cls.__name__ and config is None and not any(one in str(name).lower() for one in KINDS):
            name = "llama"
        return cls.from_config(configuration(name, **options) if config is None else config)

    def model(cls: Any, name: Any = None, *args: Any, config: Any = None, **options: Any) -> Any:
        if name is None or is_saved(name):
            return real_model(cls, name, *args, config=config, **options)
        return cls(small(cls.config_class, options) if config is None else config)

    def either(name: Any, *args: Any, **options: Any) -> Any:
        return (real_tokenizer if is_saved(name) else tokenizer)(name, *args, **options)

    classes = [auto_factory._BaseAutoModelClass]
    for cls in classes:
        cls.from_pretrained = classmethod(auto)
        classes.extend(cls.__subclasses__())
    transformers.PreTrainedModel.from_pretrained = classmethod(model)
    transformers.PretrainedConfig.from_pretrained = classmethod(lambda cls, name, **options: small(cls, options))
    transformers.AutoConfig.from_pretrained = configuration
    transformers.AutoTokenizer.from_pretrained = transformers.AutoProcessor.from_pretrained = either
    for cls in (transformers.XLNetTokenizerFast, transformers.LlamaTokenizer):
        cls.from_pretrained = either
    transformers.AutoImageProcessor.from_pretrained = lambda *args, **options: transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}
    )
    transformers.GenerationConfig.from_pretrained = lambda *args, **options: transformers.GenerationConfig()
    datasets.load_dataset = lambda path, name=None, **options: (
        real_data(path, **{key: options[key] for key in ("data_files", "field", "split") if key in options})
        if options.get("data_files")
        else table(f"{path} {name}", options.get("split"))
    )
    evaluate.load = Metric


class Metric:
    """Takes what a metric takes, and says 0.5 of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.add_batch(*args, **options)

    def add_batch(self, *args: Any, **options: Any) -> None:
        pass

    add = add_batch

    def compute(self, *args: Any, **options: Any) -> dict[str, float]:
        names = ("accuracy", "f1", "exact_match", "score", "rouge1", "rougeL", "mean_iou", "overall_accuracy")
        seqeval = ("overall_precision", "overall_recall", "overall_f1", "exact", "mean_accuracy")
        return dict.fromkeys((*names, *seqeval), 0.5)


def table(name: str, split: str | None) -> Any:
    """Return the splits of a small data set with the columns of the one that is named, or one of them."""
    import datasets

    name = name.lower()
    made = datasets.DatasetDict()
    for number, (one, count) in enumerate({"train": 640, "validation": 16, "test": 16}.items()):
        features = None
        one_of, other, third = (sentences(count, 10 * number + more) for more in range(3))
        asked = [[{"role": "user", "content": text}] for text in one_of]
        told, worse = ([[{"role": "assistant", "content": text}] for text in texts] for texts in (other, third))
        label = [index % 2 for index in range(count)]
        if any(part in name for part in ("image", "cats", "cifar", "beans", "food", "picture")):
            pictures = [datasets.Image().encode_example(picture(index, 32, "RGB")) for index in range(count)]
            columns: dict[str, Any] = {"image": pictures, "labels": label}
            features = datasets.Features(image=datasets.Image(), labels=datasets.ClassLabel(names=["cat", "dog"]))
        elif "xnli" in name:
            columns = {"premise": one_of, "hypothesis": other, "label": [index % 3 for index in range(count)]}
            features = {"label": datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])}
        elif "glue" in name or "mrpc" in name:
            columns = {"sentence1": one_of, "sentence2": other, "label": label, "idx": [*range(count)]}
            features = {"label": datasets.ClassLabel(names=["not_equivalent", "equivalent"])}
        elif "ultrafeedback" in name or "preference" in name:
            pairs = [[[*a, *b] for a, b in zip(asked, texts, strict=True)] for texts in (told, worse)]
            columns = {"chosen": pairs[0], "rejected": pairs[1]}
        elif "kto" in name:
            columns = {"prompt": asked, "completion": told, "label": [index % 2 == 0 for index in range(count)]}
        elif "prm" in name or "shepherd" in name:
            columns = {"prompt": one_of, "completions": [*map(list, zip(other, third, strict=True))]}
            columns["labels"] = [[True, False]] * count
        elif "capybara" in name or "messages" in name:
            columns = {"messages": [[*a, *b] for a, b in zip(asked, told, strict=True)]}
        elif "alpaca" in name or "instruction" in name:
            columns = {"instruction": one_of, "input": other, "output": third}
        else:
            columns = {"text": one_of, "label": label}
            features = {"label": datasets.ClassLabel(names=["no", "yes"])}
        made[one] = datasets.Dataset.from_dict(
            columns, features=features if len(features or ()) == len(columns) else None
        )
        for column, kind in (features or {}).items():
            made[one] = made[one].cast_column(column, kind)
    return made if split is None else made[split.split("[")[0]]


def picture(index: int, size: int, mode: str) -> Any:
    from PIL import Image

    drawn = torch.randint(256, (size, size, len(mode)), generator=torch.Generator().manual_seed(index % 64))
    return Image.fromarray(drawn.to(torch.uint8).numpy().squeeze(), mode)


class Pictures(torch.utils.data.Dataset):
    """As many pictures as MNIST has, of MNIST's size or another."""

    size, mode = 28, "L"

    def __init__(self, root: Any = ".", train: Any = True, transform: Any = None, *args: Any, **options: Any) -> None:
        self.count, self.transform = 60000 if train else 10000, transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        made = picture(index, self.size, self.mode)
        return made if self.transform is None else self.transform(made), index % 10


class ColorPictures(Pictures):
    size, mode = 32, "RGB"

    def __len__(self) -> int:
        return 200


def without_downloads() -> None:
    """Put the stand-ins in place of what torchvision and Lightning's demos download."""
    operators = torch.library.Library("torchvision", "DEF")  # those of its wheel need CUDA
    sys.modules[__name__].__dict__["_operators"] = operators
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import torchvision
    except ImportError:
        return
    torchvision.datasets.MNIST = Pictures
    torchvision.datasets.CIFAR10 = ColorPictures
    torchvision.datasets.utils.download_and_extract_archive = lambda *args, **options: None
    train, val = ("pictures", "cats_and_dogs_filtered"), ("val", "validation")
    folders = [f"{root}/{split}/{kind}" for root in train for split in ("train", *val) for kind in ("cats", "dogs")]
    for folder in (*folders, "pictures/pets", "pictures/training/image_2", "pictures/training/semantic"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for index in range(24):
            end = "png" if "training" in folder else "jpg"
            picture(index, 48, "RGB").save(f"{folder}/{('beagle', 'pug')[index % 2]}_{index}.{end}")
    try:
        import timm
    except ImportError:
        return
    real = timm.create_model
    timm.create_model = lambda name, pretrained=False, **options: real("resnet18d", **options)


def without_downloads_of_lightning() -> None:
    import lightning.pytorch.demos as demos
    from lightning.pytorch.demos import lstm, mnist_datamodule, transformer
    from lightning.pytorch.utilities import model_helpers

    mnist_datamodule.MNIST = Pictures

    class Text(torch.utils.data.Dataset):
        vocab_size = 100

        def __init__(self, *args: Any, **options: Any) -> None:
            self.data = torch.randint(100, (6000 * 35,), generator=torch.Generator().manual_seed(0))

        def __len__(self) -> int:
            return 5999

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.data[index * 35 : index * 35 + 35], self.data[index * 35 + 1 : index * 35 + 36]

    demos.WikiText2 = transformer.WikiText2 = lstm.WikiText2 = Text
    real = model_helpers.get_torchvision_model
    model_helpers.get_torchvision_model = lambda name, **options: real(name, **{**options, "weights": None})

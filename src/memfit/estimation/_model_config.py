"""A model's ``config.json``, by the several names that its entries have. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import ConfigError

_LARGEST = 1 << 40  # beyond any width, count or vocabulary
#: The entries that describe what sees or hears beside the language model.
TOWERS = ("vision_config", "audio_config")


class ModelConfig:
    """A config by the several names that its entries have."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config")
        self.entries: dict[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else dict(config)

    def get(self, *names: str, default: Any = None) -> Any:
        return next((self.entries[name] for name in names if self.entries.get(name) is not None), default)

    def size(self, *names: str, default: int | None = None, least: int = 0) -> int:
        found = self.get(*names, default=default)
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= _LARGEST:
            raise self._error(names, found, f"a whole number from {least} up")
        return found

    def text(self, *names: str, default: str) -> str:
        found = self.get(*names, default=default)
        if not isinstance(found, str):
            raise self._error(names, found, "a name")
        return found

    def drops(self, *names: str, default: float = 0.0) -> bool:
        found = self.get(*names, default=default)
        if not isinstance(found, int | float):
            raise self._error(names, found, "a number")
        return found > 0

    def _error(self, names: tuple[str, ...], found: Any, wanted: str) -> ConfigError:
        named = next((name for name in names if self.entries.get(name) is not None), names[0])
        return ConfigError(
            f"the model's config has {named} = {_shortened(found)}.",
            rule=f"the formula reads {wanted} from {' or '.join(names)}.",
            remedy="give the config.json of the model's own page, or one saved by config.save_pretrained",
        )

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", "n_embd", "d_model", "dim", least=1)

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", least=1)

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", least=1)

    @property
    def head_dim(self) -> int:
        return self.split_width if self.get("head_dim") is None else self.size("head_dim", least=1)

    @property
    def split_width(self) -> int:
        """The width of the hidden states over the heads.

        Raises:
            ConfigError: They do not divide it.
        """
        width, heads = self.hidden, self.heads
        if width % heads:
            raise ConfigError(
                f"the model's config has a width of {width} and {heads} heads.",
                rule="without a head_dim the heads divide the width of the hidden states.",
                remedy="correct hidden_size or num_attention_heads in the config, or write head_dim",
            )
        return width // heads

    @property
    def inner(self) -> int:
        names = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "hidden_dim", "d_ff", "encoder_ffn_dim")
        return self.size(*names, default=4 * self.hidden)


def _shortened(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value > _LARGEST:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def count_tower(config: Any) -> int:
    """The parameters of the blocks of a vision or audio tower: attention and an MLP each, without the small ones.

    >>> count_tower({"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096})
    301989888
    """
    if not isinstance(config, Mapping):
        return 0
    read = ModelConfig(config)
    width = read.size("hidden_size", "d_model", "embed_dim", "width", default=1024)
    layers = read.size("num_hidden_layers", "encoder_layers", "depth", "num_layers", "layers", default=24)
    inner = read.size("intermediate_size", "encoder_ffn_dim", default=4 * width)
    return layers * (4 * width * width + 2 * width * inner)


def check_names(config: Mapping[str, Any]) -> None:
    """Refuse a config whose model's type or classes are no names.

    Raises:
        ConfigError: They are none.
    """
    kind, names = config.get("model_type"), config.get("architectures")
    if kind is not None and not isinstance(kind, str):
        wrong, rule, remedy = f"model_type = {_shortened(kind)}", "model_type is one name", '"model_type": "llama"'
    elif names is not None and not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        wrong, rule = f"architectures = {_shortened(names)}", "architectures is a list of names of classes"
        remedy = '"architectures": ["LlamaForCausalLM"]'
    else:
        return
    raise ConfigError(
        f"the model's config has {wrong}.", rule=f"{rule}.", remedy=f"write for example {remedy}, or leave it out"
    )

"""What tensor parallelism leaves on one rank: Megatron's split of attention, MLP, embedding and head.

Source: Shoeybi et al. (2019), Megatron-LM, section 3: columns of the first linear layers of attention and MLP, rows of
the last; rows of the embedding and the head (vocabulary). Its sums over ranks are made in place and take no memory.
"""

from __future__ import annotations

import copy
import dataclasses
import re

import torch
from torch import nn

from memfit.errors import ConfigError
from memfit.estimation._data_parallel import swap_optimized
from memfit.estimation._program import Program, find_blocks
from memfit.estimation._setup import Setup
from memfit.estimation._trace import part

#: Layers whose results are shared out, by the end of their names: llama's, T5's, GPT-2's, NeoX', OPT's, BERT's, Meta's.
_COLUMNS = re.compile(
    r"(^|\.)(q|k|v|q_proj|k_proj|v_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|wi|wi_0|wi_1|c_attn|c_fc|query_key_value"
    r"|dense_h_to_4h|fc1|fc_in|intermediate\.dense|query|key|value|wq|wk|wv|w1|w3)$"
)
#: Layers whose inputs are shared out.
_ROWS = re.compile(
    r"(^|\.)(o|o_proj|out_proj|down_proj|wo|c_proj|dense_4h_to_h|fc2|fc_out|w2|output\.dense"
    r"|(attention|self_attention)\.dense)$"
)
#: Attributes of attention layers that count heads or their features on one rank.
_COUNTS = ("n_heads", "num_heads", "inner_dim", "split_size", "num_attention_heads", "all_head_size")
_KEYS_AND_VALUES = re.compile(r"(^|\.)(k|v|k_proj|v_proj|wk|wv)$")


def shard_tensors(program: Program, setup: Setup) -> Program:
    """The program of one rank of tensor parallelism; norms and biases of rows are whole on every rank.

    The loss is taken on the rank's part of the vocabulary, as a vocabulary-parallel cross-entropy does.

    Raises:
        ConfigError: The base weights are quantised, or no layer has a name that is known.
    """
    if setup.quantization != "none":
        raise ConfigError(
            f"Quantisation {setup.quantization!r} and tensor parallelism are set together.",
            rule="The blocks of a quantised weight do not split by rows and columns.",
            remedy="set strategy to 'fsdp', or quantization to 'none'",
        )
    splitter = _Splitter(program, setup)
    splitter.split_layers()
    if not splitter.num_layers:
        raise ConfigError(
            "No layer of this model has a name that tensor parallelism knows.",
            rule="Layers of attention and MLP are known by the names that transformers gives them.",
            remedy="set strategy to 'fsdp', or build the model of one rank yourself",
        )
    splitter.split_vocabulary()
    swap_optimized(program, {id(old): new for old, new in splitter.split.items()}, setup)
    note = f"tensor parallel: {splitter.num_layers} layers, the embedding and the head over {setup.world_size} ranks"
    return dataclasses.replace(program, notes=(*program.notes, note))


class _Splitter:
    def __init__(self, program: Program, setup: Setup) -> None:
        self.model = program.model
        self.world_size = setup.world_size
        self.split: dict[nn.Parameter, nn.Parameter] = {}
        self.made: set[int] = set()
        self.num_layers = 0

    def split_layers(self) -> None:
        """Splits the layers of all blocks, and counts heads anew."""
        counted: set[nn.Module] = set()
        for block in find_blocks(self.model):
            for name, module in list(block.named_modules()):
                kind, lora = self._find_kind(name, module)
                if kind is None:
                    continue
                self.num_layers += not lora
                self._split_layer(module, kind, self._find_unit(block, name))
                owner = block.get_submodule(name.rpartition(".")[0])
                if not lora and owner not in counted and not re.search(r"(mlp|feed_forward|ffn|DenseReluDense)", name):
                    counted.add(owner)
                    self._count_heads(owner)

    def split_vocabulary(self) -> None:
        """Splits the embedding of tokens and the head by rows."""
        blocks = set(find_blocks(self.model))
        inside = {module for block in blocks for module in block.modules()}
        outside = [module for module in self.model.modules() if module not in inside]
        embeddings = [module for module in outside if isinstance(module, nn.Embedding)]
        size = max((module.num_embeddings for module in embeddings), default=0)
        for module in outside:
            if isinstance(module, nn.Embedding) and module.num_embeddings == size:
                self._replace(module, "weight", 0)
                module.num_embeddings = module.weight.shape[0]
                if module.padding_idx is not None and module.padding_idx >= module.num_embeddings:
                    module.padding_idx = None
            elif isinstance(module, nn.Linear) and module.out_features == size:
                self._split_layer(module, "columns", 1)
        config = getattr(self.model, "config", None)
        if getattr(config, "vocab_size", None) == size:
            local = copy.copy(config)
            local.vocab_size = self._share(size)  # type: ignore[union-attr]
            self.model.config = local  # type: ignore[assignment]

    def _find_kind(self, name: str, module: nn.Module) -> tuple[str | None, bool]:
        """How a layer is split, and whether it is an adapter."""
        if isinstance(module, nn.Embedding) and name.endswith("relative_attention_bias"):
            return "heads", False
        if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
            return None, False
        base, _, adapter = name.rpartition(".") if name.endswith(("lora_A", "lora_B")) else (name, "", "")
        base = base.removesuffix(".base_layer")
        kind = "columns" if _COLUMNS.search(base) else "rows" if _ROWS.search(base) else None
        if adapter and kind != {"lora_A": "rows", "lora_B": "columns"}[adapter]:
            return None, True
        return kind, bool(adapter)

    def _find_unit(self, block: nn.Module, name: str) -> int:
        """Features that stay together: a head's, where keys and values have fewer heads than there are ranks."""
        name = re.sub(r"\.(base_layer|lora_A|lora_B)$", "", name)
        if not _KEYS_AND_VALUES.search(name):
            return 1
        return int(getattr(block.get_submodule(name.rpartition(".")[0]), "head_dim", 1))

    def _split_layer(self, module: nn.Module, kind: str, unit: int) -> None:
        is_conv = type(module).__name__ == "Conv1D"  # its weight is the transpose of a linear layer's
        if kind == "heads":
            self._replace(module, "weight", 1)
            module.embedding_dim = module._parameters["weight"].shape[1]  # type: ignore[assignment, union-attr]
            return
        dim = int(is_conv) if kind == "columns" else 1 - int(is_conv)
        self._replace(module, "weight", dim, unit)
        if kind == "columns":
            self._replace(module, "bias", 0, unit)
        sizes = module._parameters["weight"].shape  # type: ignore[union-attr]
        if is_conv:
            module.nf = sizes[1]  # type: ignore[assignment]
        else:
            module.out_features, module.in_features = sizes  # type: ignore[assignment]

    def _replace(self, module: nn.Module, name: str, dim: int, unit: int = 1) -> None:
        old = module._parameters.get(name)
        if old is None or id(old) in self.made:
            return
        if old not in self.split:
            shape = list(old.shape)
            shape[dim] = self._share(shape[dim] // unit) * unit
            with part("weights"):
                self.split[old] = nn.Parameter(torch.empty(shape, dtype=old.dtype), requires_grad=old.requires_grad)
            self.made.add(id(self.split[old]))
        module._parameters[name] = self.split[old]

    def _share(self, count: int) -> int:
        return -(-count // self.world_size)

    def _count_heads(self, owner: nn.Module) -> None:
        for name in _COUNTS:
            count = getattr(owner, name, None)
            if isinstance(count, int):
                setattr(owner, name, self._share(count))
        config = getattr(owner, "config", None)
        keys = getattr(config, "num_key_value_heads", None)
        if isinstance(keys, int) and isinstance(getattr(owner, "num_key_value_groups", None), int):
            queries = self._share(config.num_attention_heads)  # type: ignore[union-attr]
            owner.num_key_value_groups = max(1, queries // self._share(keys))  # type: ignore[assignment]

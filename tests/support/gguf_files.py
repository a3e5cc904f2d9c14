"""Tiny models, and GGUF files of them written by llama.cpp's rules (not by this package)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from mlx.utils import tree_flatten
from tokenizers.pre_tokenizers import ByteLevel

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 3
HEAD_DIM = {"llama": 8, "qwen2": 8, "qwen3": 16, "gemma3": 16}
THETA = {"llama": 5e5, "qwen2": 1e6, "qwen3": 1e6, "gemma3": 1e6}

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "<unused>")
TOKENS = (*SPECIAL, *sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe")
MERGES = ("Ġ t", "h e", "Ġt he")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass
class Tiny:
    """A tiny mlx-lm model of one family, with random weights in float32."""

    family: str
    tied: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        module = import_module(f"mlx_lm.models.{self.module}")
        self.model = module.Model(module.ModelArgs.from_dict(self.config))
        if self.family == "gemma3" and self.tied:
            self.model.sanitize({})
        random = np.random.default_rng(self.seed)
        shapes = [(k, v.shape) for k, v in tree_flatten(self.model.parameters())]
        # Multiples of 1/256, so that adding and subtracting one is exact.
        self.weights = {
            k: (random.integers(-60, 60, shape) / 256).astype(np.float32) for k, shape in shapes
        }
        self.model.load_weights([(k, mx.array(v)) for k, v in self.weights.items()])

    @property
    def module(self) -> str:
        return "gemma3_text" if self.family == "gemma3" else self.family

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": self.module,
            "vocab_size": len(TOKENS),
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM[self.family],
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": THETA[self.family],
            "tie_word_embeddings": self.tied,
            **(
                {
                    "sliding_window": 4,
                    "sliding_window_pattern": 3,
                    "query_pre_attn_scalar": HEAD_DIM["gemma3"],
                }
                if self.family == "gemma3"
                else {}
            ),
            **self.options,
        }

    def logits(self, ids: list[int]) -> np.ndarray:
        return np.array(self.model(mx.array([ids])))


def stored(tiny: Tiny) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names, changed as its converter changes them."""
    return {
        gguf_name(tiny.family, name): _stored_values(tiny, name, values.copy())
        for name, values in tiny.weights.items()
    }


def gguf_name(family: str, name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    names = {**_LAYER_NAMES, **(_GEMMA_NAMES if family == "gemma3" else {})}
    return f"blk.{layer}.{names[stem]}.{kind}"


def _stored_values(tiny: Tiny, name: str, values: np.ndarray) -> np.ndarray:
    if tiny.family == "gemma3" and "norm" in name:
        return values + np.float32(1)
    if tiny.family == "llama" and ".q_proj." in name:
        return permuted(values, HEADS)
    if tiny.family == "llama" and ".k_proj." in name:
        return permuted(values, KV_HEADS)
    return values


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half goes to 2i, row i of its second half to 2i + 1."""
    out = np.empty_like(values)
    size = len(values) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = values[head * size + i]
            out[head * size + 2 * i + 1] = values[head * size + size // 2 + i]
    return out


def write(
    path: Path,
    tiny: Tiny,
    tensors: dict[str, np.ndarray] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Callable[[GGUFWriter], None] | None = None,
    tokenizer: Callable[[GGUFWriter], None] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write `tiny` to `path`; matrices become `kind`, vectors stay F32."""
    writer = GGUFWriter(path, architecture or tiny.family)
    model_metadata(writer, tiny)
    (tokenizer or byte_tokenizer)(writer)
    if edit is not None:
        edit(writer)
    for name, values in (stored(tiny) if tensors is None else tensors).items():
        if values.ndim < 2 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_metadata(writer: GGUFWriter, tiny: Tiny) -> None:
    """The facts of the model, under llama.cpp's keys."""
    config = tiny.config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if tiny.family in ("qwen3", "gemma3"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if tiny.family == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        pattern = config["sliding_window_pattern"]
        writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)


def byte_tokenizer(writer: GGUFWriter, pre: str | None = "smollm") -> None:
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

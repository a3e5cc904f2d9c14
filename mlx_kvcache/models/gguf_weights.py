"""A GGUF file's tensors as the weights of a Hugging Face model.

llama.cpp's converter renames every tensor and changes the numbers of two kinds: it interleaves
the rows of Llama's query and key projections for its own rotary layout, and it stores Gemma's
norm weights plus one. Both are undone here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_kvcache.errors import ModelFormatError, UnsupportedModelError
from mlx_kvcache.models.gguf_file import GGUFFile
from mlx_kvcache.models.gguf_rope import FREQUENCY_FACTORS

#: The numbers of a weight, or the words, scales and biases of a packed one, row by row.
Values = npt.NDArray[Any]
Restore = Callable[[Values], Values]


@dataclass(frozen=True)
class Parameter:
    """One weight of the model: its names here and in the file, its shape, how it is restored."""

    target: str
    source: str
    shape: tuple[int, ...]
    restore: Restore

    def read(self, file: GGUFFile) -> npt.NDArray[np.float32]:
        """The weight as float32, shaped `shape`, as the original checkpoint has it."""
        return self.restore(file.tensors[self.source].dequantize())


def parameters(file: GGUFFile, config: dict[str, Any]) -> list[Parameter]:
    """Every weight of the model that `config` describes, after checking them all.

    Raises ModelFormatError naming the tensors that are missing or of the wrong shape,
    UnsupportedModelError naming those that the architecture does not have.
    """
    wanted = [*_outer(config), *_all_layers(config)]
    name = file.path.name
    if missing := [p.source for p in wanted if p.source not in file.tensors]:
        raise ModelFormatError(f"{name}: {_some(missing)} missing from the file")
    for parameter in wanted:
        shape = file.tensors[parameter.source].shape
        if shape != parameter.shape:
            raise ModelFormatError(
                f"{name}: tensor {parameter.source!r} is {shape}, the metadata asks for "
                f"{parameter.shape}"
            )
    known = {p.source for p in wanted} | {FREQUENCY_FACTORS}
    if unknown := sorted(set(file.tensors) - known):
        raise UnsupportedModelError(
            f"{name}: {_some(unknown)} not part of a {config['model_type']} model"
        )
    return wanted


def unpermute(heads: int) -> Restore:
    """Undo the rotary row order of a projection of `heads` heads.

    The file keeps, in each head, the two halves' rows alternating (0, d/2, 1, d/2 + 1, ...).
    """

    def restore(values: Values) -> Values:
        rows = values.shape[0]
        paired = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
        return np.reshape(paired.swapaxes(1, 2), values.shape)

    return restore


def minus_one(values: Values) -> Values:
    """Undo the one that is added to Gemma's norm weights."""
    return np.subtract(values, 1.0, dtype=np.float32)


def as_stored(values: Values) -> Values:
    """A weight whose numbers the converter left alone."""
    return values


def _outer(config: dict[str, Any]) -> Iterator[Parameter]:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    norm = _norm_restore(config)
    yield Parameter("model.embed_tokens.weight", "token_embd.weight", (vocab, hidden), as_stored)
    yield Parameter("model.norm.weight", "output_norm.weight", (hidden,), norm)
    if not config["tie_word_embeddings"]:
        yield Parameter("lm_head.weight", "output.weight", (vocab, hidden), as_stored)


def _all_layers(config: dict[str, Any]) -> Iterator[Parameter]:
    templates = [*_projections(config), *_norms(config)]
    for layer in range(config["num_hidden_layers"]):
        for template in templates:
            yield Parameter(
                f"model.layers.{layer}.{template.target}",
                f"blk.{layer}.{template.source}",
                template.shape,
                template.restore,
            )


def _projections(config: dict[str, Any]) -> Iterator[Parameter]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, kv = heads * config["head_dim"], kv_heads * config["head_dim"]
    permuted = config["model_type"] == "llama"
    restore_query = unpermute(heads) if permuted else as_stored
    restore_key = unpermute(kv_heads) if permuted else as_stored
    matrices = (
        ("self_attn.q_proj", "attn_q", (query, hidden), restore_query),
        ("self_attn.k_proj", "attn_k", (kv, hidden), restore_key),
        ("self_attn.v_proj", "attn_v", (kv, hidden), as_stored),
        ("self_attn.o_proj", "attn_output", (hidden, query), as_stored),
        ("mlp.gate_proj", "ffn_gate", (inner, hidden), as_stored),
        ("mlp.up_proj", "ffn_up", (inner, hidden), as_stored),
        ("mlp.down_proj", "ffn_down", (hidden, inner), as_stored),
    )
    biased = _biased(config)
    for target, source, shape, restore in matrices:
        yield Parameter(f"{target}.weight", f"{source}.weight", shape, restore)
        if source in biased:
            yield Parameter(f"{target}.bias", f"{source}.bias", shape[:1], restore)


def _biased(config: dict[str, Any]) -> set[str]:
    """The projections, by their names in the file, that have a bias."""
    if config["model_type"] == "qwen2":
        return {"attn_q", "attn_k", "attn_v"}
    biased = set()
    if config.get("attention_bias"):
        biased |= {"attn_q", "attn_k", "attn_v", "attn_output"}
    if config.get("mlp_bias"):
        biased |= {"ffn_gate", "ffn_up", "ffn_down"}
    return biased


def _norms(config: dict[str, Any]) -> Iterator[Parameter]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    restore = _norm_restore(config)
    names = [("input_layernorm", "attn_norm", hidden)]
    if config["model_type"] == "gemma3_text":
        names += [
            ("post_attention_layernorm", "post_attention_norm", hidden),
            ("pre_feedforward_layernorm", "ffn_norm", hidden),
            ("post_feedforward_layernorm", "post_ffw_norm", hidden),
        ]
    else:
        names += [("post_attention_layernorm", "ffn_norm", hidden)]
    if config["model_type"] in ("gemma3_text", "qwen3"):
        names += [
            ("self_attn.q_norm", "attn_q_norm", head_dim),
            ("self_attn.k_norm", "attn_k_norm", head_dim),
        ]
    for target, source, size in names:
        yield Parameter(f"{target}.weight", f"{source}.weight", (size,), restore)


def _norm_restore(config: dict[str, Any]) -> Restore:
    return minus_one if config["model_type"] == "gemma3_text" else as_stored


def _some(names: list[str]) -> str:
    """The first few of `names` with the verb that follows them."""
    shown = ", ".join(repr(name) for name in names[:4])
    if len(names) > 4:
        shown += f" and {len(names) - 4} more"
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"

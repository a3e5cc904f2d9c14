"""A GGUF file's metadata as a Hugging Face `config.json`.

Key names and defaults are those that llama.cpp writes and reads for each architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_kvcache.errors import ModelFormatError, UnsupportedModelError
from mlx_kvcache.facts.hf.fields import MOST_LAYERS
from mlx_kvcache.models.gguf_file import GGUFFile
from mlx_kvcache.models.gguf_rope import rope_scaling

Config = dict[str, Any]

# llama.cpp falls back on these where a Gemma 3 file says nothing.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_BASE = 10_000.0
_GEMMA3_27B_LAYERS = 62


def architecture(file: GGUFFile) -> str:
    """The file's architecture. Raises UnsupportedModelError when it is not one of ours."""
    name = file.require("general.architecture", str)
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{file.path.name} is a {name!r} model; GGUF files of these architectures can be "
            f"loaded: {', '.join(sorted(_FAMILIES))}. Load another model from its Hugging Face "
            "directory instead"
        )
    return name


def config_from(file: GGUFFile) -> Config:
    """The config of the model in `file`, as mlx-lm and transformers read it.

    Raises UnsupportedModelError for an architecture or a feature that mlx-lm's model of it
    lacks, ModelFormatError for metadata that is missing or contradicts itself.
    """
    name = architecture(file)
    config = _shared(file, name)
    _refuse_experts(file, name)
    own = _FAMILIES[name](file, config)
    scaling = rope_scaling(file, name, config["rope_theta"], config["head_dim"])
    return {**own, **config, **({} if scaling is None else {"rope_scaling": scaling})}


def _shared(file: GGUFFile, name: str) -> Config:
    hidden = _positive(file, f"{name}.embedding_length")
    heads = _heads(file, f"{name}.attention.head_count")
    kv_key = f"{name}.attention.head_count_kv"
    kv_heads = _heads(file, kv_key) if kv_key in file.metadata else heads
    if heads % kv_heads:
        raise ModelFormatError(
            f"{file.path.name}: {heads} query heads cannot be shared by {kv_heads} KV heads"
        )
    return {
        "vocab_size": _vocab_size(file, hidden),
        "hidden_size": hidden,
        "num_hidden_layers": _layers(file, f"{name}.block_count"),
        "intermediate_size": _positive(file, f"{name}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _head_dim(file, name, hidden, heads),
        "max_position_embeddings": _positive(file, f"{name}.context_length"),
        "rms_norm_eps": decimal(file.require(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": decimal(file.find(f"{name}.rope.freq_base", float) or 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.find("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.find("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.find("tokenizer.ggml.padding_token_id", int),
    }


def _llama(file: GGUFFile, _config: Config) -> Config:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _qwen2(file: GGUFFile, config: Config) -> Config:
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise UnsupportedModelError(
            f"{file.path.name}: a qwen2 model with head dim {config['head_dim']} is not hidden "
            "size / heads, the only one that mlx-lm's qwen2 runs"
        )
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3(_file: GGUFFile, _config: Config) -> Config:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _gemma3(file: GGUFFile, config: Config) -> Config:
    if file.find("gemma3.final_logit_softcapping", float):
        raise UnsupportedModelError(
            f"{file.path.name} caps its logits, which mlx-lm's gemma3 does not"
        )
    layers = config["num_hidden_layers"]
    pattern = _pattern(file, layers)
    kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    # Only the 27B model divides by something else than its head dim (llama.cpp tells it by
    # its layer count; the file has no key for it).
    scalar = config["head_dim"]
    if layers == _GEMMA3_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    local_base = file.find("gemma3.rope.freq_base_swa", float) or _GEMMA3_LOCAL_BASE
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": decimal(local_base),
        "sliding_window": _positive(file, "gemma3.attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": kinds,
    }


_FAMILIES: dict[str, Callable[[GGUFFile, Config], Config]] = {
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

ARCHITECTURES = tuple(sorted(_FAMILIES))


def decimal(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 where the file holds 9.9999997e-06."""
    return float(str(np.float32(value)))


def _positive(file: GGUFFile, key: str) -> int:
    value = file.require(key, int)
    if value < 1:
        raise ModelFormatError(f"{file.path.name}: metadata {key!r} is {value}, not positive")
    return value


def _layers(file: GGUFFile, key: str) -> int:
    count = _positive(file, key)
    # Lists with an entry for each layer follow.
    if count > MOST_LAYERS:
        raise ModelFormatError(
            f"{file.path.name}: metadata {key!r} is {count}, above {MOST_LAYERS} layers; the file "
            "is damaged"
        )
    return count


def _heads(file: GGUFFile, key: str) -> int:
    counts = file.metadata.get(key)
    if not isinstance(counts, list):
        return _positive(file, key)
    if len(set(counts)) != 1 or counts[0] < 1:
        raise UnsupportedModelError(
            f"{file.path.name}: {key!r} differs from layer to layer ({counts!r:.80}), which "
            "mlx-lm's model of this architecture cannot"
        )
    return int(counts[0])


def _head_dim(file: GGUFFile, name: str, hidden: int, heads: int) -> int:
    key_length = file.find(f"{name}.attention.key_length", int)
    if key_length is None and hidden % heads:
        raise ModelFormatError(
            f"{file.path.name}: no head dim is given and hidden size {hidden} is not a multiple "
            f"of {heads} heads"
        )
    head_dim = hidden // heads if key_length is None else key_length
    for key in ("attention.value_length", "rope.dimension_count"):
        other = file.find(f"{name}.{key}", int)
        if other is not None and other != head_dim:
            raise UnsupportedModelError(
                f"{file.path.name}: {name}.{key} is {other} and the head dim {head_dim}; mlx-lm's "
                f"{name} needs them equal"
            )
    return head_dim


def _vocab_size(file: GGUFFile, hidden: int) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError(f"{file.path.name}: tensor 'token_embd.weight' is missing")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise ModelFormatError(
            f"{file.path.name}: tensor 'token_embd.weight' is {embedding.shape}, not "
            f"(vocabulary, {hidden})"
        )
    rows = embedding.shape[0]
    tokens = len(file.find("tokenizer.ggml.tokens", list) or ())
    if tokens > rows:
        raise ModelFormatError(
            f"{file.path.name}: {tokens} tokens, but only {rows} rows in 'token_embd.weight'"
        )
    return rows


def _pattern(file: GGUFFile, layers: int) -> int:
    """Every how many layers one is full: a number in the file, or a list of True = sliding."""
    key = "gemma3.attention.sliding_window_pattern"
    if not isinstance(file.metadata.get(key), list):
        return file.find(key, int) or _GEMMA3_PATTERN
    sliding = [bool(value) for value in file.require(key, list)]
    pattern = sliding.index(False) + 1 if False in sliding else 0
    if not pattern or sliding != [bool((i + 1) % pattern) for i in range(layers)]:
        raise UnsupportedModelError(
            f"{file.path.name}: {key!r} is not one full layer after a fixed number of sliding "
            "ones, which is all that mlx-lm's gemma3 runs"
        )
    return pattern


def _refuse_experts(file: GGUFFile, name: str) -> None:
    experts = file.find(f"{name}.expert_count", int)
    if experts:
        raise UnsupportedModelError(
            f"{file.path.name} is a mixture of {experts} experts; only dense {name} models can "
            "be loaded from GGUF"
        )

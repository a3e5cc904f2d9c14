"""Build a tiny model of any mlx-lm family, with weights that make attention matter.

mlx-lm's own initial weights are so small that a model hardly looks back: a cache could lose rows
and the logits would not show it. Here every matrix keeps the scale of its input, and what
attention brings in (values and the output projection) is louder than the residual stream.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear

#: What the matrices that carry attention's result are multiplied by.
ATTENTION_GAIN = 2.0
NOISE = 0.05

#: The module (the last name before `.weight`) that makes values or brings attention's result out.
ATTENTION_NAMES = re.compile(
    r"(?i)^("
    r"v_proj|o_proj|out_proj|wv|wo|vo?|o|value|out|output_proj|dense|c_attn|c_proj|qkv_proj|qkv|wqkv|"
    r"w_pack|query_key_value|attn_out|kv_b_proj|unembed_out|kv_proj|o_b_proj|wo_b|v_b_proj"
    r")$"
)
#: Parameters of recurrences whose initial values are a sane operating point.
RECURRENT_NAMES = re.compile(r"(?i)(^|[._])(a_log|dt_bias|d|x_proj_norm|time_decay|decay)$")


def build(module_name: str, config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """The model of `mlx_lm.models.<module_name>`, float32, with weights drawn from `seed`.

    `config` is the dict of a config.json. The same arguments give the same weights, bit for bit,
    and the process's own random state is left as it was. Without Metal, packed ternary layers,
    which only a Metal kernel can multiply, become dense ones of the same weights.
    """
    module = importlib.import_module(f"mlx_lm.models.{module_name}")
    high, low = (int(word) for word in np.array(mx.random.state[0]))
    mx.random.seed(seed)
    try:
        model: nn.Module = module.Model(module.ModelArgs.from_dict(copy.deepcopy(dict(config))))
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    finally:
        mx.random.seed(high << 32 | low)
    drawn = [(path, _draw(path, np.array(initial), seed)) for path, initial in _parameters(model)]
    model.update(tree_unflatten(drawn))
    _scale_ternary(model)
    if not mx.metal.is_available():
        _unpack_ternary(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def all_families() -> dict[str, dict[str, Any]]:
    """The config of every family, by the name of its mlx-lm module."""
    from tests.support import family_configs_a_to_h, family_configs_i_to_z

    return {**family_configs_a_to_h.CONFIGS, **family_configs_i_to_z.CONFIGS}


def vocab_size(config_or_model: Mapping[str, Any] | nn.Module) -> int:
    """The number of token ids of a config, or of a model built from one.

    Raises `KeyError` where neither it nor its text part says.
    """
    facts: Any = config_or_model
    if isinstance(facts, nn.Module):
        facts = getattr(facts, "args", None) or facts.config
    for holder in (facts, _field(facts, "text_config"), _field(facts, "llm_config")):
        size = _field(holder, "vocab_size")
        if size is not None:
            return int(size)
    raise KeyError("vocab_size")


def random_tokens(
    config_or_model: Mapping[str, Any] | nn.Module, count: int, seed: int = 0
) -> list[int]:
    """`count` token ids of the model's vocabulary, the same ones for the same `seed`."""
    generator = np.random.default_rng(seed)
    return [int(token) for token in generator.integers(0, vocab_size(config_or_model), count)]


def logits_in_chunks(
    model: nn.Module, tokens: Sequence[int], cache: list[Any], chunks: Sequence[int]
) -> mx.array:
    """The logits `[1, N, V]`, float32 and evaluated, of `tokens` fed in `chunks` through `cache`.

    `chunks` are the sizes of the steps and add up to N; anything else is a `ValueError`.
    """
    if sum(chunks) != len(tokens) or min(chunks) < 1:
        raise ValueError(f"chunks {list(chunks)} do not add up to {len(tokens)} tokens")
    pieces = []
    start = 0
    for size in chunks:
        step = mx.array([list(tokens[start : start + size])])
        logits = model(step, cache=cache).astype(mx.float32)
        mx.eval(logits)
        pieces.append(logits)
        start += size
    joined = mx.concatenate(pieces, axis=1)
    mx.eval(joined)
    return joined


def _parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    return flat


def _field(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    return getattr(holder, name, None)


def _draw(path: str, initial: np.ndarray[Any, Any], seed: int) -> mx.array:
    generator = np.random.default_rng([seed, zlib.crc32(path.encode())])
    if initial.dtype == np.uint8:
        return mx.array(_ternary(generator, initial.shape))
    if not np.issubdtype(initial.dtype, np.floating):
        return mx.array(initial)
    if initial.ndim == 0:
        return mx.array(initial)
    if initial.ndim < 2 or "norm" in path.lower() or RECURRENT_NAMES.search(path):
        values = initial + NOISE * generator.standard_normal(initial.shape)
        return mx.array(values.astype(np.float32))
    values = generator.standard_normal(initial.shape) / math.sqrt(_fan_in(path, initial.shape))
    if ATTENTION_NAMES.match(_module_name(path)):
        values *= ATTENTION_GAIN
    return mx.array(values.astype(np.float32))


def _fan_in(path: str, shape: tuple[int, ...]) -> int:
    # A convolution's weight is [out, taps, in / groups]; every other matrix has its input last.
    if "conv" in path.lower():
        return math.prod(shape[1:])
    return shape[-1]


def _module_name(path: str) -> str:
    names = [name for name in path.split(".") if not name.isdigit()]
    if names[-1] in ("weight", "bias", "linear") and len(names) > 1:
        names = names[:-1]
    return names[-1]


def _ternary(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    # Packed ternary weights: four two-bit digits a byte, each 0, 1 or 2 for -1, 0 or 1.
    digits = generator.integers(0, 3, (4, *shape))
    packed = sum(digits[place] << (2 * place) for place in range(4))
    return np.asarray(packed, dtype=np.uint8)


def _ternary_layers(model: nn.Module) -> list[tuple[str, BitLinear]]:
    return [(path, layer) for path, layer in model.named_modules() if isinstance(layer, BitLinear)]


def _scale_ternary(model: nn.Module) -> None:
    # Two of three ternary weights are not 0, so this keeps the scale of the layer's input.
    for path, layer in _ternary_layers(model):
        scale = math.sqrt(1.5 / layer.in_features)
        if ATTENTION_NAMES.match(path.rsplit(".", 1)[-1]):
            scale *= ATTENTION_GAIN
        layer.weight_scale = mx.array([1 / scale if layer.invert_weight_scales else scale])


def _unpack_ternary(model: nn.Module) -> None:
    dense: list[tuple[str, nn.Module]] = []
    for path, layer in _ternary_layers(model):
        digits = [(layer.weight >> (2 * place)) & 3 for place in range(4)]
        weight = mx.concatenate(digits)[: layer.out_features].astype(mx.float32) - 1
        scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        linear.weight = weight * scale
        if layer.bias is not None:
            linear.bias = layer.bias
        dense.append((path, linear))
    if dense:
        model.update_modules(tree_unflatten(dense))

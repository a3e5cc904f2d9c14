"""A decoder in plain MLX that owns no cache: Llama and Gemma 3, written by hand.

Its attention is one call of `update_and_attend` a layer. The cache stands outside: whoever runs
the model opens a session, and what the cache keeps, in which dtype and for how long is no business
of the model's.

    python examples/decoder.py --model smollm2 --prompt "The capital of France is" --max-tokens 32
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx, silu

from mlx_kvcache import (
    AttentionBackend,
    CacheConfig,
    CacheGeometry,
    CacheSession,
    SharedControl,
    current_cache,
    update_and_attend,
)
from mlx_kvcache.errors import KVCacheError, UnsupportedModelError
from mlx_kvcache.facts.config import KV_DTYPES
from mlx_kvcache.models import read_config, resolve

Weights = dict[str, mx.array]
#: The kinds of cache, all of which serve the model through the same call.
KINDS = ("sequence", "cell", "batched")


@dataclass(frozen=True)
class Rope:
    """Rotary positions; `wavelengths`, one for each pair of dims (over 2 pi), replace the base."""

    dim: int
    base: float
    scale: float = 1.0
    wavelengths: mx.array | None = None

    @classmethod
    def from_config(cls, dim: int, base: float, scaling: Mapping[str, Any] | None) -> Rope:
        """The rope of a `rope_scaling` entry. Raises `UnsupportedModelError` for an unknown one."""
        kind = "default"
        if scaling:
            kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if scaling and kind == "linear":
            return cls(dim, base, scale=1 / scaling["factor"])
        if scaling and kind == "llama3":
            return cls(dim, base, wavelengths=_llama3_wavelengths(dim, base, scaling))
        if kind == "default":
            return cls(dim, base)
        raise UnsupportedModelError(f"this decoder has no {kind!r} rope; default, linear, llama3")

    def __call__(self, x: mx.array, position: int) -> mx.array:
        """Rotate [B, H, T, D], whose first token stands at `position`."""
        base = self.base if self.wavelengths is None else None
        rotated: mx.array = mx.fast.rope(
            x,
            self.dim,
            traditional=False,
            base=base,
            scale=self.scale,
            offset=position,
            freqs=self.wavelengths,
        )
        return rotated


def _llama3_wavelengths(dim: int, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """Short waves as they are, long ones stretched by the factor, and a ramp in between."""
    factor, low, high = (
        scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    waves: mx.array = base ** (mx.arange(0, dim, 2) / dim)
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * waves)
    share = mx.clip((turns - low) / (high - low), 0, 1)
    stretched: mx.array = waves / ((1 - share) / factor + share)
    return stretched


@dataclass(frozen=True)
class Facts:
    """What the config says, beside the geometry of the cache."""

    is_gemma: bool
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    layers: int
    epsilon: float
    scale: float
    rope: Rope
    local_rope: Rope

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Facts:
        """Raises `UnsupportedModelError` for anything but a Llama or a Gemma 3 text model."""
        family = config.get("model_type")
        if family not in ("llama", "gemma3_text"):
            raise UnsupportedModelError(
                f"this decoder runs llama and gemma3_text, not {family!r}; mlx-kvcache generate "
                "runs every model that mlx-lm has"
            )
        is_gemma = family == "gemma3_text"
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        rope = Rope.from_config(
            head_dim,
            config.get("rope_theta") or (1e6 if is_gemma else 1e4),
            config.get("rope_scaling"),
        )
        local_base = config.get("rope_local_base_freq", 1e4)
        score_dim = config.get("query_pre_attn_scalar", 256) if is_gemma else head_dim
        return cls(
            is_gemma=is_gemma,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            epsilon=config.get("rms_norm_eps", 1e-6),
            scale=score_dim**-0.5,
            rope=rope,
            local_rope=Rope(head_dim, local_base) if is_gemma else rope,
        )


class Decoder:
    """The model. `geometry` says which cache it needs; it holds none."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self.facts = Facts.from_config(config)
        self.geometry = CacheGeometry.from_hf(dict(config))
        self.weights = dict(weights)
        if self.facts.is_gemma:
            # Gemma's files store the weights of its norms less one.
            for name in self.weights:
                if name.endswith("norm.weight"):
                    self.weights[name] = self.weights[name] + 1

    def __call__(
        self, tokens: mx.array, position: int, cache: AttentionBackend | None = None
    ) -> mx.array:
        """Read tokens [B, T] that start at `position`, and answer their hidden states [B, T, E].

        The keys and values go to `cache`, or to the active one of the session around the call.
        """
        x = self.weights["model.embed_tokens.weight"][tokens]
        if self.facts.is_gemma:
            # Gemma was trained with this factor rounded to bfloat16.
            x = x * mx.array(self.facts.hidden**0.5, mx.bfloat16).astype(x.dtype)
        read = self._gemma_layer if self.facts.is_gemma else self._llama_layer
        for layer in range(self.facts.layers):
            x = read(layer, x, position, cache)
        return self._norm("model.norm", x)

    def logits(self, hidden: mx.array) -> mx.array:
        """Scores of the next token, [B, T, vocabulary], of hidden states [B, T, E]."""
        head = self.weights.get("lm_head.weight")
        if head is None:
            head = self.weights["model.embed_tokens.weight"]
        return hidden @ head.T

    def _llama_layer(
        self, layer: int, x: mx.array, position: int, cache: AttentionBackend | None
    ) -> mx.array:
        name = f"model.layers.{layer}"
        x = x + self._attention(layer, self._norm(f"{name}.input_layernorm", x), position, cache)
        return x + self._mlp(name, self._norm(f"{name}.post_attention_layernorm", x))

    def _gemma_layer(
        self, layer: int, x: mx.array, position: int, cache: AttentionBackend | None
    ) -> mx.array:
        """As Llama's, with a second norm on what each half brings in."""
        name = f"model.layers.{layer}"
        attended = self._attention(layer, self._norm(f"{name}.input_layernorm", x), position, cache)
        x = x + self._norm(f"{name}.post_attention_layernorm", attended)
        fed = self._mlp(name, self._norm(f"{name}.pre_feedforward_layernorm", x))
        return x + self._norm(f"{name}.post_feedforward_layernorm", fed)

    def _attention(
        self, layer: int, x: mx.array, position: int, cache: AttentionBackend | None
    ) -> mx.array:
        facts, name = self.facts, f"model.layers.{layer}.self_attn"
        cache_layer = self.geometry.model_layers[layer].caches[0]
        queries = self._heads(f"{name}.q_proj", x, facts.heads)
        keys = self._heads(f"{name}.k_proj", x, facts.kv_heads)
        values = self._heads(f"{name}.v_proj", x, facts.kv_heads)
        if facts.is_gemma:
            queries = self._norm(f"{name}.q_norm", queries)
            keys = self._norm(f"{name}.k_norm", keys)
        is_local = self.geometry.layers[cache_layer].policy.kind == "ring"
        rope = facts.local_rope if is_local else facts.rope
        attended = update_and_attend(
            rope(queries, position),
            rope(keys, position),
            values,
            position,
            cache_layer,
            facts.scale,
            cache=cache,
        )
        batch, _, count, _ = attended.shape
        return self._linear(
            f"{name}.o_proj", attended.transpose(0, 2, 1, 3).reshape(batch, count, -1)
        )

    def _heads(self, name: str, x: mx.array, heads: int) -> mx.array:
        batch, count, _ = x.shape
        return self._linear(name, x).reshape(batch, count, heads, -1).transpose(0, 2, 1, 3)

    def _mlp(self, layer: str, x: mx.array) -> mx.array:
        gate = self._linear(f"{layer}.mlp.gate_proj", x)
        gate = gelu_approx(gate) if self.facts.is_gemma else silu(gate)
        return self._linear(
            f"{layer}.mlp.down_proj", gate * self._linear(f"{layer}.mlp.up_proj", x)
        )

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weights[f"{name}.weight"], self.facts.epsilon)

    def _linear(self, name: str, x: mx.array) -> mx.array:
        x = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return x if bias is None else x + bias


def load(model: str, dtype: mx.Dtype) -> tuple[Decoder, Path]:
    """The decoder of a model directory, demo or hub id, and that directory."""
    directory = resolve(model)
    weights: Weights = {}
    for file in sorted(directory.glob("model*.safetensors")):
        part = mx.load(str(file))
        assert isinstance(part, dict), "a safetensors file holds named arrays"
        weights.update({name: array.astype(dtype) for name, array in part.items()})
    if not weights or any(name.endswith(".scales") for name in weights):
        raise UnsupportedModelError(f"this decoder needs plain weights, and {directory} has none")
    return Decoder(read_config(directory), weights), directory


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    ends: Collection[int] = (),
    chunk: int = 64,
    cache: AttentionBackend | None = None,
) -> Iterator[int]:
    """The likeliest continuation of `prompt`, up to a token in `ends`, which comes last.

    The prompt is read in steps of `chunk` tokens, then each new token is a step of its own.
    """
    backend = current_cache() if cache is None else cache
    # A cache of many sequences is told whose tokens a step brings, before the first layer.
    many = backend if isinstance(backend, SharedControl) else None
    sequence = many.new() if many else 0
    position = 0
    unread = list(prompt)
    for _ in range(max_tokens):
        while unread:
            step, unread = unread[:chunk], unread[chunk:]
            if many:
                many.declare_step([(sequence, len(step))])
            hidden = decoder(mx.array([step]), position, cache)[:, -1]
            mx.eval(hidden)
            position += len(step)
        token = int(mx.argmax(decoder.logits(hidden)).item())  # type: ignore[arg-type]
        yield token
        if token in ends:
            return
        unread = [token]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, and print the prompt's continuation as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a demo, a directory or a hub id")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a step of the prompt")
    parser.add_argument("--dtype", choices=KV_DTYPES, default="float32")
    parser.add_argument("--kind", choices=KINDS, default="sequence", help="the kind of cache")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="the cache's dtype (the model's)")
    options = parser.parse_args(arguments)
    if min(options.max_tokens, options.chunk) < 1:
        parser.error("--max-tokens and --chunk must be 1 or more")
    try:
        decoder, directory = load(options.model, getattr(mx, options.dtype))
    except KVCacheError as error:
        parser.error(str(error))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.encode(options.prompt)
    if not prompt:
        parser.error("--prompt is empty")
    ends = read_config(directory).get("eos_token_id") or []
    config = CacheConfig(len(prompt) + options.max_tokens, options.kv_dtype)
    tokens: list[int] = []
    shown = ""
    with CacheSession(decoder.geometry, config, kind=options.kind):
        for token in generate(
            decoder,
            prompt,
            options.max_tokens,
            ends=ends if isinstance(ends, list) else [ends],
            chunk=options.chunk,
        ):
            tokens.append(token)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

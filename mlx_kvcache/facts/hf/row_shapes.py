"""What a cache layer holds for one position: KV heads and dims, read from a config's fields.

Which of these a family has is a matter of its attention: whether the head dim may be given, and
whether it caches heads, a latent, or what the latent expands to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_kvcache.facts.hf.fields import Fields
from mlx_kvcache.facts.hf.layer_types import MemoryKind
from mlx_kvcache.facts.layers import LayerGeometry, LayerPolicy


@dataclass(frozen=True)
class RowShape:
    """What a cache layer holds for one position."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def flat(self) -> LayerGeometry:
        return LayerGeometry(LayerPolicy.flat(), self.kv_heads, self.key_dim, self.value_dim)

    def ring(self, window: int) -> LayerGeometry:
        return LayerGeometry(LayerPolicy.ring(window), self.kv_heads, self.key_dim, self.value_dim)


ShapeOf = Callable[[Fields], RowShape]


def of_heads(kv_heads: int, head_dim: int) -> RowShape:
    """The usual row: keys and values of one dim."""
    return RowShape(kv_heads, head_dim, head_dim)


def query_heads(fields: Fields) -> int:
    return fields.integer("num_attention_heads")


def kv_heads(fields: Fields) -> int:
    """KV heads, or as many as there are query heads where the config does not say."""
    heads = query_heads(fields)
    given = fields.optional_integer("num_key_value_heads")
    if given is None and "num_key_value_heads" in fields.names:
        # Where the family has a name of its own for it, it is one of its required fields.
        raise fields.error("num_key_value_heads", None, "a positive integer")
    if given is not None and heads % given:
        raise fields.error("num_key_value_heads", given, f"a divisor of the {heads} query heads")
    return heads if given is None else given


def derived_head_dim(fields: Fields) -> int:
    """hidden_size // num_attention_heads."""
    hidden, heads = fields.integer("hidden_size"), query_heads(fields)
    if hidden < heads:
        raise fields.error("hidden_size", hidden, f"at least num_attention_heads ({heads})")
    return hidden // heads


def given(fields: Fields) -> RowShape:
    """For models whose head_dim must be given."""
    head_dim = fields.integer("head_dim")
    return of_heads(kv_heads(fields), head_dim)


def derived(fields: Fields) -> RowShape:
    """For models that split the hidden size among the heads, whatever head_dim says."""
    head_dim = derived_head_dim(fields)
    return of_heads(kv_heads(fields), head_dim)


def either(fields: Fields) -> RowShape:
    """For models whose head_dim may be given and is derived otherwise."""
    head_dim = fields.optional_integer("head_dim")
    return derived(fields) if head_dim is None else of_heads(kv_heads(fields), head_dim)


def mha(fields: Fields) -> RowShape:
    """As many KV heads as query heads, whatever the config says."""
    head_dim = derived_head_dim(fields)
    return of_heads(query_heads(fields), head_dim)


def mha_given(fields: Fields) -> RowShape:
    """As many KV heads as query heads, with a head_dim that must be given."""
    head_dim = fields.integer("head_dim")
    return of_heads(query_heads(fields), head_dim)


def latent(fields: Fields) -> RowShape:
    """MLA that caches its latent: one head, the latent as keys and the rotary part as values."""
    return RowShape(1, fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim"))


def expanded(fields: Fields) -> RowShape:
    """MLA that caches what the latent expands to, for all heads."""
    return _expanded(fields, fields.integer("v_head_dim"))


def minicpm3(fields: Fields) -> RowShape:
    """minicpm3: expanded MLA whose value dim is the derived head dim."""
    return _expanded(fields, derived_head_dim(fields))


def _expanded(fields: Fields, value_dim: int) -> RowShape:
    key_dim = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
    return RowShape(query_heads(fields), key_dim, value_dim)


def bigcode(fields: Fields) -> RowShape:
    """gpt_bigcode: one KV head with multi_query, else all."""
    head_dim = derived_head_dim(fields)
    return of_heads(1 if fields.flag("multi_query") else query_heads(fields), head_dim)


def dbrx(fields: Fields) -> RowShape:
    """dbrx: the KV heads stand in attn_config."""
    head_dim = derived_head_dim(fields)
    return of_heads(fields.section("attn_config").integer("kv_n_heads"), head_dim)


def kimi_linear(fields: Fields) -> RowShape:
    """kimi_linear: an MLA latent that may have no rotary part."""
    rope_dim = fields.optional_integer("qk_rope_head_dim", 0) or 0
    return RowShape(1, fields.integer("kv_lora_rank"), rope_dim)


def with_global(fields: Fields, kinds: tuple[MemoryKind, ...]) -> list[RowShape]:
    """gemma4: one shape for each layer, full ones with head_dim and KV heads of their own.

    global_head_dim always applies to them, num_global_key_value_heads only with
    attention_k_eq_v.
    """
    local = either(fields)
    heads = local.kv_heads
    full_dim = fields.optional_integer("global_head_dim") or local.key_dim
    if fields.flag("attention_k_eq_v"):
        heads = fields.optional_integer("num_global_key_value_heads") or heads
    full = of_heads(heads, full_dim)
    return [full if kind == "flat" else local for kind in kinds]

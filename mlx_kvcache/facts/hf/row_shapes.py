"""What a cache layer holds for one position, as functions of a config's fields.

Which of them a family uses is a matter of its attention: whether the head dim may be given, and
whether it caches heads, a latent, or what the latent expands to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_kvcache.facts.geometry import LayerGeometry, LayerPolicy
from mlx_kvcache.facts.hf.fields import Fields


@dataclass(frozen=True)
class Row:
    """What a cache layer holds for one position."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def flat(self) -> LayerGeometry:
        return LayerGeometry(LayerPolicy.flat(), self.kv_heads, self.key_dim, self.value_dim)

    def ring(self, window: int) -> LayerGeometry:
        return LayerGeometry(LayerPolicy.ring(window), self.kv_heads, self.key_dim, self.value_dim)


RowOf = Callable[[Fields], Row]


def kv_heads(fields: Fields) -> int:
    """KV heads, or as many as there are query heads where the config does not say."""
    heads = fields.integer("num_attention_heads")
    given = fields.optional_integer("num_key_value_heads")
    if given is None and "num_key_value_heads" in fields.names:
        # Where the family has a name of its own for it, it is one of its required fields.
        raise fields.error("num_key_value_heads", None, "a positive integer")
    if given is not None and heads % given:
        raise fields.error("num_key_value_heads", given, f"a divisor of the {heads} query heads")
    return heads if given is None else given


def derived_head_dim(fields: Fields) -> int:
    """hidden_size // num_attention_heads."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden < heads:
        raise fields.error("hidden_size", hidden, f"at least num_attention_heads ({heads})")
    return hidden // heads


def either_head_dim(fields: Fields) -> int:
    """head_dim where the config gives it, else the derived one."""
    given = fields.optional_integer("head_dim")
    return derived_head_dim(fields) if given is None else given


def given_row(fields: Fields) -> Row:
    """For models whose head_dim must be given."""
    head_dim = fields.integer("head_dim")
    return Row(kv_heads(fields), head_dim, head_dim)


def derived_row(fields: Fields) -> Row:
    """For models that split the hidden size among the heads, whatever head_dim says."""
    head_dim = derived_head_dim(fields)
    return Row(kv_heads(fields), head_dim, head_dim)


def either_row(fields: Fields) -> Row:
    """For models whose head_dim may be given and is derived otherwise."""
    head_dim = either_head_dim(fields)
    return Row(kv_heads(fields), head_dim, head_dim)


def latent_row(fields: Fields) -> Row:
    """MLA that caches its latent: one head, the latent as keys and the rotary part as values."""
    return Row(1, fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim"))


def expanded_row(fields: Fields) -> Row:
    """MLA that caches what the latent expands to, for all heads."""
    key_dim = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
    return Row(fields.integer("num_attention_heads"), key_dim, fields.integer("v_head_dim"))


def mha_row(fields: Fields) -> Row:
    """As many KV heads as query heads, whatever the config says."""
    head_dim = derived_head_dim(fields)
    return Row(fields.integer("num_attention_heads"), head_dim, head_dim)


def mha_given_row(fields: Fields) -> Row:
    """As many KV heads as query heads, with a head_dim that must be given."""
    head_dim = fields.integer("head_dim")
    return Row(fields.integer("num_attention_heads"), head_dim, head_dim)


def bigcode_row(fields: Fields) -> Row:
    """gpt_bigcode: one KV head with multi_query, else all."""
    head_dim = derived_head_dim(fields)
    return Row(
        1 if fields.flag("multi_query") else fields.integer("num_attention_heads"),
        head_dim,
        head_dim,
    )


def dbrx_row(fields: Fields) -> Row:
    """dbrx: the KV heads stand in attn_config."""
    head_dim = derived_head_dim(fields)
    return Row(fields.section("attn_config").integer("kv_n_heads"), head_dim, head_dim)


def minicpm3_row(fields: Fields) -> Row:
    """minicpm3: expanded MLA whose value dim is the derived head dim."""
    key_dim = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
    return Row(fields.integer("num_attention_heads"), key_dim, derived_head_dim(fields))


def kimi_linear_row(fields: Fields) -> Row:
    """kimi_linear: an MLA latent that may have no rotary part."""
    rope_dim = fields.optional_integer("qk_rope_head_dim", 0) or 0
    return Row(1, fields.integer("kv_lora_rank"), rope_dim)

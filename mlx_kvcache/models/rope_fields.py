"""The rotary fields of a config that transformers 5 saved, under the names that mlx-lm reads.

transformers 5 keeps them in one dict, `rope_parameters`, or in one for each layer type. Most of
mlx-lm's families read `rope_theta` and its neighbors at the top of the config, and take their own
defaults where those are missing: another model, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_kvcache.errors import ModelFormatError, UnsupportedModelError

Config = Mapping[str, Any]

#: Where the families read the base of full layers, that of sliding ones, and the rotated part.
_BASES = ("rope_theta", "rotary_emb_base")
_LOCAL_BASES = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta")
_ROTATED_PARTS = ("partial_rotary_factor", "rotary_pct")

#: Families that read all of `rope_parameters` by themselves (dbrx: the base in its `attn_config`);
#: others that know the field take the base out of it and nothing else.
READ_WHOLE = frozenset(
    {
        "dbrx",
        "gemma4_text",
        "glm_moe_dsa",
        "laguna",
        "mellum",
        "minimax_m3_vl",
        "ministral3",
        "mistral4",
        "muse_spark",
        "qwen3",
        "qwen3_5",
        "spark2_5",
    }
)
#: Families whose rotated part is no field of theirs: half of the head dim, always.
HALF_ROTATED = frozenset({"glm", "recurrent_gemma"})
#: Families that scale full layers alone and turn both kinds by one base.
SCALED_IN_FULL_LAYERS = frozenset({"olmo3"})

#: Families that have the field `rope_scaling` and follow it for these kinds only.
SCALINGS_FOLLOWED: Mapping[str, frozenset[str]] = {
    "gemma3n": frozenset(),
    "glm4_moe": frozenset(),
    "hunyuan": frozenset({"dynamic"}),
    "hunyuan_v1_dense": frozenset({"dynamic"}),
    "minicpm3": frozenset({"longrope", "su"}),
    "mixtral": frozenset(),
    "phimoe": frozenset({"longrope", "su"}),
    "qwen2_moe": frozenset(),
    "qwen3_moe": frozenset(),
    "solar_open": frozenset(),
}
#: Families without rotary positions, whatever their configs say of them.
UNROTATED = frozenset({"kimi_linear"})

#: Kinds that turn positions as they are; the sections of mrope matter for images alone.
_UNSCALED = frozenset({"default", "mrope"})


def rope_fields(config: Config, names: frozenset[str], family: str) -> dict[str, Any]:
    """The fields to set so that `family`, which reads `names`, turns positions as `config` says.

    Where a config says a thing both ways, transformers' order holds: the base of
    `rope_parameters`, but the scaling of `rope_scaling`. Raises UnsupportedModelError for
    what mlx-lm's family has no field for, ModelFormatError for fields of another form.
    """
    if family in READ_WHOLE or family in UNROTATED:
        return {}
    parameters = config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ModelFormatError(f"'rope_parameters' is {parameters!r:.80}, not an object")
    by_kind = {kind: part for kind, part in parameters.items() if isinstance(part, Mapping)}
    if not by_kind:
        return _flat(config, parameters, names, family)
    by_kind = _used(config, by_kind)
    local = _first(_LOCAL_BASES, names)
    if family in SCALED_IN_FULL_LAYERS:
        local = "rope_theta"
    if local is None or "sliding_attention" not in by_kind:
        return _flat(config, _one(by_kind, family), names, family)
    sliding = by_kind.pop("sliding_attention")
    if _is_scaled(sliding):
        raise UnsupportedModelError(
            f"the config scales the positions of sliding layers ({sliding!r:.80}), which mlx-lm's "
            f"{family} does not"
        )
    fields = {} if sliding.get("rope_theta") is None else {local: sliding["rope_theta"]}
    whole = _one(by_kind, family) if by_kind else sliding
    shared = ["partial_rotary_factor", *(["rope_theta"] if local == "rope_theta" else [])]
    if any(whole.get(name) != sliding.get(name) for name in shared):
        raise _differs(family)
    return {**_flat(config, whole, names, family), **fields}


def _flat(config: Config, parameters: Config, names: frozenset[str], family: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    theta = parameters.get("rope_theta")
    if theta is not None:
        if (base := _first(_BASES, names)) is not None:
            fields[base] = theta
        elif "rope_parameters" not in names:
            raise _no_field(family, "rope_theta", theta)
    part = parameters.get("partial_rotary_factor")
    if part is not None:
        fields |= _rotated_part(config, part, names, family)
    scaling = config.get("rope_scaling") or parameters
    if not isinstance(scaling, Mapping):
        raise ModelFormatError(f"'rope_scaling' is {scaling!r:.80}, not an object")
    followed = SCALINGS_FOLLOWED.get(family)
    if _is_scaled(scaling) and (
        "rope_scaling" not in names or (followed is not None and _kind(scaling) not in followed)
    ):
        raise _no_field(family, "rope_scaling", dict(scaling))
    if "rope_scaling" in names and parameters and scaling is parameters:
        fields["rope_scaling"] = _scaling(parameters)
    return fields


def _rotated_part(
    config: Config, part: float, names: frozenset[str], family: str
) -> dict[str, Any]:
    if (name := _first(_ROTATED_PARTS, names)) is not None:
        return {name: part}
    if "rotary_dim" in names and "head_dim" in config:
        return {"rotary_dim": int(part * config["head_dim"])}
    if part != (0.5 if family in HALF_ROTATED else 1.0):
        raise _no_field(family, "partial_rotary_factor", part)
    return {}


def _scaling(parameters: Config) -> dict[str, Any] | None:
    """The former `rope_scaling`: its kind under both names, of which families read one each."""
    if not _is_scaled(parameters):
        return None
    kind = _kind(parameters)
    kept = {k: v for k, v in parameters.items() if k not in ("rope_theta", "partial_rotary_factor")}
    return {**kept, "rope_type": kind, "type": kind}


def _is_scaled(parameters: Config) -> bool:
    kind = _kind(parameters)
    return kind not in _UNSCALED and not (kind == "linear" and parameters.get("factor") == 1)


def _kind(parameters: Config) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _used(config: Config, by_kind: dict[str, Config]) -> dict[str, Config]:
    """Those of the layer types that the model has; all where it does not say, or has no other."""
    kinds = config.get("layer_types")
    used = {k: v for k, v in by_kind.items() if isinstance(kinds, list) and k in kinds}
    return used or by_kind


def _one(by_kind: Mapping[str, Config], family: str) -> Config:
    """What holds for all these layer types."""
    first, *others = by_kind.values()
    if any(other != first for other in others):
        raise _differs(family)
    return first


def _first(wanted: tuple[str, ...], names: frozenset[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _differs(family: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "'rope_parameters' differ between the layer types of the config in a way that mlx-lm's "
        f"{family} has no fields for"
    )


def _no_field(family: str, name: str, value: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the config sets {name} to {value!r:.120}, which mlx-lm's {family} does not follow: it "
        "would answer as another model. Another value can be given with load(..., model_config=...)"
    )

"""Every rule that turns a Hugging Face config into a geometry, and every config it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_kvcache.errors import GeometryError, ModelNotFoundError, UnknownLayerTypeError
from mlx_kvcache.facts.geometry import CacheGeometry, ModelLayer
from tests.support.tiny_models import all_families

Config = dict[str, Any]

SLIDING, FULL, CHUNKED, LINEAR = (
    "sliding_attention",
    "full_attention",
    "chunked_attention",
    "linear_attention",
)


def config(**fields: Any) -> Config:
    """A config without a known model_type: the generic rules apply."""
    base = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    return {name: value for name, value in {**base, **fields}.items() if value != "absent"}


def geometry(**fields: Any) -> CacheGeometry:
    return CacheGeometry.from_hf(config(**fields))


def rows(made: CacheGeometry) -> list[tuple[int, int, int, int]]:
    """(window, KV heads, key dim, value dim) of each cache layer."""
    return [
        (layer.policy.window, layer.kv_heads, layer.key_dim, layer.value_dim)
        for layer in made.layers
    ]


def shares(made: CacheGeometry) -> list[int | None]:
    """For each model layer the cache layer that it reads and does not own."""
    return [layer.caches[0] if layer.shares else None for layer in made.model_layers]


# Heads and dims


def test_the_plain_case_is_flat_with_the_derived_head_dim() -> None:
    made = geometry()
    assert rows(made) == [(0, 2, 8, 8)] * 4
    assert made.model_layers == tuple(ModelLayer((index,)) for index in range(4))


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"head_dim": 32}, (0, 2, 32, 32)),
        ({"head_dim": None}, (0, 2, 8, 8)),
        ({"num_key_value_heads": None}, (0, 8, 8, 8)),
        ({"num_key_value_heads": "absent"}, (0, 8, 8, 8)),
        ({"num_key_value_heads": 4}, (0, 4, 8, 8)),
        ({"hidden_size": 128}, (0, 2, 16, 16)),
        # Not needed where head_dim is given.
        ({"hidden_size": "absent", "head_dim": 5}, (0, 2, 5, 5)),
    ],
)
def test_heads_and_dims(fields: Config, row: tuple[int, ...]) -> None:
    assert rows(geometry(**fields)) == [row] * 4


def test_full_layers_may_have_a_head_dim_and_heads_of_their_own() -> None:
    fields = {
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 5,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 4,
    }
    assert rows(geometry(**fields)) == [(5, 2, 16, 16), (0, 2, 32, 32)] * 2
    assert rows(geometry(**fields, attention_k_eq_v=False))[1] == (0, 2, 32, 32)
    assert rows(geometry(**fields, attention_k_eq_v=True)) == [(5, 2, 16, 16), (0, 4, 32, 32)] * 2
    fields["num_global_key_value_heads"] = None
    assert rows(geometry(**fields, attention_k_eq_v=True))[1] == (0, 2, 32, 32)


@pytest.mark.parametrize("key", ["1", "01", "001", 1])
def test_a_transformers_object_says_the_same_per_layer(key: object) -> None:
    override = {key: {"head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 9}}
    one = [(0, 2, 16, 16), (0, 4, 32, 32), (0, 2, 16, 16), (0, 2, 16, 16)]
    assert rows(geometry(head_dim=16, per_layer_config=override)) == one
    for model_type in ("llama", "gemma4_text", "brand_new"):
        fields = {"model_type": model_type, "layer_types": [FULL] * 4, "head_dim": 16}
        fields["global_head_dim"] = 16
        assert rows(geometry(**fields, per_layer_config=override)) == one
    with pytest.raises(GeometryError, match=r"'0*1'.*per_layer_config.*got 32"):
        geometry(per_layer_config={key: 32})


def test_windows_of_single_layers() -> None:
    fields = {"layer_types": [SLIDING, FULL, SLIDING, SLIDING], "sliding_window": 5}
    override = {"02": {"sliding_window": 9}, "1": {"sliding_window": None}}
    assert geometry(**fields, per_layer_config=override).windows == (5, 0, 9, 5)
    assert geometry(**fields, per_layer_config={1: {"sliding_window": 7}}).windows == (5, 0, 5, 5)
    with pytest.raises(GeometryError, match=r"sliding_window.*that 'layer_types' call sliding"):
        geometry(per_layer_config={1: {"sliding_window": 7}})
    with pytest.raises(GeometryError, match=r"sliding_window.*that 'layer_types' call sliding"):
        geometry(**fields, per_layer_config={0: {"sliding_window": None}})


def test_what_a_layer_that_shares_says_is_its_owners_business() -> None:
    fields = {"num_kv_shared_layers": 1, "per_layer_config": {"3": {"head_dim": 32}}}
    assert rows(geometry(**fields)) == rows(geometry(num_kv_shared_layers=1))
    fields["per_layer_config"] = {"2": {"head_dim": 32}}
    assert rows(geometry(**fields))[2] == (0, 2, 32, 32)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "mimo_v2_flash", "nanbeige"])
def test_fields_of_single_layers_are_read_or_refused(family: str) -> None:
    made = all_families()[family]
    with pytest.raises(UnknownLayerTypeError, match=r"per_layer_config\[0\].*head_dim"):
        CacheGeometry.from_hf({**made, "per_layer_config": {"0": {"head_dim": 96}}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"4": {}}, "keyed by layers, 0 to 3, once; got '4'"),
        ({"-1": {}}, "keyed by layers, 0 to 3, once; got '-1'"),
        ({"one": {}}, "keyed by layers, 0 to 3, once; got 'one'"),
        ({"1": {}, "01": {}}, "keyed by layers, 0 to 3, once; got '01'"),
        ({"1": {"head_dim": 0}}, "head_dim.*integer >= 1; got 0"),
        ({"1": {"kv_lora_rank": 16}}, "'kv_lora_rank' of its own .16."),
        ([{"head_dim": 3}], "per_layer_config.*an object"),
    ],
)
def test_malformed_fields_of_single_layers_are_refused(override: object, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        geometry(per_layer_config=override)


# Windows


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 6}, (6, 6, 6, 6)),
        ({"sliding_window": 7}, (7, 7, 7, 7)),
        ({"sliding_window": None}, (0, 0, 0, 0)),
        ({"sliding_window": 6, "use_sliding_window": True}, (6, 6, 6, 6)),
        ({"sliding_window": 6, "use_sliding_window": False}, (0, 0, 0, 0)),
        ({"sliding_window": 6, "sliding_window_pattern": 2}, (6, 0, 6, 0)),
        ({"sliding_window": 6, "sliding_window_pattern": 3}, (6, 6, 0, 6)),
        ({"sliding_window": 6, "sliding_window_pattern": 1}, (0, 0, 0, 0)),
        ({"sliding_window": 6, "sliding_window_pattern": "LLG"}, (6, 6, 0, 6)),
        ({"sliding_window": 6, "sliding_window_pattern": "GL"}, (0, 6, 0, 6)),
        ({"attention_chunk_size": 9}, (9, 9, 9, 9)),
        ({"sliding_window": 6, "layer_types": [FULL] * 3 + [SLIDING]}, (0, 0, 0, 6)),
        # A list that says so slides whatever the other fields say.
        (
            {
                "sliding_window": 6,
                "use_sliding_window": False,
                "layer_types": [FULL, SLIDING, FULL, FULL],
            },
            (0, 6, 0, 0),
        ),
        (
            {
                "sliding_window": 6,
                "attention_chunk_size": 9,
                "layer_types": [CHUNKED, FULL, SLIDING, "attention"],
            },
            (9, 0, 6, 0),
        ),
    ],
)
def test_windows(fields: Config, windows: tuple[int, ...]) -> None:
    assert geometry(**fields).windows == windows


def test_recurrent_layers_are_recorded_and_own_no_cache() -> None:
    made = geometry(layer_types=[LINEAR, FULL, "mamba", "conv"], linear_conv_kernel_dim=4)
    assert rows(made) == [(0, 2, 8, 8)]
    recurrent = ModelLayer(recurrent=True)
    assert made.model_layers == (recurrent, ModelLayer((0,)), recurrent, recurrent)


# Layers that share keys and values


@pytest.mark.parametrize("none", [0, None, "absent"])
def test_no_shared_layers_drop_none(none: object) -> None:
    made = geometry(num_kv_shared_layers=none)
    assert len(made.layers) == 4
    assert shares(made) == [None] * 4
    assert not any(layer.shared for layer in made.layers)


def test_a_shared_layer_reads_the_last_earlier_owner_of_its_type() -> None:
    fields = {
        "num_hidden_layers": 7,
        "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL, SLIDING],
        "sliding_window": 5,
    }
    made = geometry(**fields, num_kv_shared_layers=2)
    assert made.windows == (5, 0, 5, 0, 5)
    assert shares(made) == [None] * 5 + [3, 4]
    assert [layer.shared for layer in made.layers] == [False, False, False, True, True]
    made = geometry(**fields, num_kv_shared_layers=4)
    assert made.windows == (5, 0, 5)
    assert shares(made) == [None] * 3 + [1, 2, 1, 2]


@pytest.mark.parametrize("shared", [4, 5])
def test_at_least_one_layer_must_own_its_keys_and_values(shared: int) -> None:
    with pytest.raises(GeometryError, match=rf"num_kv_shared_layers.*less than .*got {shared}"):
        geometry(num_kv_shared_layers=shared)


def test_a_shared_layer_without_an_owner_of_its_type_is_refused() -> None:
    fields = {"layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 5}
    with pytest.raises(GeometryError, match=r"layer 3 .*flat layer"):
        geometry(**fields, num_kv_shared_layers=1)


# Refusals


@pytest.mark.parametrize("name", ["full", "Sliding_Attention", "hybrid", ""])
def test_an_unknown_layer_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownLayerTypeError, match=f"layer 2 .*'{name}'.*full_attention"):
        geometry(layer_types=[FULL, FULL, name, FULL])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ssm_state_size", 16),
        ("mamba_d_state", 16),
        ("linear_num_key_heads", 2),
        ("state_size", 16),
        ("full_attention_interval", 4),
        ("kv_lora_rank", 512),
        ("index_topk", 8),
        ("hybrid_override_pattern", "M*"),
        ("block_types", ["recurrent"]),
        ("num_loops", 2),
        ("use_cla", True),
        ("multi_query", True),
        ("num_key_value_heads_per_layer", [2, 2, 1, 1]),
        ("cross_attention_layers", [1]),
        ("num_attention_groups", 2),
        ("attn_type_list", [1, 0]),
        ("attention_window", 8),
        ("window_size", 8),
        ("attn_config", {"kv_n_heads": 2}),
        ("attention_type", "block_sparse"),
        ("is_causal", True),
        ("ssm_cfg", {"d_state": 16}),
        ("local_attention", 8),
        ("share_kv_every", 2),
        ("num_first_full_attention_layers", 2),
        ("type_vocab_size", 2),
        ("patch_size", 16),
        ("add_cross_attention", True),
        ("mask_token_id", 4),
        ("xlstm_chunk", 4),
        ("useMQA", True),
        ("qk_rope_head_dim", 64),
        ("token_mixer", "hyena"),
        ("use_yoco", True),
        ("layer_config", [{}]),
    ],
)
def test_an_unknown_family_with_another_kind_of_memory_is_refused(name: str, value: object) -> None:
    with pytest.raises(UnknownLayerTypeError, match=f"{name}.*model_families"):
        geometry(**{name: value, "model_type": "brand_new"})
    # A field that is there but says nothing does not count.
    assert len(geometry(**{name: None, "model_type": "brand_new"}).layers) == 4


def test_fields_that_change_no_cache_are_not_in_the_way() -> None:
    harmless = {
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "attn_implementation": "sdpa",
        "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 256,
        "use_qk_norm": True,
        "num_local_experts": 8,
        "shared_expert_intermediate_size": 64,
        "n_group": 8,
        "decoder_sparse_step": 1,
        "rope_local_base_freq": 10000.0,
        "image_token_index": 7,
        "chunk_size_feed_forward": 3,
        "use_cache": True,
        "parallel_attn": True,
        "clip_qkv": 8,
        "use_flash_attention_2": True,
        "mtp_layer_types": [FULL],
        "_attn_implementation_autoset": True,
        "auto_map": {"AutoModel": "modeling.Model"},
    }
    assert geometry(**harmless, model_type="brand_new") == geometry()


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "brand_new_encoder", "my_vision"])
def test_encoders_are_refused(model_type: str) -> None:
    with pytest.raises(UnknownLayerTypeError, match="attends to both sides"):
        geometry(model_type=model_type)
    assert geometry(model_type="my_vision_text") == geometry()
    with pytest.raises(UnknownLayerTypeError, match=r"brand_new is an encoder.*ForMaskedLM"):
        geometry(model_type="brand_new", architectures=["BrandNewForMaskedLM"])


@pytest.mark.parametrize("family", ["brand_new", "llama", "gemma3_text"])
def test_models_that_look_ahead_are_refused(family: str) -> None:
    fields = {"model_type": family, "head_dim": 8, "sliding_window": 5}
    for value in (True, "all"):
        with pytest.raises(UnknownLayerTypeError, match="attends to both sides"):
            geometry(**fields, use_bidirectional_attention=value)
    assert geometry(**fields, use_bidirectional_attention=False) == geometry(**fields)
    with pytest.raises(UnknownLayerTypeError, match="an encoder and a decoder"):
        geometry(**fields, is_encoder_decoder=True)
    outer = {"model_type": "outer", "is_encoder_decoder": True, "text_config": config(**fields)}
    with pytest.raises(UnknownLayerTypeError, match="outer is an encoder and a decoder"):
        CacheGeometry.from_hf(outer)


def test_layers_before_max_window_layers_attend_to_everything() -> None:
    fields = {"model_type": "brand_new", "sliding_window": 5, "use_sliding_window": True}
    assert geometry(**fields, max_window_layers=3).windows == (0, 0, 0, 5)
    assert geometry(**fields, max_window_layers=0).windows == (5, 5, 5, 5)
    assert geometry(**fields, max_window_layers=9).windows == (0, 0, 0, 0)
    fields["use_sliding_window"] = False
    assert geometry(**fields, max_window_layers=3).windows == (0, 0, 0, 0)
    fields["use_sliding_window"] = None
    with pytest.raises(GeometryError, match=r"use_sliding_window.*beside 'max_window_layers'"):
        geometry(**fields, max_window_layers=3)


BAD_INTEGERS = [0, -3, "8", 2.0, True, [8]]


@pytest.mark.parametrize("value", BAD_INTEGERS)
@pytest.mark.parametrize(
    "name",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "head_dim",
        "sliding_window",
        "attention_chunk_size",
        "global_head_dim",
    ],
)
def test_a_number_of_the_wrong_kind_names_field_value_and_what_is_expected(
    name: str, value: object
) -> None:
    with pytest.raises(GeometryError) as caught:
        geometry(**{name: value})
    message = str(caught.value)
    assert repr(name) in message
    assert repr(value) in message
    assert "an integer >= 1" in message


@pytest.mark.parametrize("value", [-1, "2", 1.5, True])
def test_a_malformed_number_of_shared_layers_is_refused(value: object) -> None:
    with pytest.raises(GeometryError, match=r"num_kv_shared_layers.*an integer >= 0"):
        geometry(num_kv_shared_layers=value)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(name: str) -> None:
    for value in ("absent", None):
        with pytest.raises(GeometryError, match=f"{name}.*it is missing"):
            geometry(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [FULL] * 3}, "each of the 4 layers, but it has 3 entries"),
        ({"layer_types": [FULL] * 5}, "each of the 4 layers, but it has 5 entries"),
        ({"layer_types": []}, "each of the 4 layers, but it has 0 entries"),
        ({"layer_types": FULL}, "'layer_types'.*a list of strings"),
        ({"layer_types": [FULL, FULL, FULL, 1]}, "'layer_types'.*a list of strings"),
        ({"layer_types": [SLIDING] * 4}, "'sliding_window'.*since there are ring layers"),
        ({"layer_types": [CHUNKED] * 4}, "'attention_chunk_size'.*since there are chunk layers"),
        ({"sliding_window_pattern": 2}, "'sliding_window'.*since there are ring layers"),
        ({"sliding_window": 4, "sliding_window_pattern": 0}, "sliding_window_pattern.*got 0"),
        ({"sliding_window": 4, "sliding_window_pattern": ""}, "letters L and G; got ''"),
        ({"sliding_window": 4, "sliding_window_pattern": "LX"}, "letters L and G; got 'LX'"),
        ({"use_sliding_window": "no"}, "use_sliding_window.*true or false; got 'no'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads.*divisor of the 8 query heads; got 3"),
        ({"num_attention_heads": 128, "hidden_size": 64}, "hidden_size.*at least"),
        ({"model_type": 7}, "'model_type' must be a string, got 7"),
        ({"text_config": [1]}, r"'text_config'.*got \[1\]"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(fields: Config, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        geometry(**fields)


# Where the config comes from


def test_a_path_to_the_file_or_its_directory_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(sliding_window=3)))
    for path in (file, tmp_path, str(file), str(tmp_path)):
        assert CacheGeometry.from_hf(path) == geometry(sliding_window=3)


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path, tmp_path / "no" / "model"):
        with pytest.raises(ModelNotFoundError, match=r"there is no config at .*config\.json"):
            CacheGeometry.from_hf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1, 2]", r"must be a JSON object, but it is \[1, 2\]"),
        (b"null", "must be a JSON object"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(GeometryError, match=message):
        CacheGeometry.from_hf(file)


@pytest.mark.parametrize("value", [None, 3, [config()], object()])
def test_something_that_is_no_config_is_refused(value: object) -> None:
    with pytest.raises(GeometryError, match="a transformers config object, a mapping, or the path"):
        CacheGeometry.from_hf(value)


def test_a_mapping_with_other_keys_than_names_is_read() -> None:
    assert CacheGeometry.from_hf({**config(), 3: "three"}) == geometry()


def test_a_nested_text_config_is_found_and_nothing_is_changed() -> None:
    text = config(sliding_window=3, model_type="brand_new_text")
    outer = {"model_type": "brand_new", "text_config": text, "hidden_size": 999}
    before = copy.deepcopy(outer)
    assert CacheGeometry.from_hf(outer) == geometry(sliding_window=3)
    assert outer == before


class ConfigObject:
    """As transformers' config objects behave."""

    def __init__(self, values: Config, text: object = None) -> None:
        self.values = values
        self.text = text

    def to_dict(self) -> Config:
        return self.values


class WithGetter(ConfigObject):
    def get_text_config(self) -> object:
        return self.text or self


class WithAttribute(ConfigObject):
    @property
    def text_config(self) -> object:
        return self.text


@pytest.mark.parametrize("kind", [ConfigObject, WithGetter, WithAttribute])
def test_a_config_object_is_read(kind: type[ConfigObject]) -> None:
    assert CacheGeometry.from_hf(kind(config(sliding_window=3))) == geometry(sliding_window=3)


@pytest.mark.parametrize("kind", [WithGetter, WithAttribute])
def test_the_text_part_of_a_config_object_is_read(kind: type[ConfigObject]) -> None:
    outer = kind({"model_type": "brand_new"}, ConfigObject(config(sliding_window=3)))
    assert CacheGeometry.from_hf(outer) == geometry(sliding_window=3)


@pytest.mark.parametrize("model_type", ["colqwen2", "qwen2_5_omni", "qwen3_omni_moe"])
def test_a_config_nested_twice_is_read_as_an_object_and_as_a_dict(model_type: str) -> None:
    from transformers import AutoConfig

    made = AutoConfig.for_model(model_type)
    found = CacheGeometry.from_hf(made.to_dict())
    assert found == CacheGeometry.from_hf(made)
    assert len(found.layers) == made.get_text_config().num_hidden_layers
    part = "vlm_config" if model_type == "colqwen2" else "thinker_config"
    with pytest.raises(GeometryError, match=f"'{part}' of {model_type} must be an object"):
        CacheGeometry.from_hf({"model_type": model_type, part: [1]})


def test_a_config_object_that_cannot_say_which_part_is_text_is_refused() -> None:
    class Ambiguous(ConfigObject):
        def get_text_config(self) -> object:
            raise ValueError("decoder or text_encoder")

    with pytest.raises(
        GeometryError, match=r"Ambiguous.*decoder or text_encoder.*that part itself"
    ):
        CacheGeometry.from_hf(Ambiguous(config()))


@pytest.mark.parametrize(
    ("model_type", "fields", "windows", "row"),
    [
        ("llama", {"num_key_value_heads": 4, "num_attention_heads": 8}, (0,) * 4, (4, 8)),
        (
            "gemma3_text",
            {"sliding_window": 5, "sliding_window_pattern": 2, "head_dim": 16},
            (5, 0, 5, 0),
            (4, 16),
        ),
        ("gpt_oss", {"sliding_window": 5, "head_dim": 16}, (5, 0, 5, 0), (8, 16)),
        ("qwen3_next", {"head_dim": 16}, (0,), (2, 16)),
        ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 2}, (0,) * 4, (2, 8)),
    ],
)
def test_config_objects_of_transformers(
    model_type: str, fields: Config, windows: tuple[int, ...], row: tuple[int, int]
) -> None:
    from transformers import AutoConfig

    made = AutoConfig.for_model(model_type, num_hidden_layers=4, hidden_size=64, **fields)
    traced = CacheGeometry.from_hf(made)
    assert traced.windows == windows
    assert {(layer.kv_heads, layer.key_dim) for layer in traced.layers} == {row}


def test_wrapped_config_objects_of_transformers() -> None:
    from transformers import AutoConfig

    text = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": [SLIDING, FULL] * 2,
        "global_head_dim": 32,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
    }
    made = CacheGeometry.from_hf(AutoConfig.for_model("gemma4", text_config=text))
    assert rows(made) == [(5, 4, 16, 16), (0, 2, 32, 32)] * 2
    nested = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "sliding_window": 5}
    text = {"model_type": "ministral3", **nested}
    wrapped = AutoConfig.for_model("mistral3", text_config=text)
    alone = AutoConfig.for_model("ministral3", **nested)
    assert CacheGeometry.from_hf(wrapped).windows == (5, 0, 5, 0)
    assert CacheGeometry.from_hf(alone).windows == (5, 0, 5, 0)
    # In mlx-lm the wrapper decides, though its text part alone would slide.
    assert CacheGeometry.of_mlx_lm(wrapped).windows == (0,) * 4
    assert CacheGeometry.of_mlx_lm(alone).windows == (5, 0, 5, 0)


# Families


def test_gemma3_relies_on_the_defaults_of_its_text_model() -> None:
    # What the config.json of a released gemma-3-4b says about its text model.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    made = CacheGeometry.from_hf({"model_type": "gemma3", "text_config": text})
    full = [index for index, window in enumerate(made.windows) if not window]
    assert full == [5, 11, 17, 23, 29]
    assert set(rows(made)) == {(0, 4, 256, 256), (1024, 4, 256, 256)}
    # The text model alone has other defaults.
    assert set(rows(CacheGeometry.from_hf(text))) == {(0, 1, 256, 256), (1024, 1, 256, 256)}


def test_a_wrapper_without_its_text_config_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"'text_config' of gemma3.*it is missing"):
        CacheGeometry.from_hf({"model_type": "gemma3", "hidden_size": 64})


@pytest.mark.parametrize(
    ("model_type", "own"), [("gemma3_text", "sliding_window_pattern"), ("qwen3_next", "interval")]
)
def test_layer_types_against_the_familys_own_field(model_type: str, own: str) -> None:
    own = "full_attention_interval" if own == "interval" else own
    other = SLIDING if model_type == "gemma3_text" else LINEAR
    fields = {"model_type": model_type, "head_dim": 16, "sliding_window": 5}
    two = [other, FULL] * 2
    by_list = geometry(**fields, layer_types=two)
    assert by_list == geometry(**fields, **{own: 2})
    assert by_list == geometry(**fields, **{own: 2}, layer_types=two)
    assert by_list != geometry(**fields, **{own: 3})
    with pytest.raises(GeometryError, match=f"{own}.*contradict each other at layer 1"):
        geometry(**fields, **{own: 3}, layer_types=two)


@pytest.mark.parametrize(
    ("model_type", "row"),
    [
        ("deepseek_v3", (0, 1, 32, 4)),
        ("kimi_k2", (0, 1, 32, 4)),
        ("deepseek_v2", (0, 8, 12, 6)),
        ("minicpm3", (0, 8, 12, 8)),
    ],
)
def test_mla_caches_its_latent_or_what_it_expands_to(model_type: str, row: tuple[int, ...]) -> None:
    mla = {"kv_lora_rank": 32, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    assert rows(geometry(model_type=model_type, **mla)) == [row] * 4


def test_two_cache_layers_for_one_model_layer() -> None:
    made = geometry(
        model_type="deepseek_v32", kv_lora_rank=32, qk_rope_head_dim=4, index_head_dim=6
    )
    assert rows(made) == [(0, 1, 32, 4), (0, 1, 6, 6)] * 4
    assert [layer.caches for layer in made.model_layers] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_sparse_layers_of_minimax_m3_have_an_indexer() -> None:
    text = config(head_dim=16, index_block_size=4, index_head_dim=6)
    wrapped = {"model_type": "minimax_m3_vl", "text_config": text}
    sparse, dense = [(0, 2, 16, 16), (0, 1, 6, 0)], [(0, 2, 16, 16)]
    assert rows(CacheGeometry.from_hf(wrapped)) == sparse * 4
    text["sparse_attention_freq"] = [0, 1, 1, 0]
    assert rows(CacheGeometry.from_hf(wrapped)) == dense + sparse * 2 + dense
    # layer_types and the nested spelling go first.
    text["sparse_attention_config"] = {"sparse_index_dim": 7, "sparse_attention_freq": [1, 0, 0, 0]}
    assert rows(CacheGeometry.from_hf(wrapped)) == dense[:1] + [(0, 1, 7, 0)] + dense * 3
    text["layer_types"] = [FULL, FULL, FULL, "minimax_m3_sparse"]
    assert rows(CacheGeometry.from_hf(wrapped)) == dense * 4 + [(0, 1, 7, 0)]
    text["layer_types"] = [FULL, FULL, FULL, "sparse"]
    with pytest.raises(UnknownLayerTypeError, match="'sparse'"):
        CacheGeometry.from_hf(wrapped)


def test_a_looped_model_has_a_cache_for_each_pass() -> None:
    made = geometry(model_type="iquestloopcoder", head_dim=8, loop_window_size=5)
    assert made.windows == (0,) * 4 + (5,) * 4
    assert made.model_layers[1] == ModelLayer((1, 5))
    assert len(geometry(model_type="nanbeige", num_loops=3).layers) == 12
    assert len(geometry(model_type="nanbeige", num_loops=1).layers) == 4


def test_layers_that_only_compute_own_nothing() -> None:
    made = geometry(model_type="nemotron_h", hybrid_override_pattern="M-*E*")
    assert [layer.caches for layer in made.model_layers] == [(), (), (0,), (), (1,)]
    assert [layer.recurrent for layer in made.model_layers] == [True] + [False] * 4
    spelled = ["mamba", "mlp", "attention", "moe", "full_attention"]
    assert geometry(model_type="nemotron_h", layers_block_type=spelled) == made
    with pytest.raises(UnknownLayerTypeError, match=r"block 1 .*'X'"):
        geometry(model_type="nemotron_h", hybrid_override_pattern="MX*")


def test_chunked_attention_is_a_ring_of_one_chunk() -> None:
    text = config(head_dim=8, attention_chunk_size=16)
    wrapped = {"model_type": "llama4", "text_config": text}
    for made in (CacheGeometry.from_hf(wrapped), CacheGeometry.of_mlx_lm(wrapped)):
        assert made.windows == (16, 16, 16, 0)
    # The layers with a rotary embedding; mlx-lm knows only the usual order.
    text["no_rope_layers"] = [1, 0, 1, 0]
    assert CacheGeometry.from_hf(wrapped).windows == (16, 0, 16, 0)
    text["no_rope_layers"] = [1, 0]
    with pytest.raises(GeometryError, match=r"no_rope_layers.*a list of 4"):
        CacheGeometry.from_hf(wrapped)
    text["no_rope_layers"] = None
    text["attention_chunk_size"] = None
    assert CacheGeometry.from_hf(wrapped).windows == (0, 0, 0, 0)
    with pytest.raises(GeometryError, match="attention_chunk_size"):
        CacheGeometry.of_mlx_lm(wrapped)


@pytest.mark.parametrize("wrapper", ["mistral3", "llava", "pixtral"])
def test_a_wrapper_of_any_text_model_attends_as_that_does(wrapper: str) -> None:
    text = config(model_type="ministral3", layer_types=[SLIDING, FULL] * 2, sliding_window=5)
    wrapped = {"model_type": wrapper, "text_config": text}
    assert CacheGeometry.from_hf(text).windows == (5, 0, 5, 0)
    assert CacheGeometry.from_hf(wrapped).windows == (5, 0, 5, 0)
    assert CacheGeometry.of_mlx_lm(wrapped).windows == (0, 0, 0, 0)
    text["model_type"] = "brand_new"
    assert CacheGeometry.from_hf(wrapped).windows == (5, 0, 5, 0)
    text["kv_lora_rank"] = 3
    with pytest.raises(UnknownLayerTypeError, match="kv_lora_rank"):
        CacheGeometry.from_hf(wrapped)


ON = {"sliding_window": 5, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("model_type", "fields", "attended"),
    [
        *((name, {"sliding_window": 5}, (5, 5, 5, 5)) for name in ("mistral", "mixtral", "phi3")),
        *((name, {"sliding_window": 5}, (5, 5, 5, 5)) for name in ("starcoder2", "phimoe")),
        *((name, {"sliding_window": None}, (0, 0, 0, 0)) for name in ("mistral", "phi3")),
        ("ministral3", {"sliding_window": 5}, (5, 5, 5, 5)),
        ("mistral", {"sliding_window": 5, "layer_types": [SLIDING, FULL] * 2}, (5, 0, 5, 0)),
        *((name, {**ON, "max_window_layers": 1}, (0, 5, 5, 5)) for name in ("qwen2", "qwen3")),
        *((name, {**ON, "max_window_layers": 1}, (0, 5, 5, 5)) for name in ("qwen2_vl",)),
        *((name, ON, (0, 0, 0, 0)) for name in ("qwen2", "qwen3", "qwen2_5_vl")),
        *((name, {"sliding_window": 5}, (0, 0, 0, 0)) for name in ("qwen2", "qwen3", "qwen3_moe")),
        ("qwen2", {**ON, "use_sliding_window": False, "max_window_layers": 1}, (0, 0, 0, 0)),
        ("qwen2", {"layer_types": [FULL, SLIDING] * 2, "sliding_window": 5}, (0, 5, 0, 5)),
        ("qwen2_moe", ON, (5, 0, 5, 0)),
        ("qwen2_moe", {**ON, "max_window_layers": 1}, (5, 0, 0, 0)),
        ("qwen3_moe", ON, (5, 5, 5, 5)),
        ("dots1", {"sliding_window": 5}, (0, 0, 0, 0)),
        ("dots1", {"sliding_window": 5, "max_window_layers": 3}, (0, 0, 0, 5)),
        ("dots1", {"max_window_layers": 3}, (0, 0, 0, 4096)),
        ("gemma2", {"sliding_window": 5}, (5, 0, 5, 0)),
        ("gemma2", {}, (4096, 0, 4096, 0)),
        ("smollm3", {"sliding_window": 5}, (0, 0, 0, 0)),
        ("smollm3", ON, (0, 0, 0, 5)),
        ("smollm3", {**ON, "no_rope_layers": [1, 0, 0, 1]}, (0, 5, 5, 0)),
        ("llama4_text", {"attention_chunk_size": 16}, (16, 16, 16, 0)),
        ("llama4_text", {}, (8192, 8192, 8192, 0)),
    ],
)
def test_windows_that_mlx_lm_does_not_cache_by(
    model_type: str, fields: Config, attended: tuple[int, ...]
) -> None:
    made = config(model_type=model_type, head_dim=8, **fields)
    assert CacheGeometry.from_hf(made).windows == attended
    kept = CacheGeometry.of_mlx_lm(made)
    if "layer_types" in fields and model_type == "mistral":
        assert kept.windows == attended
    else:
        assert kept.windows == (0, 0, 0, 0)


def test_mimo_v2_flash_sees_one_position_more_than_its_window_size() -> None:
    made = all_families()["mimo_v2_flash"]
    size, pattern = made["sliding_window_size"], made["hybrid_layer_pattern"]
    windows = tuple((size + 1) * slides for slides in pattern)
    assert CacheGeometry.from_hf(made).windows == windows
    assert CacheGeometry.of_mlx_lm(made).windows == tuple(size * slides for slides in pattern)
    # The standard field, where both are there, is the same number.
    assert CacheGeometry.from_hf({**made, "sliding_window": size}).windows == windows
    # As transformers saves it: layer_types, and a window that counts the query.
    saved = config(model_type="mimo_v2_flash", head_dim=24, v_head_dim=16)
    saved |= {"layer_types": [FULL, SLIDING] * 2, "sliding_window": 129}
    assert rows(CacheGeometry.from_hf(saved)) == [(0, 2, 24, 16), (129, 4, 24, 16)] * 2


def test_absent_fields_of_gemma4_mean_other_things_to_mlx_lm() -> None:
    fields = {"model_type": "gemma4_text", "head_dim": 8}
    for count, owned in ((4, 4), (20, 20), (25, 5)):
        # An absent field means 20 to mlx-lm, which needs more layers than that.
        made = config(**fields, num_hidden_layers=count)
        assert len(CacheGeometry.of_mlx_lm(made).layers) == owned
        assert len(CacheGeometry.from_hf(made).layers) == count
        for verb in (CacheGeometry.of_mlx_lm, CacheGeometry.from_hf):
            assert len(verb({**made, "num_kv_shared_layers": 0}).layers) == count
    made = config(**fields, num_hidden_layers=14, sliding_window=5)
    assert CacheGeometry.from_hf(made).windows == ((5,) * 5 + (0,)) * 2 + (5, 0)
    assert CacheGeometry.of_mlx_lm(made).windows == ((5,) * 4 + (0,)) * 2 + (5,) * 4
    made["sliding_window_pattern"] = 2
    assert CacheGeometry.from_hf(made) == CacheGeometry.of_mlx_lm(made)


def test_gemma3n_has_to_say_how_many_layers_share() -> None:
    fields = {"model_type": "gemma3n_text", "head_dim": 8, "sliding_window": 5}
    fields["layer_types"] = [SLIDING, FULL, SLIDING, FULL]
    for none in (0, None):
        assert len(geometry(**fields, num_kv_shared_layers=none).layers) == 4
    assert len(geometry(**fields, num_kv_shared_layers=1).layers) == 3
    with pytest.raises(GeometryError, match=r"'num_kv_shared_layers' of gemma3n.*missing"):
        geometry(**fields)


@pytest.mark.parametrize("model_type", ["afmoe", "exaone_moe", "muse_spark_text"])
def test_layer_types_that_neither_side_can_do_without(model_type: str) -> None:
    fields = {"model_type": model_type, "head_dim": 8, "sliding_window": 5}
    for verb in (CacheGeometry.of_mlx_lm, CacheGeometry.from_hf):
        assert verb(config(**fields, layer_types=[SLIDING, FULL] * 2)).windows == (5, 0, 5, 0)
        with pytest.raises(GeometryError, match=f"'layer_types' of {model_type}.*missing"):
            verb(config(**fields))


def test_a_renamed_field_is_read_and_named() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 32}
    assert rows(CacheGeometry.from_hf(gpt2)) == [(0, 4, 8, 8)] * 3
    with pytest.raises(GeometryError, match=r"'n_head' of gpt2 .*got 0"):
        CacheGeometry.from_hf({**gpt2, "n_head": 0})
    standard = {"model_type": "exaone", **config(head_dim=8)}
    assert len(CacheGeometry.from_hf(standard).layers) == 4


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "mamba2", "rwkv7"])
def test_purely_recurrent_families_are_refused(model_type: str) -> None:
    with pytest.raises(GeometryError, match="purely recurrent"):
        geometry(model_type=model_type)


def test_a_family_with_a_cache_of_its_own_is_refused() -> None:
    with pytest.raises(UnknownLayerTypeError, match="cache of its own"):
        geometry(model_type="deepseek_v41")


def test_an_architecture_can_decide_between_two_rules() -> None:
    fields = {"model_type": "bailing_hybrid", "layer_group_size": 2, "kv_lora_rank": 32}
    with pytest.raises(GeometryError, match="qk_rope_head_dim"):
        geometry(**fields)
    made = geometry(**fields, architectures=["BailingMoeV3ForCausalLM"])
    assert rows(made) == [(0, 1, 32, 64)] * 2
    assert [layer.recurrent for layer in made.model_layers] == [True, False, True, False]


def test_a_linear_attention_in_a_family_without_one_is_refused() -> None:
    with pytest.raises(UnknownLayerTypeError, match="'linear_attention'"):
        geometry(model_type="llama", layer_types=[LINEAR, FULL, FULL, FULL])
    with pytest.raises(UnknownLayerTypeError, match="'linear_attention'"):
        geometry(model_type="minimax", layer_types=[LINEAR, FULL, FULL, FULL])


def test_more_layers_than_any_model_has_are_refused_at_once() -> None:
    with pytest.raises(GeometryError, match="num_hidden_layers"):
        geometry(num_hidden_layers=10**9)

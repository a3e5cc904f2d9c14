"""For every config class of transformers: what `from_hf` says is what `DynamicCache` would make.

The judge is transformers' own `get_layer_types_and_kwargs`, from which `DynamicCache(config=...)`
makes its layers. Its module imports torch, which is no dependency, so the function is taken out of
the source and run by itself; it needs nothing but the config.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from mlx_kvcache.errors import GeometryError
from mlx_kvcache.facts.geometry import CacheGeometry, ModelLayer

#: The version whose classes the tables below describe; others have some more or fewer.
VERSION = "5.24"
TABLES_APPLY = pytest.mark.skipif(
    not transformers.__version__.startswith(VERSION),
    reason=f"the tables describe transformers {VERSION}, and {transformers.__version__} is here",
)

#: One layer: its window (0: all rows, None: no rows), and whether it has a state.
Layer = tuple[int | None, bool]
#: The classes of `DYNAMIC_LAYER_TYPE_MAPPING`.
SLIDES = {"DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
STATE_ONLY = {"LinearAttentionLayer"}
NOTHING = {"DummyLayer"}

#: Classes that generate text, by the lists of transformers' Auto classes.
GENERATES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)

#: model_type -> why `from_hf` answers other layers than transformers' cache has.
DIFFERENT = {
    "deepseek_v32": "mlx-lm keeps the indexer's keys in a second cache layer, transformers beside",
    "glm_moe_dsa": "mlx-lm keeps the indexer's keys in a second cache layer, transformers beside",
    "longcat_flash": "transformers counts the two attentions of a layer as two layers",
}

#: Why a text generator is refused, what its error says, and the model types.
REFUSED: list[tuple[str, str, str]] = [
    (
        "keeps the encoder's keys and values too",
        "is an encoder and a decoder",
        "bart bigbird_pegasus blenderbot blenderbot-small canary cohere_asr dia encoder-decoder "
        "florence2 fsmt led longt5 m2m_100 marian mbart moonshine moonshine_streaming mt5 mvp "
        "nllb-moe pegasus pegasus_x pix2struct plbart pop2piano pp_formulanet prophetnet "
        "seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5 "
        "switch_transformers t5 t5gemma t5gemma2 udop umt5 vision-encoder-decoder whisper",
    ),
    (
        "an encoder that has a decoding head as well",
        "is an encoder by the names of its model|type_vocab_size'|'attention_type'",
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert "
        "modernbert-decoder rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta "
        "xlm-roberta-xl xmod",
    ),
    (
        "attends to both sides of its prefix",
        "attends to both sides",
        "paligemma pi0",
    ),
    (
        "calls its number of layers otherwise, and mlx-lm has no file that would say how",
        "'num_hidden_layers' of .*it is missing",
        "bloom blt codegen ctrl gpt_neo kosmos-2 kosmos-2.5 mpt openai-gpt trocr xglm xlm xlnet",
    ),
    (
        "sparse attention keeps an indexer's keys, of which the layer type says nothing",
        "layer type 'indexed_attention'",
        "axk2 dots3_note dots3_note_text glm5_next hy_v4 hy_v4_vl mistral_large4 qwen4_exp "
        "qwen4_exp_text",
    ),
    (
        "a state beside the attention of a layer",
        "layer type 'hybrid(_sliding)?'",
        "inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text "
        "zaya",
    ),
    (
        "other layer types than attention, windows, chunks and states",
        "layer type '(heavily_compressed_attention|mlp|reference_sliding_attention)'",
        "deepseek_v4 dory unlimited_ocr",
    ),
    (
        "a latent, kept as such or expanded: there is no generic answer",
        "'kv_lora_rank'",
        "axk1 sarvam_mla youtu",
    ),
    (
        "purely recurrent",
        "purely recurrent|'attention_hidden_size'|'chunk_size'",
        "falcon_mamba granitemoehybrid mamba mamba2 rwkv xlstm",
    ),
    (
        "states without a list of layer types that says where, or of types unknown to the family",
        "'mamba_chunk_size'|'attention_head_dim'|'linear_attention'|'layer_types' of lfm2_moe",
        "bamba lfm2_moe minimax zamba zamba2",
    ),
    (
        "some layers attend to an encoder's rows",
        "'cross_\\w+'|'encoder_hidden_size'|'aligner_num_add_layers'|'audio_encoder_config'",
        "blip evolla idefics mllama moshi",
    ),
    (
        "KV heads, head dims or windows under names of its own",
        "'(dim_head|multi_query|kv_channels|attention_head_size|keep_window_size"
        "|num_layers_per_stack|prefix_dense_sliding_window_pattern)'",
        "cohere2_moe cpmant doge falcon hrm_text jetmoe reformer",
    ),
    (
        "reads the rows of another model and owns none",
        "'num_kv_shared_layers' .*less than the number of layers",
        "gemma4_unified_assistant",
    ),
    (
        "two text models of equal right",
        "does not say which of its parts",
        "musicgen musicgen_melody",
    ),
]

#: Classes that generate no text by the lists above, and are answered all the same.
PARTS = {
    "blt_global_transformer": "a causal part of blt",
    "blt_patcher": "a causal part of blt",
    "csm_depth_decoder_model": "a causal part of csm",
    "moshi_depth": "a causal part of moshi",
    "nemotron3_5_transcribe_word_timestamp": "a causal part of a transcriber",
    "qwen3_omni_moe_talker_text": "a causal part of qwen3_omni_moe",
    "glm_image": "generates the tokens of images",
    "glm_image_text": "generates the tokens of images",
}


@functools.cache
def source() -> ast.Module:
    file = Path(transformers.__file__).parent / "cache_utils.py"
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def layer_types_and_kwargs() -> Callable[[Any], tuple[list[str], list[dict[str, Any]]]]:
    """transformers' own function, without the module around it."""
    name = "get_layer_types_and_kwargs"
    found = next(
        node for node in source().body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    annotations = ast.parse("from __future__ import annotations").body
    names: dict[str, Any] = {}
    exec(compile(ast.Module([*annotations, found], []), "cache_utils.py", "exec"), names)
    made: Callable[[Any], tuple[list[str], list[dict[str, Any]]]] = names[name]
    return made


@functools.cache
def layer_classes() -> dict[str, str]:
    """Which class `DynamicCache` makes for a layer type."""
    for node in source().body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["DYNAMIC_LAYER_TYPE_MAPPING"]:
                pairs = zip(node.value.keys, node.value.values, strict=True)
                return {
                    str(key.value): value.id
                    for key, value in pairs
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Name)
                }
    raise AssertionError("cache_utils.py has no DYNAMIC_LAYER_TYPE_MAPPING")


def theirs(config: Any) -> list[Layer]:
    """The layers of transformers' cache."""
    layers: list[Layer] = []
    types, kwargs = layer_types_and_kwargs()(config.get_text_config(decoder=True))
    for layer_type, arguments in zip(types, kwargs, strict=True):
        made = layer_classes()[layer_type]
        if made in NOTHING | STATE_ONLY:
            layers.append((None, made in STATE_ONLY))
        else:
            window = arguments["sliding_window"] if made in SLIDES else 0
            layers.append((window, made.startswith("LinearAttention")))
    return layers


def ours(geometry: CacheGeometry) -> list[Layer]:
    """The layers of a geometry; one that reads another's rows has none of its own."""

    def layer(entry: ModelLayer) -> Layer:
        owned = [] if entry.shares else [geometry.layers[index] for index in entry.caches]
        if len(owned) > 1:
            return -len(owned), entry.recurrent
        return (owned[0].policy.window if owned else None), entry.recurrent

    return [layer(entry) for entry in geometry.model_layers]


def built(name: str, **fields: Any) -> Any:
    """A config of that class with its defaults but for `fields`; None where it needs arguments."""
    try:
        config = CONFIG_MAPPING[name](**fields)
        config.get_text_config(decoder=True)
    except Exception:
        return None
    return config


@functools.cache
def defaults() -> dict[str, Any]:
    found = {name: built(name) for name in CONFIG_MAPPING_NAMES}
    return {name: config for name, config in found.items() if config is not None}


@functools.cache
def generators() -> frozenset[str]:
    # As a module: the package answers a stand-in for it where torch is missing.
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return frozenset(
        name for mapping in GENERATES for name in getattr(auto, mapping) if name in defaults()
    )


@functools.cache
def answers() -> dict[str, CacheGeometry | GeometryError]:
    found: dict[str, CacheGeometry | GeometryError] = {}
    for name, config in defaults().items():
        try:
            found[name] = CacheGeometry.from_hf(config)
        except GeometryError as error:
            found[name] = error
    return found


def accepted() -> Iterator[tuple[str, CacheGeometry]]:
    for name, answer in answers().items():
        if isinstance(answer, CacheGeometry):
            yield name, answer


def reasons() -> dict[str, tuple[str, str]]:
    """model_type -> why it is refused, and what the error says."""
    listed = [(name, row) for row in REFUSED for name in row[2].split()]
    assert len(dict(listed)) == len(listed), "a model type stands in two rows"
    return {name: (reason, pattern) for name, (reason, pattern, _) in listed}


def test_the_judge_judges() -> None:
    """The layers of models that everybody knows, so that agreement below means something."""
    assert theirs(defaults()["llama"]) == [(0, False)] * 32
    assert theirs(defaults()["mistral"]) == [(4096, False)] * 32
    assert theirs(defaults()["gpt_oss"]) == [(128, False), (0, False)] * 18
    assert theirs(defaults()["qwen3_next"])[:4] == [(None, True)] * 3 + [(0, False)]
    assert theirs(defaults()["gemma3n_text"])[-1] == (None, False)
    for name in ("mistral", "gemma2", "llama4_text"):
        kept = CacheGeometry.of_mlx_lm(defaults()[name])
        assert ours(kept) != theirs(defaults()[name])


def test_what_is_answered_is_what_transformers_caches() -> None:
    compared = 0
    different = {}
    for name, geometry in accepted():
        if ours(geometry) != theirs(defaults()[name]):
            different[name] = (ours(geometry), theirs(defaults()[name]))
        compared += 1
    assert {name: layers for name, layers in different.items() if name not in DIFFERENT} == {}
    assert set(DIFFERENT) - set(different) == set(), "explained, but it no longer differs"
    assert compared > 200
    windows = {window for _, geometry in accepted() for window in geometry.windows}
    assert len(windows) > 10


@TABLES_APPLY
def test_every_refusal_of_a_text_generator_is_explained() -> None:
    refused = {name: error for name, error in answers().items() if name in generators()}
    messages = {
        name: str(error) for name, error in refused.items() if isinstance(error, GeometryError)
    }
    explained = reasons()
    assert set(messages) - set(explained) == set(), "refused without an explanation"
    assert set(explained) - set(messages) == set(), "explained, but no longer refused"
    for name, (reason, pattern) in explained.items():
        assert re.search(pattern, messages[name]), (name, reason, messages[name])
    assert len(generators()) > 300


@TABLES_APPLY
def test_what_generates_no_text_is_refused() -> None:
    """Encoders, image and audio models; text parts of a generator are answered as that is."""
    texts = {defaults()[name].get_text_config(decoder=True).model_type for name in generators()}
    others = {
        name
        for name, _ in accepted()
        if defaults()[name].get_text_config(decoder=True).model_type not in texts
    }
    assert others == set(PARTS)


#: Fields of a class that move its windows, and values unlike the defaults.
MOVED: list[dict[str, Any]] = [
    {"sliding_window": 7},
    {"use_sliding_window": True, "sliding_window": 7},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    {"use_sliding_window": False, "sliding_window": 7},
    {"attention_chunk_size": 9},
    {"attention_chunk_size": None},
    {"no_rope_layer_interval": 3},
    {"num_kv_shared_layers": 2},
    {"num_hidden_layers": 5},
]


def test_answers_move_with_the_fields_of_the_class() -> None:
    """Each class with other windows, where it declares the fields for them."""
    compared = moved = 0
    for name, geometry in accepted():
        if name in DIFFERENT:
            continue
        declared = {field for each in type(defaults()[name]).__mro__ for field in vars(each)}
        for fields in MOVED:
            config = built(name, **fields) if set(fields) <= declared else None
            if config is None:
                continue
            try:
                made = CacheGeometry.from_hf(config)
            except GeometryError:
                # Stricter than transformers is fine.
                continue
            assert ours(made) == theirs(config), (name, fields)
            compared += 1
            moved += ours(made) != ours(geometry)
    assert compared > 180
    assert moved > 150


def test_a_dict_says_what_the_object_says() -> None:
    for name, geometry in accepted():
        assert CacheGeometry.from_hf(defaults()[name].to_dict()) == geometry, name

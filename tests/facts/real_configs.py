"""Configs of public models, values only, and the cache layers that each model's description says.

The layers are written by hand from what the models' papers and cards say (so many layers, every
sixth of them full, ...), never worked out of the config beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Config = dict[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Layer:
    """A model layer: (window, KV heads, key dim, value dim) of each cache that it owns.

    reads: the cache layer that it reads and does not own. state: whether it has a recurrent state.
    """

    rows: tuple[tuple[int, int, int, int], ...] = ()
    reads: int | None = None
    state: bool = False


def full(heads: int, dim: int, values: int | None = None) -> Layer:
    return sliding(0, heads, dim, values)


def sliding(window: int, heads: int, dim: int, values: int | None = None) -> Layer:
    return Layer(((window, heads, dim, dim if values is None else values),))


def reads(cache: int) -> Layer:
    return Layer(reads=cache)


STATE = Layer(state=True)
NOTHING = Layer()


def decoder(
    model_type: str, hidden: int, layers: int, heads: int, kv: int | None = None, **others: Any
) -> Config:
    """A config under the usual names."""
    config = {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }
    return config if kv is None else {**config, "num_key_value_heads": kv}


def qwen(model_type: str, *sizes: int, window: int = 32768, upper: int, **others: Any) -> Config:
    """A Qwen config: its window is there and switched off."""
    off = {"use_sliding_window": False, "max_window_layers": upper, "sliding_window": window}
    return decoder(model_type, *sizes, **off, **others)


def gemma3(hidden: int, layers: int, **others: Any) -> Config:
    """A multimodal Gemma 3 config, whose text part leaves out what is its default."""
    text = {"model_type": "gemma3_text", "hidden_size": hidden, "num_hidden_layers": layers}
    return {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024, **others}}


def gemma3n(layers: int, shared: int) -> Config:
    types = ([SLIDING] * 4 + [FULL]) * (layers // 5)
    text = decoder("gemma3n_text", 2048, layers, 8, 2, head_dim=256, sliding_window=512)
    text |= {
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": 256,
    }
    return {"model_type": "gemma3n", "text_config": text}


def gpt_oss(layers: int) -> Config:
    types = [SLIDING, FULL] * (layers // 2)
    sizes = decoder("gpt_oss", 2880, layers, 64, 8, head_dim=64, sliding_window=128)
    return {**sizes, "layer_types": types, "initial_context_length": 4096}


def llama4() -> Config:
    text = decoder("llama4_text", 5120, 48, 40, 8, head_dim=128, attention_chunk_size=8192)
    return {"model_type": "llama4", "text_config": {**text, "no_rope_layers": []}}


def deepseek(model_type: str, hidden: int, layers: int, heads: int, **others: Any) -> Config:
    """A config with latent attention; its num_key_value_heads says nothing."""
    latent = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    return decoder(model_type, hidden, layers, heads, heads, **latent, **others)


def _kimi_linear() -> Config:
    attending = [4, 8, 12, 16, 20, 24, 27]
    linear = [number for number in range(1, 28) if number not in attending]
    config = deepseek("kimi_linear", 2304, 27, 32)
    return {
        **config,
        "linear_attn_config": {
            "full_attn_layers": attending,
            "kda_layers": linear,
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    }


def _mimo_v2_flash() -> Config:
    pattern = [0 if index == 0 or (index + 1) % 6 == 0 else 1 for index in range(48)]
    return decoder(
        "mimo_v2_flash",
        4096,
        48,
        64,
        4,
        head_dim=192,
        v_head_dim=128,
        swa_num_attention_heads=64,
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
        sliding_window=128,
        sliding_window_size=128,
        hybrid_layer_pattern=pattern,
    )


#: Model -> (its config, its layers).
REAL: dict[str, tuple[Config, list[Layer]]] = {
    # Plain decoders.
    "Llama-2-7b": (decoder("llama", 4096, 32, 32, 32), [full(32, 128)] * 32),
    "Llama-2-70b": (decoder("llama", 8192, 80, 64, 8), [full(8, 128)] * 80),
    "Meta-Llama-3-8B": (decoder("llama", 4096, 32, 32, 8), [full(8, 128)] * 32),
    "Llama-3.1-70B": (decoder("llama", 8192, 80, 64, 8), [full(8, 128)] * 80),
    "Llama-3.1-405B": (decoder("llama", 16384, 126, 128, 8), [full(8, 128)] * 126),
    "Llama-3.2-1B": (decoder("llama", 2048, 16, 32, 8, head_dim=64), [full(8, 64)] * 16),
    "Llama-3.2-3B": (decoder("llama", 3072, 28, 24, 8, head_dim=128), [full(8, 128)] * 28),
    "TinyLlama-1.1B": (decoder("llama", 2048, 22, 32, 4), [full(4, 64)] * 22),
    "Yi-34B": (decoder("llama", 7168, 60, 56, 8), [full(8, 128)] * 60),
    "SOLAR-10.7B": (decoder("llama", 4096, 48, 32, 8), [full(8, 128)] * 48),
    "Falcon3-7B": (decoder("llama", 3072, 28, 12, 4, head_dim=256), [full(4, 256)] * 28),
    "SmolLM2-135M": (decoder("llama", 576, 30, 9, 3), [full(3, 64)] * 30),
    "SmolLM2-1.7B": (decoder("llama", 2048, 24, 32, 32), [full(32, 64)] * 24),
    "gemma-2b": (decoder("gemma", 2048, 18, 8, 1, head_dim=256), [full(1, 256)] * 18),
    "gemma-7b": (decoder("gemma", 3072, 28, 16, 16, head_dim=256), [full(16, 256)] * 28),
    "phi-2": (decoder("phi", 2560, 32, 32, 32), [full(32, 80)] * 32),
    "OLMo-2-1124-7B": (decoder("olmo2", 4096, 32, 32, 32), [full(32, 128)] * 32),
    "OLMo-2-0325-32B": (decoder("olmo2", 5120, 64, 40, 8), [full(8, 128)] * 64),
    "OLMoE-1B-7B": (decoder("olmoe", 2048, 16, 16, 16), [full(16, 128)] * 16),
    "granite-3.1-8b": (decoder("granite", 4096, 40, 32, 8), [full(8, 128)] * 40),
    "granite-3.1-2b": (decoder("granite", 2048, 40, 32, 8), [full(8, 64)] * 40),
    "c4ai-command-r-v01": (decoder("cohere", 8192, 40, 64, 64), [full(64, 128)] * 40),
    "c4ai-command-r-plus": (decoder("cohere", 12288, 64, 96, 8), [full(8, 128)] * 64),
    "aya-expanse-8b": (decoder("cohere", 4096, 32, 32, 8), [full(8, 128)] * 32),
    "glm-4-9b-chat-hf": (decoder("glm", 4096, 40, 32, 2, head_dim=128), [full(2, 128)] * 40),
    "GLM-4-9B-0414": (decoder("glm4", 4096, 40, 32, 2, head_dim=128), [full(2, 128)] * 40),
    "GLM-4.5-Air": (decoder("glm4_moe", 4096, 46, 96, 8, head_dim=128), [full(8, 128)] * 46),
    "ERNIE-4.5-0.3B": (decoder("ernie4_5", 1024, 18, 16, 2, head_dim=128), [full(2, 128)] * 18),
    "ERNIE-4.5-21B-A3B": (decoder("ernie4_5_moe", 2560, 28, 20, 4), [full(4, 128)] * 28),
    "Seed-OSS-36B": (decoder("seed_oss", 5120, 64, 80, 8, head_dim=128), [full(8, 128)] * 64),
    "MiniMax-M2": (decoder("minimax_m2", 3072, 62, 48, 8, head_dim=128), [full(8, 128)] * 62),
    "Apertus-8B": (decoder("apertus", 4096, 32, 32, 8), [full(8, 128)] * 32),
    "internlm2_5-7b": (decoder("internlm2", 4096, 32, 32, 8), [full(8, 128)] * 32),
    "internlm3-8b": (decoder("internlm3", 4096, 48, 32, 2, head_dim=128), [full(2, 128)] * 48),
    "bitnet-b1.58-2B-4T": (decoder("bitnet", 2560, 30, 20, 5), [full(5, 128)] * 30),
    "stablelm-2-1_6b": (decoder("stablelm", 2048, 24, 32, 32), [full(32, 64)] * 24),
    "pythia-1.4b": (decoder("gpt_neox", 2048, 24, 16), [full(16, 128)] * 24),
    "helium-1-preview-2b": (
        decoder("helium", 2560, 24, 20, 20, head_dim=128),
        [full(20, 128)] * 24,
    ),
    "deepseek-moe-16b": (decoder("deepseek", 2048, 28, 16, 16), [full(16, 128)] * 28),
    # Names of their own.
    "gpt2-xl": (
        {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
        [full(25, 64)] * 48,
    ),
    "starcoder": (
        {
            "model_type": "gpt_bigcode",
            "n_embd": 6144,
            "n_layer": 40,
            "n_head": 48,
            "multi_query": True,
        },
        [full(1, 128)] * 40,
    ),
    "dbrx-base": (
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_layers": 40,
            "n_heads": 48,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        },
        [full(8, 128)] * 40,
    ),
    "EXAONE-3.5-7.8B": (
        {
            "model_type": "exaone",
            "hidden_size": 4096,
            "num_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        [full(8, 128)] * 32,
    ),
    # Windows in every layer, or switched off.
    "Mistral-7B-v0.1": (
        decoder("mistral", 4096, 32, 32, 8, sliding_window=4096),
        [sliding(4096, 8, 128)] * 32,
    ),
    "Mistral-7B-v0.3": (
        decoder("mistral", 4096, 32, 32, 8, sliding_window=None),
        [full(8, 128)] * 32,
    ),
    "Mistral-Nemo-2407": (
        decoder("mistral", 5120, 40, 32, 8, head_dim=128, sliding_window=None),
        [full(8, 128)] * 40,
    ),
    "Mistral-Large-2407": (
        decoder("mistral", 12288, 88, 96, 8, head_dim=128, sliding_window=None),
        [full(8, 128)] * 88,
    ),
    "Codestral-22B": (
        decoder("mistral", 6144, 56, 48, 8, sliding_window=None),
        [full(8, 128)] * 56,
    ),
    "Mixtral-8x7B-v0.1": (
        decoder("mixtral", 4096, 32, 32, 8, sliding_window=None, num_local_experts=8),
        [full(8, 128)] * 32,
    ),
    "Mixtral-8x22B-v0.1": (
        decoder("mixtral", 6144, 56, 48, 8, sliding_window=None, num_local_experts=8),
        [full(8, 128)] * 56,
    ),
    "Phi-3-mini-4k": (
        decoder("phi3", 3072, 32, 32, 32, sliding_window=2047),
        [sliding(2047, 32, 96)] * 32,
    ),
    "Phi-3-mini-128k": (
        decoder("phi3", 3072, 32, 32, 32, sliding_window=262144),
        [sliding(262144, 32, 96)] * 32,
    ),
    "Phi-3-medium-4k": (
        decoder("phi3", 5120, 40, 40, 10, sliding_window=2047),
        [sliding(2047, 10, 128)] * 40,
    ),
    "Phi-3.5-MoE": (
        decoder("phimoe", 4096, 32, 32, 8, sliding_window=131072),
        [sliding(131072, 8, 128)] * 32,
    ),
    "phi-4": (decoder("phi3", 5120, 40, 40, 10, sliding_window=None), [full(10, 128)] * 40),
    "Phi-4-mini": (
        decoder("phi3", 3072, 32, 24, 8, sliding_window=262144),
        [sliding(262144, 8, 128)] * 32,
    ),
    "starcoder2-3b": (
        decoder("starcoder2", 3072, 30, 24, 2, sliding_window=4096),
        [sliding(4096, 2, 128)] * 30,
    ),
    "starcoder2-15b": (
        decoder("starcoder2", 6144, 40, 48, 4, sliding_window=4096),
        [sliding(4096, 4, 128)] * 40,
    ),
    "Qwen2-7B": (qwen("qwen2", 3584, 28, 28, 4, window=131072, upper=28), [full(4, 128)] * 28),
    "Qwen2.5-0.5B": (qwen("qwen2", 896, 24, 14, 2, upper=24), [full(2, 64)] * 24),
    "Qwen2.5-7B": (qwen("qwen2", 3584, 28, 28, 4, upper=28), [full(4, 128)] * 28),
    "Qwen2.5-72B": (qwen("qwen2", 8192, 80, 64, 8, upper=80), [full(8, 128)] * 80),
    "Qwen1.5-MoE-A2.7B": (qwen("qwen2_moe", 2048, 24, 16, 16, upper=21), [full(16, 128)] * 24),
    "Qwen2.5-VL-7B": (qwen("qwen2_5_vl", 3584, 28, 28, 4, upper=28), [full(4, 128)] * 28),
    "Qwen3-0.6B": (qwen("qwen3", 1024, 28, 16, 8, upper=28, head_dim=128), [full(8, 128)] * 28),
    "Qwen3-8B": (qwen("qwen3", 4096, 36, 32, 8, upper=36, head_dim=128), [full(8, 128)] * 36),
    "Qwen3-32B": (qwen("qwen3", 5120, 64, 64, 8, upper=64, head_dim=128), [full(8, 128)] * 64),
    "Qwen3-30B-A3B": (
        qwen("qwen3_moe", 2048, 48, 32, 4, upper=48, head_dim=128),
        [full(4, 128)] * 48,
    ),
    "Qwen3-235B-A22B": (
        qwen("qwen3_moe", 4096, 94, 64, 4, upper=94, head_dim=128),
        [full(4, 128)] * 94,
    ),
    "MiMo-7B": (qwen("mimo", 4096, 36, 32, 8, upper=36), [full(8, 128)] * 36),
    "SmolLM3-3B": (
        decoder(
            "smollm3",
            2048,
            36,
            16,
            4,
            use_sliding_window=False,
            sliding_window=None,
            no_rope_layers=[1, 1, 1, 0] * 9,
            layer_types=[FULL] * 36,
        ),
        [full(4, 128)] * 36,
    ),
    # Sliding and full layers.
    "gemma-2-2b": (
        decoder("gemma2", 2304, 26, 8, 4, head_dim=256, sliding_window=4096),
        [sliding(4096, 4, 256), full(4, 256)] * 13,
    ),
    "gemma-2-27b": (
        decoder("gemma2", 4608, 46, 32, 16, head_dim=128, sliding_window=4096),
        [sliding(4096, 16, 128), full(16, 128)] * 23,
    ),
    "gemma-3-270m": (
        decoder(
            "gemma3_text",
            640,
            18,
            4,
            1,
            head_dim=256,
            sliding_window=512,
            layer_types=([SLIDING] * 5 + [FULL]) * 3,
        ),
        ([sliding(512, 1, 256)] * 5 + [full(1, 256)]) * 3,
    ),
    "gemma-3-1b": (
        decoder(
            "gemma3_text",
            1152,
            26,
            4,
            1,
            head_dim=256,
            sliding_window=512,
            sliding_window_pattern=6,
        ),
        ([sliding(512, 1, 256)] * 5 + [full(1, 256)]) * 4 + [sliding(512, 1, 256)] * 2,
    ),
    "gemma-3-4b": (
        gemma3(2560, 34),
        ([sliding(1024, 4, 256)] * 5 + [full(4, 256)]) * 5 + [sliding(1024, 4, 256)] * 4,
    ),
    "gemma-3-12b": (
        gemma3(3840, 48, num_attention_heads=16, num_key_value_heads=8),
        ([sliding(1024, 8, 256)] * 5 + [full(8, 256)]) * 8,
    ),
    "gemma-3-27b": (
        gemma3(5376, 62, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
        ([sliding(1024, 16, 128)] * 5 + [full(16, 128)]) * 10 + [sliding(1024, 16, 128)] * 2,
    ),
    "gemma-3n-E2B": (
        gemma3n(30, 10),
        ([sliding(512, 2, 256)] * 4 + [full(2, 256)]) * 4 + ([reads(18)] * 4 + [reads(19)]) * 2,
    ),
    "gemma-3n-E4B": (
        gemma3n(35, 15),
        ([sliding(512, 2, 256)] * 4 + [full(2, 256)]) * 4 + ([reads(18)] * 4 + [reads(19)]) * 3,
    ),
    "gpt-oss-20b": (gpt_oss(24), [sliding(128, 8, 64), full(8, 64)] * 12),
    "gpt-oss-120b": (gpt_oss(36), [sliding(128, 8, 64), full(8, 64)] * 18),
    "Llama-4-Scout": (llama4(), ([sliding(8192, 8, 128)] * 3 + [full(8, 128)]) * 12),
    "Olmo-3-7B": (
        decoder(
            "olmo3",
            4096,
            32,
            32,
            32,
            sliding_window=4096,
            layer_types=([SLIDING] * 3 + [FULL]) * 8,
        ),
        ([sliding(4096, 32, 128)] * 3 + [full(32, 128)]) * 8,
    ),
    "c4ai-command-r7b-12-2024": (
        decoder(
            "cohere2",
            4096,
            32,
            32,
            8,
            head_dim=128,
            sliding_window=4096,
            sliding_window_pattern=4,
        ),
        ([sliding(4096, 8, 128)] * 3 + [full(8, 128)]) * 8,
    ),
    "c4ai-command-a-03-2025": (
        decoder(
            "cohere2",
            12288,
            64,
            96,
            8,
            head_dim=128,
            sliding_window=4096,
            sliding_window_pattern=4,
        ),
        ([sliding(4096, 8, 128)] * 3 + [full(8, 128)]) * 16,
    ),
    "EXAONE-4.0-32B": (
        decoder(
            "exaone4",
            5120,
            64,
            40,
            8,
            head_dim=128,
            sliding_window=4096,
            sliding_window_pattern="LLLG",
        ),
        ([sliding(4096, 8, 128)] * 3 + [full(8, 128)]) * 16,
    ),
    "EXAONE-4.0-1.2B": (
        decoder(
            "exaone4",
            2048,
            30,
            32,
            8,
            head_dim=64,
            sliding_window=None,
            sliding_window_pattern=None,
        ),
        [full(8, 64)] * 30,
    ),
    "MiMo-V2-Flash": (
        _mimo_v2_flash(),
        [
            full(4, 192, 128),
            *[sliding(129, 8, 192, 128)] * 4,
            full(4, 192, 128),
            *([sliding(129, 8, 192, 128)] * 5 + [full(4, 192, 128)]) * 7,
        ],
    ),
    # A latent: kept as it is, or expanded to all heads.
    "DeepSeek-V2-Lite": (
        deepseek("deepseek_v2", 2048, 27, 16),
        [full(16, 192, 128)] * 27,
    ),
    "DeepSeek-V3": (deepseek("deepseek_v3", 7168, 61, 128), [full(1, 512, 64)] * 61),
    "DeepSeek-V3.2": (
        deepseek("deepseek_v32", 7168, 61, 128, index_head_dim=128, index_topk=2048),
        [Layer(((0, 1, 512, 64), (0, 1, 128, 128)))] * 61,
    ),
    "Kimi-K2": (deepseek("kimi_k2", 7168, 61, 64), [full(1, 512, 64)] * 61),
    "Moonlight-16B-A3B": (deepseek("deepseek_v3", 2048, 27, 16), [full(1, 512, 64)] * 27),
    # States.
    "Qwen3-Next-80B-A3B": (
        decoder("qwen3_next", 2048, 48, 16, 2, head_dim=256, full_attention_interval=4),
        ([STATE] * 3 + [full(2, 256)]) * 12,
    ),
    "Kimi-Linear-48B-A3B": (
        _kimi_linear(),
        ([STATE] * 3 + [full(1, 512, 64)]) * 6 + [STATE] * 2 + [full(1, 512, 64)],
    ),
    "Jamba-v0.1": (
        decoder("jamba", 4096, 32, 32, 8, attn_layer_period=8, attn_layer_offset=4),
        ([STATE] * 4 + [full(8, 128)] + [STATE] * 3) * 4,
    ),
    "LFM2-1.2B": (
        decoder("lfm2", 2048, 16, 32, 8, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
        ([STATE] * 2 + [full(8, 64)]) * 3 + [STATE, full(8, 64)] * 3 + [STATE],
    ),
    "recurrentgemma-2b": (
        decoder(
            "recurrent_gemma",
            2560,
            26,
            10,
            1,
            head_dim=256,
            attention_window_size=2048,
            block_types=["recurrent", "recurrent", "attention"],
        ),
        ([STATE] * 2 + [sliding(2048, 1, 256)]) * 8 + [STATE] * 2,
    ),
    "Falcon-H1-0.5B": (
        decoder("falcon_h1", 1024, 36, 8, 2, head_dim=64, mamba_d_state=128),
        [replace(full(2, 64), state=True)] * 36,
    ),
    "Nemotron-H-8B": (
        decoder(
            "nemotron_h",
            4096,
            52,
            32,
            8,
            head_dim=128,
            hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        ),
        [STATE, NOTHING] * 3
        + [STATE, full(8, 128), NOTHING]
        + ([STATE, NOTHING] * 4 + [STATE, full(8, 128), NOTHING]) * 3
        + [STATE, NOTHING] * 5,
    ),
}

#: Models whose windows mlx-lm's caches do not keep to: flat there.
FLAT_IN_MLX_LM = {
    "Mistral-7B-v0.1",
    "Phi-3-mini-4k",
    "Phi-3-mini-128k",
    "Phi-3-medium-4k",
    "Phi-3.5-MoE",
    "Phi-4-mini",
    "starcoder2-3b",
    "starcoder2-15b",
    "gemma-2-2b",
    "gemma-2-27b",
}

#: Model -> (its config, the field or word by which it is refused).
REFUSED: dict[str, tuple[Config, str]] = {
    "falcon-7b": (decoder("falcon", 4544, 32, 71, multi_query=True), "'multi_query'"),
    "MiniMax-Text-01": (
        decoder(
            "minimax_text_01",
            6144,
            80,
            64,
            8,
            head_dim=128,
            attn_type_list=([0] * 7 + [1]) * 10,
        ),
        "'attn_type_list'",
    ),
    "Llama-3.2-11B-Vision": (
        {
            "model_type": "mllama",
            "text_config": decoder(
                "mllama_text_model",
                4096,
                40,
                32,
                8,
                cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
            ),
        },
        "'cross_attention_layers'",
    ),
    "bert-base-uncased": (decoder("bert", 768, 12, 12, type_vocab_size=2), "an encoder"),
    "embeddinggemma-300m": (
        decoder(
            "gemma3_text",
            768,
            24,
            3,
            1,
            head_dim=256,
            sliding_window=512,
            use_bidirectional_attention=True,
        ),
        "attends to both sides",
    ),
    "mamba-2.8b-hf": ({"model_type": "mamba", "hidden_size": 2560}, "purely recurrent"),
    "t5-small": (
        {"model_type": "t5", "d_model": 512, "num_layers": 6, "is_encoder_decoder": True},
        "an encoder and a decoder",
    ),
}

"""How a GGUF file says that its rotary positions are scaled, as a `rope_scaling` dict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_kvcache.errors import ModelFormatError, UnsupportedModelError
from mlx_kvcache.models.gguf_file import GGUFFile

FREQUENCY_FACTORS = "rope_freqs.weight"

# Every Llama 3.1 to 3.3 checkpoint has these three; only the factor differs.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_scaling(file: GGUFFile, name: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` of architecture `name`, or None where positions are not scaled.

    Raises UnsupportedModelError for a scaling that mlx-lm's rope cannot reproduce exactly.
    """
    if FREQUENCY_FACTORS in file.tensors:
        return _llama3(file, theta, head_dim)
    prefix = f"{name}.rope.scaling"
    linear = file.find(f"{name}.rope.scale_linear", float)
    kind = file.find(f"{prefix}.type", str) or ("linear" if linear else "none")
    factor = file.find(f"{prefix}.factor", float) or linear or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(file, prefix, factor)
    raise UnsupportedModelError(f"{file.path.name}: rope scaling of type {kind!r} is not known")


def _yarn(file: GGUFFile, prefix: str, factor: float) -> dict[str, Any]:
    if (file.find(f"{prefix}.attn_factor", float) or 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{file.path.name}: yarn with an attention factor is not supported"
        )
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.require(f"{prefix}.original_context_length", int),
    }
    for target in ("beta_fast", "beta_slow"):
        value = file.find(f"{prefix}.yarn_{target}", float)
        if value is not None:
            scaling[target] = value
    return scaling


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Recognize Llama 3's scaling by the divisors of the frequencies that the file stores."""
    stored = file.tensors[FREQUENCY_FACTORS].dequantize()
    if stored.shape != (head_dim // 2,):
        raise ModelFormatError(
            f"{file.path.name}: {FREQUENCY_FACTORS!r} is {stored.shape}, not ({head_dim // 2},)"
        )
    factor = float(stored.max())
    if not np.allclose(stored, llama3_divisors(factor, theta, head_dim), rtol=1e-4, atol=0):
        raise UnsupportedModelError(
            f"{file.path.name}: the frequency divisors in {FREQUENCY_FACTORS!r} are not those of "
            "Llama 3.1 to 3.3, and mlx-lm's llama takes no others"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_divisors(factor: float, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """What Llama 3 divides each of its head_dim / 2 rotary frequencies by.

    1 for wavelengths that fit four times into the original context, `factor` for those longer
    than it, and in between the harmonic blend of the two (Llama 3.1's reference code).
    """
    context = float(_LLAMA3["original_max_position_embeddings"])
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / factor + blend), dtype=np.float64)

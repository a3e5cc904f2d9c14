"""One geometry and its metadata, written out by hand; and any geometry, for hypothesis."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

from mlx_kvcache.facts.geometry import CacheGeometry, LayerGeometry, LayerPolicy, ModelLayer

Metadata = dict[str, Any]

NUMBERS = ("kv_heads", "key_dims", "value_dims", "windows")

#: Three cache layers of three shapes: flat, and rings of 512 and 128.
COLUMNS: Metadata = {
    "kv_heads": [8, 4, 2],
    "key_dims": [64, 80, 96],
    "value_dims": [64, 80, 96],
    "windows": [0, 512, 128],
    "shared": [False, False, True],
    "model_layers": [
        {"caches": [0], "shares": False, "recurrent": False},
        {"caches": [], "shares": False, "recurrent": True},
        {"caches": [1, 2], "shares": False, "recurrent": False},
        {"caches": [2], "shares": True, "recurrent": False},
    ],
}
GEOMETRY = CacheGeometry(
    (
        LayerGeometry(LayerPolicy.flat(), 8, 64, 64),
        LayerGeometry(LayerPolicy.ring(512), 4, 80, 80),
        LayerGeometry(LayerPolicy.ring(128), 2, 96, 96, shared=True),
    ),
    (
        ModelLayer((0,)),
        ModelLayer(recurrent=True),
        ModelLayer((1, 2)),
        ModelLayer((2,), shares=True),
    ),
)


def metadata() -> Metadata:
    return {"version": 1, "n_caches": 3, **copy.deepcopy(COLUMNS)}


def read(changed: Any) -> CacheGeometry:
    """Through text, as a file or a saved cache holds it."""
    return CacheGeometry.from_metadata(json.loads(json.dumps(changed)))


LAYERS = st.builds(
    LayerGeometry,
    st.builds(LayerPolicy.from_window, st.integers(0, 3) | st.integers(1, 2**40)),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(0, 300),
    st.booleans(),
)


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    layers = tuple(draw(st.lists(LAYERS, min_size=1, max_size=6)))
    caches = st.lists(st.integers(0, len(layers) - 1), max_size=3).map(tuple)
    each = st.builds(ModelLayer, caches, st.booleans(), st.booleans())
    return CacheGeometry(layers, tuple(draw(st.lists(each, max_size=8))))

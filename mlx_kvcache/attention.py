"""The attention op: a step of a model against a cache that lives outside of it.

A model calls `update_and_attend` once for each of its attention layers and holds no cache of its
own. Which rows are written, which are read and what each query may see is the cache's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_kvcache.attend import AttendSpec, attend_checked, check_options, spec_of
from mlx_kvcache.errors import AttentionError, PositionError, UpdateDtypeError, UpdateShapeError
from mlx_kvcache.geometry import LayerGeometry
from mlx_kvcache.masks import Mask


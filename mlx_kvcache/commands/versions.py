"""Which versions run here, read without importing what they are versions of."""

from __future__ import annotations

from importlib import metadata

import mlx_kvcache

PACKAGES = ("mlx", "mlx-lm", "transformers")


def versions() -> dict[str, str]:
    """The version of this package and of each package it stands on, by distribution name."""
    found = {"mlx-kvcache": mlx_kvcache.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found

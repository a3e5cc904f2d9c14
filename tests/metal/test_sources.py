"""The Metal sources are found in a checkout and in an installed package; a missing one is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_kvcache.errors import KernelUnavailableError
from mlx_kvcache.store import metal as metal_kernels

ROOT = Path(__file__).resolve().parents[2]
FILES = [metal_kernels.SHARED_HEADER, *(kernel.file for kernel in metal_kernels.KERNELS)]


def read_all_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """Reads every source with the package of that folder, from a process that knows no other."""
    code = (
        "from mlx_kvcache.store import metal as m\n"
        "import mlx_kvcache\n"
        "print(mlx_kvcache.__file__)\n"
        f"print(sum(len(m.read_source(name)) for name in {FILES!r}))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )


def test_every_file_of_the_folder_is_used() -> None:
    assert sorted(path.name for path in (ROOT / "metal").iterdir()) == sorted(FILES)


def test_an_installed_package_reads_its_own_copy(tmp_path: Path) -> None:
    """As the wheel lays it out: the folder inside the package."""
    shutil.copytree(ROOT / "mlx_kvcache", tmp_path / "mlx_kvcache")
    shutil.copytree(ROOT / "metal", tmp_path / "mlx_kvcache" / "metal")
    done = read_all_in(tmp_path)
    assert done.returncode == 0, done.stderr
    where, characters = done.stdout.split()
    assert Path(where).is_relative_to(tmp_path)
    assert int(characters) == sum(len(metal_kernels.read_source(name)) for name in FILES)


def test_a_package_without_sources_says_what_is_missing(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mlx_kvcache", tmp_path / "mlx_kvcache")
    done = read_all_in(tmp_path)
    assert done.returncode != 0
    assert "KernelUnavailableError: the Metal source row_pack.h is neither" in done.stderr


def test_an_unknown_source_is_an_error_of_this_package() -> None:
    with pytest.raises(KernelUnavailableError, match=r"nothing\.metal"):
        metal_kernels.read_source("nothing.metal")

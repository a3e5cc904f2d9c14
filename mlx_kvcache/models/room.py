"""Whether the disk has room for what is about to be written."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlx_kvcache.errors import RoomError
from mlx_kvcache.models.progress import size_text


def check_room(directory: Path, needed: int, work: str) -> None:
    """Raise RoomError unless the disk of `directory` (which may not exist yet) has `needed` bytes.

    work: what they are for, for the message.
    """
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise RoomError(
            f"{work} needs {size_text(needed)} in {place}, where {size_text(free)} are free; make "
            "room there (mlx-kvcache models lists what can be deleted), or set MLX_KVCACHE_HOME "
            "to a directory on another disk"
        )

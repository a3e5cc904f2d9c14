"""Files that are read because a person named them."""

from __future__ import annotations

import errno

from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.files import expanded

_NAMES_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


def read_named(name: str, content: str) -> bytes:
    """What is in a file. content: what it should be, for the error.

    Raises `ConfigError` for a name that leads to no file, and `OSError`.
    """
    try:
        return expanded(name).read_bytes()
    except IsADirectoryError as error:
        raise ConfigError(f"{name} is a directory; give a file to read {content} from") from error
    except OSError as error:
        if error.errno not in _NAMES_NOTHING:
            raise
        raise ConfigError(
            f"there is no file {name} to read {content} from ({error.strerror})"
        ) from error

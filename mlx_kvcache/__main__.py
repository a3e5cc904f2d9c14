"""The command line `mlx-kvcache`, also as `python -m mlx_kvcache`."""

import os
import sys


def main() -> None:
    """Run the command line with the arguments of the process."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # A file opened later would get a closed standard stream's number, and be taken for it.
            os.open(os.devnull, os.O_RDWR)
    try:
        from mlx_kvcache.commands.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

"""The command line `mlx-kvcache`, also as `python -m mlx_kvcache`."""

import sys


def main() -> None:
    """Run the command line with the arguments of the process."""
    try:
        from mlx_kvcache.commands.process import run_process

        run_process()
    except KeyboardInterrupt:
        # It came before anything was there that could answer for it.
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()

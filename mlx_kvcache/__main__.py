"""`python -m mlx_kvcache` is the command line `mlx-kvcache`."""

from mlx_kvcache.commands.app import main

if __name__ == "__main__":
    main()

"""The commands of `mlx-kvcache`, one a module. MLX is imported when a command runs, not before."""

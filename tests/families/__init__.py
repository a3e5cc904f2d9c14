"""Tiny random models of the families that mlx-lm runs, one for each way of keeping a cache."""

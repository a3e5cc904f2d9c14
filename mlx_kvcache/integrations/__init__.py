"""What mlx-lm needs of a cache: its protocol, routed attention, traced layers, sampling."""

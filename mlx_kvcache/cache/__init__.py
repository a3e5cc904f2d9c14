"""The caches: a step is written into their rows and attended to what its queries may see."""

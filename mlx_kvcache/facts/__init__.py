"""What is known before anything runs: the model's geometry, and the run's config."""

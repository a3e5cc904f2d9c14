"""What several tests share: oracles, drivers, tiny models and writers of files."""

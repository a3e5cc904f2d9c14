"""Cache geometries read from Hugging Face configs: the rules of every family, as data and rules.

`config` finds the family, `families` lists them, the other modules hold their rules.
"""

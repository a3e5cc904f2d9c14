"""A conversation over one cache, without a terminal.

`text` writes what is said as tokens, `conversation` holds the turns, `token_cache` feeds, samples,
rewinds and forks, and `generation` answers a single prompt.
"""

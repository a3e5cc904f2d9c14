"""A conversation over one cache, without a terminal.

`text` writes what is said as tokens and `streaming` writes tokens as text, `conversation` holds the
`turns`, `token_cache` feeds, samples, rewinds and forks, with `checkpoints` to go back to,
`transcript` is a conversation in a file, and `generation` answers a single prompt.
"""

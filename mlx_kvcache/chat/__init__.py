"""A conversation over one cache, without a terminal.

`conversation` holds turns, `script` renders them to tokens, `token_cache` feeds, samples, rewinds
and forks, `recurrent_states` remembers the states of layers that cannot be rewound.
"""

"""Which token follows."""

from __future__ import annotations

import mlx.core as mx

from mlx_kvcache.engine.passes import Result
from mlx_kvcache.engine.requests import Request
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.integrations.sampling import greedy


def choose(request: Request, result: Result, vocabulary: int) -> int:
    """The next token of a request.

    Raises `ConfigError` for a token that is none, and what the request's sampler raises.
    """
    if request.sampler is greedy:
        assert result.greedy is not None, "a result without an error has a greedy token"
        return result.greedy
    assert result.logits is not None, "a result without an error has logits"
    logprobs = result.logits - mx.logsumexp(result.logits, keepdims=True)
    if request.random is None:
        answer = request.sampler(logprobs)
    else:
        with request.random.in_use():
            answer = request.sampler(logprobs)
            # The state that is left behind is one of the results.
            mx.eval(answer)
    token = int(answer.tolist()[0])  # type: ignore[index, arg-type]
    if not 0 <= token < vocabulary:
        raise ConfigError(f"the sampler chose token {token}; there are {vocabulary} token ids")
    return token

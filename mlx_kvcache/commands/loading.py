"""From the options of a run to a loaded model, and the room that its cache may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlx_kvcache.commands.options import RunOptions, SequenceOptions
from mlx_kvcache.errors import ConfigError
from mlx_kvcache.facts.config import DEFAULT_INITIAL_CAPACITY

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

    from mlx_kvcache.integrations.compiled import Model
    from mlx_kvcache.integrations.mlx_lm import PromptCache
    from mlx_kvcache.integrations.sampling import Sampling

#: Shorter answers are over before a compiled step has saved what it took to make.
LONG_ANSWER = 64
#: What the families call their context length, the usual name first.
_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_context_length",
    "model_max_length",
    "seq_length",
    "n_ctx",
)
#: Where multimodal configs keep the fields of their text model.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def position_limit(config: Mapping[str, Any]) -> int | None:
    """The most positions that a model was made for; None where its config does not say.

    A text part inside the config goes before the config's own fields.
    """
    parts = [config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)]
    for part in (*parts, config):
        for name in _NAMES:
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and the most positions it was made for (None: not known)."""

    model: Module
    tokenizer: Any
    limit: int | None

    def capacity(self, options: RunOptions) -> int | None:
        """What was asked for, else what the model was made for."""
        return self.limit if options.capacity is None else options.capacity

    def capacity_source(self, options: RunOptions) -> str:
        """Where that comes from, for messages."""
        if options.capacity is not None:
            return " (--capacity)"
        return " (the model's context length)" if self.limit else ""

    def sampling(self, options: RunOptions) -> Sampling:
        """How tokens are chosen. XTC never takes away what ends a line or an answer."""
        sampling = options.sampling
        if not sampling.xtc_probability:
            return sampling
        line_end = map(int, self.tokenizer.encode("\n"))
        special = sorted({*line_end, *self.tokenizer.eos_token_ids})
        return replace(sampling, xtc_special_tokens=tuple(special))

    def prompt_cache(self, options: SequenceOptions) -> PromptCache:
        """An empty cache as asked for. Raises `GeometryError` or `ConfigError`."""
        from mlx_kvcache.integrations.mlx_lm import make_prompt_cache

        initial = options.initial_capacity
        return make_prompt_cache(
            self.model,
            self.capacity(options),
            initial_capacity=DEFAULT_INITIAL_CAPACITY if initial is None else initial,
            kv_dtype=options.kv_dtype,
            spare=options.spare,
            windows=options.cache_windows,
        )

    def decoder(
        self, options: SequenceOptions, cache: PromptCache, notify: Callable[[str], None]
    ) -> Model:
        """The model as it is to be run on a cache: with compiled steps, or as it is."""
        from mlx_kvcache.integrations.compiled import compiled, is_worth_compiling

        wanted = options.compile
        if wanted is None:
            wanted = options.max_tokens >= LONG_ANSWER and is_worth_compiling(cache)
        return compiled(self.model, notify) if wanted else self.model


def load(options: RunOptions) -> Loaded:
    """Load the model. Raises what `models.resolve` and `models.load` raise, and `ConfigError`."""
    from mlx_kvcache import models

    directory = models.resolve(options.model)
    limit = position_limit(models.read_config(directory))
    model, tokenizer = models.load(
        directory,
        dtype=options.dtype,
        adapter_path=options.adapter_path,
        trust_remote_code=options.trust_remote_code,
    )
    for token in options.extra_eos_token or ():
        _end_at(tokenizer, token)
    return Loaded(model, tokenizer, limit)


def _end_at(tokenizer: Any, token: str) -> None:
    """Let a token, by its text or its id, end an answer. Raises `ConfigError` for none."""
    number = int(token) if token.isdecimal() else tokenizer.convert_tokens_to_ids(token)
    unknown = number is None or (number == tokenizer.unk_token_id and token != tokenizer.unk_token)
    if unknown or number >= len(tokenizer.get_vocab()):
        raise ConfigError(f"--extra-eos-token {token!r} is no token of this model")
    tokenizer.add_eos_token(str(number))

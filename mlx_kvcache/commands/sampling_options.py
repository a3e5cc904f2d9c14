"""The options that say how tokens are chosen, under mlx-lm's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from mlx_kvcache.commands.flags import SAMPLING, flag
from mlx_kvcache.errors import ConfigError

if TYPE_CHECKING:
    from mlx_kvcache.integrations.sampling import Sampling

_CONTEXT = "Newest tokens that {} looks at, the prompt's included; 0 is all."


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen. Each field is one of `Sampling`.

    Raises `ConfigError`, naming the flag and its value, for what cannot be.
    """

    temp: Annotated[float, flag("Sampling temperature; 0 is greedy.", panel=SAMPLING)] = 0.0
    top_p: Annotated[
        float, flag("Sample from the likeliest tokens of this total probability.", panel=SAMPLING)
    ] = 1.0
    top_k: Annotated[
        int, flag("Sample from this many of the likeliest tokens; 0 is all.", panel=SAMPLING)
    ] = 0
    min_p: Annotated[
        float,
        flag("Leave out tokens below this share of the likeliest's probability.", panel=SAMPLING),
    ] = 0.0
    min_tokens_to_keep: Annotated[
        int, flag("Tokens that --min-p always leaves.", panel=SAMPLING)
    ] = 1
    xtc_probability: Annotated[
        float,
        flag("How often XTC leaves out the likeliest tokens of several choices.", panel=SAMPLING),
    ] = 0.0
    xtc_threshold: Annotated[
        float, flag("Probability from which on a token counts as such a choice.", panel=SAMPLING)
    ] = 0.1
    seed: Annotated[
        int | None,
        flag("Seed of the sampling.", default="another one in each run", panel=SAMPLING),
    ] = None
    repetition_penalty: Annotated[
        float,
        flag("Divide the scores of tokens that were there by this; 1 is off.", panel=SAMPLING),
    ] = 1.0
    repetition_context_size: Annotated[
        int, flag(_CONTEXT.format("--repetition-penalty"), panel=SAMPLING)
    ] = 20
    presence_penalty: Annotated[
        float, flag("Subtract this from the scores of tokens that were there.", panel=SAMPLING)
    ] = 0.0
    presence_context_size: Annotated[
        int, flag(_CONTEXT.format("--presence-penalty"), panel=SAMPLING)
    ] = 20
    frequency_penalty: Annotated[
        float, flag("Subtract this once for each time that a token was there.", panel=SAMPLING)
    ] = 0.0
    frequency_context_size: Annotated[
        int, flag(_CONTEXT.format("--frequency-penalty"), panel=SAMPLING)
    ] = 20

    def __post_init__(self) -> None:
        from mlx_kvcache.integrations.sampling import check_sampling

        try:
            check_sampling(self.sampling)
        except ConfigError as error:
            name, _, rest = str(error).partition(" ")
            raise ConfigError(f"--{name.replace('_', '-')} {rest}") from error

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        from mlx_kvcache.integrations.sampling import Sampling

        names = (field.name for field in fields(SamplingOptions))
        return Sampling(**{name: getattr(self, name) for name in names})

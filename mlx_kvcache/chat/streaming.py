"""The text of an answer while it is made: what its tokens spell, piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mlx_kvcache.chat.text import spell

#: What bytes that are no character, or not yet, are decoded to.
_BROKEN = "\ufffd"
#: Tokens held back after which the text is looked at when their number has doubled.
_PATIENCE = 8


class AnswerText:
    """Pieces of text that add up to what `spell` makes of all tokens at once.

    Text that later tokens could still change is held back: the bytes of an unfinished character,
    and a run of byte tokens (`<0x..>`), which a decoder with byte fallback takes as a whole. The
    cost of a token does not grow with the answer.

    stop: the tokens that end an answer. They are no text.
    """

    def __init__(self, tokenizer: Any, stop: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = frozenset(stop)
        # Tokens whose text is out. The next ones are decoded behind them, since decoders treat
        # the beginning of a text, and the seam of two words, in ways of their own.
        self._before: list[int] = []
        self._before_length = 0
        self._held: list[int] = []
        self._out = 0
        self._look_at = 1

    def add(self, token: int) -> str:
        """The text that is certain now that `token` follows; often a word, sometimes nothing."""
        if token in self._stop:
            return ""
        self._held.append(token)
        if self._goes_on(token) or not self._is_due(token):
            return ""
        return self._release(final=False)

    def finish(self) -> str:
        """The text that was still held back, as it is decoded when nothing follows."""
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        text = spell(self._tokenizer, [*self._before, *self._held])[self._before_length :]
        certain = text if final else text.rstrip(_BROKEN)
        piece = certain[self._out :]
        self._out = max(self._out, len(certain))
        # What stands first may have no text of its own and still change what follows.
        if len(certain) == len(text) and (text or self._before):
            self._move_on(text)
        elif len(self._held) >= _PATIENCE:
            self._look_at = 2 * len(self._held)
        return piece

    def _move_on(self, text: str) -> None:
        """Take what was held as said."""
        if text:
            self._before = self._held
            self._before_length = len(spell(self._tokenizer, self._before))
        self._held, self._out, self._look_at = [], 0, 1

    def _goes_on(self, token: int) -> bool:
        """Whether a run of byte tokens may go on: with a byte, or an id that has no token."""
        name: str | None = self._tokenizer.convert_ids_to_tokens(token)
        return name is None or (len(name) == 6 and name.startswith("<0x"))

    def _is_due(self, token: int) -> bool:
        """Whether a look at the text may show more of it, at a cost that stays in proportion."""
        if len(self._held) >= self._look_at:
            return True
        alone = spell(self._tokenizer, [token])
        return bool(alone) and not alone.endswith(_BROKEN)


def answer_text(tokenizer: Any, tokens: Sequence[int], stop: Collection[int] = ()) -> str:
    """What the tokens of an answer say, without the one that ended it."""
    said = tokens[:-1] if tokens and tokens[-1] in stop else tokens
    return spell(tokenizer, said)

"""Stop texts: an answer ends before the first that is whole, in whatever pieces it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kvcache.chat.stops import StopText
from mlx_kvcache.errors import ConfigError

#: Few letters, so that stop texts overlap with each other and with themselves.
LETTERS = st.text("ab", max_size=12)


def brute_force(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop that is whole first, letter by letter; of several, the longest."""
    for end in range(len(text) + 1):
        whole = [stop for stop in stops if text[:end].endswith(stop)]
        if whole:
            longest = max(whole, key=len)
            return text[: end - len(longest)], longest
    return text, None


def through(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopText(stops)
    text = "".join(map(scanner.let_through, pieces))
    return (text if scanner.stopped_by else text + scanner.rest()), scanner.stopped_by


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_any_pieces_give_what_letter_by_letter_gives(pieces, stops):
    assert through(stops, pieces) == brute_force("".join(pieces), stops)


@given(st.lists(LETTERS, max_size=8), st.text("ab", min_size=1, max_size=4))
def test_what_is_let_through_is_final_and_no_more_is_held_back_than_may_be_a_stop(pieces, stop):
    scanner = StopText([stop])
    so_far, shown = "", ""
    for piece in pieces:
        so_far += piece
        shown += scanner.let_through(piece)
        if scanner.stopped_by:
            break
        held = so_far[len(shown) :]
        assert so_far == shown + held
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_nothing_comes_after_a_stop():
    scanner = StopText(["."])
    assert [scanner.let_through(piece) for piece in ("a", "b.c", "d.")] == ["a", "b", ""]
    assert (scanner.rest(), scanner.stopped_by) == ("", ".")


@pytest.mark.parametrize("stop", ["", 3, None, b"x"])
def test_a_stop_text_is_a_string_of_something(stop):
    with pytest.raises(ConfigError, match="a stop text must be a string that is not empty"):
        StopText(["ok", stop])

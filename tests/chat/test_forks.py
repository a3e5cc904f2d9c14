"""Forks: copies that cost nothing until they are written, and that never disturb each other."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from tests.support.cold_runs import check_answer, check_cache, say
from tests.support.tiny_models_on_disk import words

FAMILIES = ("llama", "gemma3_text", "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_forks_diverge_and_do_not_disturb_each_other(begin, family):
    trunk = begin(family, spare=32)
    say(trunk, words(*range(20, 40)))
    shared = list(trunk.tokens)
    one, other = trunk.fork(), trunk.fork()
    answers = {}
    for _ in range(2):
        for name, each, text in (("one", one, words(5)), ("other", other, words(6, 7))):
            answers[name] = say(each, text)
            check_answer(each)
    assert answers["one"] != answers["other"]
    assert trunk.tokens == shared
    for each in (trunk, one, other):
        assert each.tokens[: len(shared)] == shared
        check_cache(each)
    say(trunk, words(8))
    check_answer(trunk)
    one.undo()
    one.undo()
    assert one.tokens == shared
    for each in (trunk, one, other):
        check_cache(each)


def test_a_fork_of_a_fork_and_of_an_undone_turn(begin):
    trunk = begin()
    say(trunk, words(5))
    say(trunk, words(6))
    branch = trunk.fork()
    branch.undo()
    twig = branch.fork()
    assert say(twig, words(6)) == trunk.turns[1].answer
    say(branch, words(10))
    for each in (trunk, branch, twig):
        check_cache(each)


@pytest.mark.slow
def test_a_fork_takes_no_memory_until_it_is_written(begin):
    trunk = begin("llama", max_tokens=200)
    say(trunk, words(*range(20, 40)))
    pools = trunk.cached.sequence.nbytes
    mx.synchronize()
    gc.collect()
    before = mx.get_active_memory()
    forks = [trunk.fork() for _ in range(8)]
    mx.eval([each.cached.sequence.state for each in forks])
    assert mx.get_active_memory() - before < pools / 10
    say(forks[0], words(5))
    assert mx.get_active_memory() - before > pools / 2
    check_cache(trunk)


def test_a_fork_in_mid_answer_has_what_was_said(begin):
    trunk = begin()
    pieces = trunk.ask(words(5))
    next(pieces)
    next(pieces)
    twin = trunk.fork()
    assert [turn.end for turn in twin.turns] == ["interrupted"]
    assert len(twin.turns[0].answer) == 2
    check_cache(twin)
    check_cache(trunk)
    say(twin, words(6))
    check_answer(twin)

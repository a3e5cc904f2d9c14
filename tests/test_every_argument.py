"""Every public method with a value of every wrong kind for each argument, found by introspection.

Whatever is refused raises a `KVCacheError` that says why, and changes nothing. A method or an
argument that is not in the tables below fails a test of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import mlx_kvcache as kv
from mlx_kvcache.errors import KVCacheError
from tests.support.public_calls import (
    CALLED_ELSEWHERE,
    CALLS,
    NO_CALLS,
    configured,
    made_engine,
    op,
)
from tests.support.public_objects import (
    ENGINES,
    SUBJECTS,
    VALUES,
    Subject,
    engine,
    request_of,
    seen_of,
)


@pytest.fixture(autouse=True)
def shut_down() -> Iterator[None]:
    """Gives the keys of the engines of a test back."""
    yield
    for made, _ in ENGINES:
        made.shutdown()
    ENGINES.clear()


def check(call: Callable[[], object], seen: Callable[[], Any], where: str) -> bool:
    """Whether a call was refused, as it should be if it was."""
    before = seen()
    try:
        answer = call()
        if hasattr(answer, "__enter__"):
            with answer:
                pass
    except KVCacheError as error:
        said = str(error).strip()
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    else:
        return False
    assert said, f"{where}: nothing is said"
    assert seen() == before, f"{where}: a refused call has changed something"
    return True


METHODS = [(name, method) for name, subject in SUBJECTS.items() for method in subject.methods]


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_public_method_is_in_the_table(name: str) -> None:
    subject = SUBJECTS[name]
    known = {*subject.methods, *subject.internal}
    assert subject.public() == known, "give right arguments for it, or say that it is internal"


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_the_table_has_right_values_for_all_arguments(name: str, method: str) -> None:
    table = SUBJECTS[name]
    subject = table.subject_for(method)
    given = table.arguments(subject, method)
    signature = inspect.signature(getattr(subject, method))
    if "choices" not in signature.parameters:
        assert set(given) == set(signature.parameters)
    if (name, method) == ("CacheRegistry", "current"):
        return
    refused = check(lambda: getattr(subject, method)(**given), lambda: None, "right arguments")
    assert not refused


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_wrong_values(name: str, method: str) -> None:
    table = SUBJECTS[name]
    subject = table.subject_for(method)
    faults: list[str] = []
    for argument in table.arguments(subject, method):
        accepted = table.accepted.get(method, {}).get(argument, set())
        for kind, value in VALUES.items():
            given = {**table.arguments(subject, method), argument: value}
            call = partial(getattr(subject, method), **given)
            is_refused = tried(call, partial(table.seen, subject), argument, kind, accepted, faults)
            if not is_refused:
                subject = table.subject_for(method)
    assert not faults, "\n".join(faults)


def tried(
    call: Callable[[], object],
    seen: Callable[[], Any],
    argument: str,
    kind: str,
    accepted: set[str],
    faults: list[str],
) -> bool:
    """Whether a value was refused; what is wrong about that goes to `faults`."""
    where = f"{argument}={kind}"
    try:
        is_refused = check(call, seen, where)
    except AssertionError as fault:
        faults.append(str(fault).splitlines()[0])
        return False
    if is_refused != (kind not in accepted):
        faults.append(f"{where} was {'refused' if is_refused else 'accepted'}")
    return is_refused


def test_every_public_name_is_in_a_table() -> None:
    assert set(kv.__all__) == set(CALLS) | NO_CALLS
    classes = {name for name in kv.__all__ if inspect.isclass(getattr(kv, name))}
    with_methods = {
        name
        for name in classes - (NO_CALLS - {"PromptCache"})
        if Subject(getattr(kv, name), list, list, {}).public()
    }
    assert with_methods == {subject.cls.__name__ for subject in SUBJECTS.values()} & classes


@pytest.mark.parametrize("name", [name for name in CALLS if name not in CALLED_ELSEWHERE])
def test_wrong_values_for_constructors_and_functions(name: str) -> None:
    function, right, accepted = CALLS[name]
    if not isinstance(function, partial) and function not in (configured, made_engine, op):
        named = set(inspect.signature(function).parameters) - {"given"}
        assert named <= {*right, "layer_class"}, "an argument is not in the table"
    assert not check(partial(function, **right), tuple, name)
    faults: list[str] = []
    for argument in right:
        for kind, value in VALUES.items():
            call = partial(function, **{**right, argument: value})
            tried(call, tuple, argument, kind, accepted.get(argument, set()), faults)
    assert not faults, "\n".join(faults)


def test_what_is_closed_or_belongs_elsewhere() -> None:
    mine, session = engine()
    other, foreign = engine()
    closed = mine.open()
    closed.close()
    calls: dict[str, Callable[[], object]] = {}
    for name, wrong in (("foreign", foreign), ("closed", closed)):
        calls |= {
            f"fork {name}": partial(mine.fork, wrong),
            f"position {name}": partial(mine.position, wrong),
            f"continue {name}": partial(mine.submit, [5], session=wrong),
            f"begin with {name}": partial(mine.submit, [5], parent=wrong),
        }
    calls |= {
        "close foreign": partial(mine.close, foreign),
        "cancel foreign": partial(mine.cancel, request_of(other)),
        "follow foreign": partial(mine.follow, request_of(other)),
        "both": partial(mine.submit, [5], session=session, parent=session),
    }
    before = seen_of(other)
    for name, call in calls.items():
        assert check(call, partial(seen_of, mine), name), name
    assert seen_of(other) == before
    mine.shutdown()
    for call in (mine.open, partial(mine.submit, [5]), partial(mine.fork, session)):
        assert check(call, lambda: mine.waiting, "shut down")

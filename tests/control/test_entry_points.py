"""Kinds that other packages bring: found by name, imported when built, named when broken."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from mlx_kvcache.control.factory import ENTRY_POINT_GROUP, CacheFactory
from mlx_kvcache.errors import (
    BuilderError,
    RegistrationError,
)
from tests.support.plain_cache import CONFIG, GEOMETRY, PlainCache
from tests.support.processes import run_python
from tests.support.session_steps import run_all

PACKAGE = """
from tests.support.plain_cache import PlainCache
IMPORTED = True
class PagedCache(PlainCache):
    pass
def make(geometry, config):
    return PagedCache(geometry, config)
NOT_CALLABLE = 3
"""
POINTS = """
[mlx_kvcache.caches]
acme/paged = acme_cache:PagedCache
acme/made = acme_cache:make
acme/number = acme_cache:NOT_CALLABLE
acme/absent = acme_cache:Missing
acme/broken = acme_broken:Cache
nameless = acme_cache:PagedCache
mlx/sequence = acme_cache:PagedCache
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution, `acme`, that brings caches, good ones and broken ones."""
    (tmp_path / "acme_cache.py").write_text(PACKAGE)
    (tmp_path / "acme_broken.py").write_text("import no_such_module_at_all\n")
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("acme_cache", "acme_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def with_entry_points() -> CacheFactory:
    return CacheFactory({("mlx", "sequence"): PlainCache}, ENTRY_POINT_GROUP)


def discovered() -> tuple[CacheFactory, list[str]]:
    factory = with_entry_points()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        factory.kinds()
        factory.kinds()
    return factory, [str(each.message) for each in caught]


@pytest.mark.usefixtures("third_party")
def test_other_packages_bring_kinds_by_entry_point() -> None:
    factory, _ = discovered()
    kinds = {"paged", "made", "number", "absent", "broken"}
    assert {kind for backend, kind in factory.kinds() if backend == "acme"} == kinds
    assert "acme_cache" not in sys.modules
    for kind in ("paged", "made"):
        cache = factory.build("acme", kind, GEOMETRY, CONFIG)
        assert type(cache).__name__ == "PagedCache"
        assert (cache.geometry, cache.config) == (GEOMETRY, CONFIG)
    assert sys.modules["acme_cache"].IMPORTED


@pytest.mark.usefixtures("third_party")
def test_without_a_group_nothing_is_looked_up() -> None:
    assert CacheFactory({("mlx", "sequence"): PlainCache}).kinds() == (("mlx", "sequence"),)


@pytest.mark.usefixtures("third_party")
def test_an_entry_point_that_does_not_fit_is_named_in_one_warning() -> None:
    factory, messages = discovered()
    assert len(messages) == 2
    clash, nameless = sorted(messages)
    assert "'mlx/sequence' = 'acme_cache:PagedCache' of acme" in clash
    assert "has a builder already" in clash
    assert "'nameless' = 'acme_cache:PagedCache' of acme" in nameless
    assert type(factory.build("mlx", "sequence", GEOMETRY, CONFIG)) is PlainCache


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("broken", "no_such_module_at_all"),
        ("absent", "Missing"),
        ("number", "must lead to a callable"),
    ],
)
def test_a_broken_entry_point_is_named_and_the_others_work(kind: str, reason: str) -> None:
    factory, _ = discovered()
    for _again in range(2):
        with pytest.raises(BuilderError, match=f"'acme/{kind}'.*{reason}"):
            factory.build("acme", kind, GEOMETRY, CONFIG)
    assert type(factory.build("mlx", "sequence", GEOMETRY, CONFIG)) is PlainCache
    assert type(factory.build("acme", "paged", GEOMETRY, CONFIG)).__name__ == "PagedCache"


@pytest.mark.usefixtures("third_party")
def test_warnings_as_errors_lose_no_kind() -> None:
    factory = with_entry_points()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            factory.kinds()
    assert type(factory.build("acme", "paged", GEOMETRY, CONFIG)).__name__ == "PagedCache"


@pytest.mark.filterwarnings("ignore:the entry point")
@pytest.mark.usefixtures("third_party")
def test_an_entry_point_comes_before_a_later_registration() -> None:
    factory = with_entry_points()
    with pytest.raises(RegistrationError, match="acme/paged has a builder already"):
        factory.register("acme", "paged", PlainCache)
    factory.register("acme", "late", PlainCache)
    assert type(factory.build("acme", "late", GEOMETRY, CONFIG)) is PlainCache


@pytest.mark.usefixtures("third_party")
def test_threads_that_ask_at_once_find_the_kinds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(4, timeout=30)
    real = importlib.metadata.entry_points

    def together(**which: Any) -> Any:
        found = real(**which)
        barrier.wait()
        return found

    monkeypatch.setattr(importlib.metadata, "entry_points", together)
    factory = with_entry_points()
    answers: list[object] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_all([lambda: answers.append(factory.kinds())] * 4)
    assert answers == [factory.kinds()] * 4
    assert len(factory.kinds()) == 6
    assert len(caught) == 2


def test_the_process_wide_factory_sees_other_packages(third_party: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(third_party)!r}]\n"
        "from tests.support.plain_cache import GEOMETRY, CONFIG\n"
        "from mlx_kvcache import CacheSession, current_cache\n"
        "with CacheSession(GEOMETRY, CONFIG, backend='acme', kind='paged') as session:\n"
        "    print(type(current_cache()).__name__, 'mlx.core' in sys.modules)\n"
    )
    done = run_python(code)
    assert done.stdout.split() == ["PagedCache", "False"], done.stderr
    assert "'nameless'" in done.stderr

"""The public objects: how one is made, what is seen of it, and right arguments for its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

import mlx_kvcache as kv
from mlx_kvcache.engine import Engine, Request, Session
from mlx_kvcache.integrations.mlx_lm import MLXLMLayer, PromptCache
from mlx_kvcache.integrations.sampling import Sampling
from mlx_kvcache.store.rows import DenseRows
from tests.support import many_sequences_driver as many
from tests.support import sequence_oracle as one
from tests.support.engine_runs import tiny
from tests.support.strange_values import STRANGE

GEOMETRY = many.geometry_of((0, 3))
CONFIG = kv.CacheConfig(40, None, 2, 2)
OTHER = kv.CacheConfig(41)
Arguments = Mapping[str, Any]


def rows(tokens: int) -> dict[str, mx.array]:
    return {
        "queries": mx.ones((1, many.HEADS * many.GROUPS, tokens, many.KEY_DIM)),
        "keys": mx.ones((1, many.HEADS, tokens, many.KEY_DIM)),
        "values": mx.ones((1, many.HEADS, tokens, many.VALUE_DIM)),
    }


def step(cache: Any, tokens: int) -> None:
    if not isinstance(cache, kv.MLXSequenceCache):
        cache.declare_step([(0, tokens)])
    for layer in (0, 1):
        mx.eval(cache.attend(layer, **rows(tokens), scale=0.5))


def sequence_cache() -> kv.MLXSequenceCache:
    """Its ring has wrapped."""
    cache = kv.MLXSequenceCache(GEOMETRY, CONFIG)
    step(cache, 6)
    return cache


def shared_cache(kind: type[Any]) -> Any:
    """Six positions of sequence 0, and a declared step of two more."""
    cache = kind(GEOMETRY, CONFIG)
    cache.new()
    step(cache, 6)
    cache.declare_step([(0, 2)])
    return cache


def written_cache(kind: type[Any]) -> Any:
    """A shared cache in the middle of the step: layer 0 has written it."""
    cache = shared_cache(kind)
    mx.eval(cache.attend(0, **rows(2), scale=0.5))
    return cache


def prompt_cache() -> PromptCache:
    model = tiny("llama")
    cache = kv.make_prompt_cache(model, 512)
    mx.eval(model(mx.array([[1, 2, 3, 4]]), cache=cache))
    return cache


def factory() -> kv.CacheFactory:
    return kv.CacheFactory({("mlx", "sequence"): kv.MLXSequenceCache})


@dataclass(frozen=True)
class Subject:
    """A public object: how one is made, what is seen of it, and right arguments for its methods.

    internal: methods that only this package calls. accepted: by method and argument, the strange
    values that are right for it.
    """

    cls: type[Any]
    make: Callable[[], Any]
    seen: Callable[[Any], Any]
    methods: Mapping[str, Arguments | Callable[[Any], Arguments]]
    accepted: Mapping[str, Mapping[str, set[str]]] = field(default_factory=dict)
    internal: frozenset[str] = frozenset()
    makers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    def public(self) -> set[str]:
        """The methods of the class, those of the builtin that it extends left out."""
        inherited = set(dir(list)) if issubclass(self.cls, list) else set()
        return {
            name
            for name, member in inspect.getmembers(self.cls)
            if not name.startswith("_") and callable(member) and name not in inherited
        }

    def subject_for(self, method: str) -> Any:
        return self.makers.get(method, self.make)()

    def arguments(self, subject: Any, method: str) -> dict[str, Any]:
        given = self.methods[method]
        return dict(given(subject) if callable(given) else given)


NONE = {"None"}
OPTIONS = {
    "scale": {"a negative number", "a float", "a numpy number", "a large number"},
    "sinks": NONE,
    "softcap": {"None", "a float", "a numpy number", "a large number"},
    "out_dtype": NONE,
    "positions": NONE,
}
ATTEND = {
    "layer": 0,
    **rows(2),
    "scale": 0.5,
    "sinks": mx.zeros((4,)),
    "softcap": 3.0,
    "out_dtype": mx.float32,
}
AGAIN = {name: value for name, value in ATTEND.items() if name not in ("keys", "values")}
UPDATE = {"layer": 0, "keys": rows(2)["keys"], "values": rows(2)["values"]}


def shared_subject(
    kind: type[Any], more: Mapping[str, Any], accepted: Mapping[str, Any]
) -> Subject:
    return Subject(
        kind,
        lambda: shared_cache(kind),
        many.observe,
        {
            "abandon_step": {},
            "attend": {**ATTEND, "positions": [6, 7]},
            "attend_again": AGAIN,
            "check_room": {"ends": {0: 9}, "begun": [4]},
            "declare_step": {"request": [(0, 1)], "positions": [6]},
            "fork": {"sequence": 0, "up_to": 5},
            "make_mask": {"layer": 1},
            "new": {},
            "position": {"sequence": 0},
            "remove": {"sequence": 0},
            "restore": lambda _: {"snapshot": sequence_of(kind).snapshot()},
            "rewind": {"sequence": 0, "position": 5},
            "snapshot": {},
            "step_positions": {},
            "update_and_fetch": {**UPDATE, "positions": [6, 7]},
            **more,
        },
        {
            "attend": OPTIONS,
            "attend_again": OPTIONS,
            "check_room": {"ends": {"a dict"}, "begun": {"a list"}},
            "declare_step": {"positions": NONE},
            "fork": {"up_to": NONE},
            "update_and_fetch": {"positions": NONE},
            **accepted,
        },
        makers={"attend_again": lambda: written_cache(kind)},
    )


def sequence_of(kind: type[Any], config: kv.CacheConfig = CONFIG) -> Any:
    cache = kind(GEOMETRY, config)
    cache.new()
    step(cache, 2)
    return cache


def registry_with(cache: Any) -> kv.CacheRegistry:
    registry = kv.CacheRegistry()
    registry._held = kv.CacheSession.around(cache, registry=registry).open()  # type: ignore[attr-defined]
    return registry


ENGINES: list[tuple[Engine, Session]] = []


def engine() -> tuple[Engine, Session]:
    """An engine with a session of five tokens, and a request that waits."""
    made = Engine(tiny("llama"), 200, initial_capacity=8)
    session = made.open()
    ENGINES.append((made, session))
    list(session.submit([5, 6, 7], max_tokens=2).stream())
    made.submit([8, 9], max_tokens=3)
    return made, session


def session_of(engine: Any) -> Session:
    (session,) = [session for made, session in ENGINES if made is engine]
    return session


def request_of(engine: Any) -> Request:
    return engine.waiting[0]


def seen_of(engine: Any) -> Any:
    session = session_of(engine)
    running = [(request, list(request.tokens)) for request in (*engine.waiting, *engine.active)]
    return [many.observe(engine.cache), session.tokens[:], session.request, running, engine.free]


SUBMIT: dict[str, Any] = {
    "prompt": [5, 6],
    "max_tokens": 3,
    "sampling": Sampling(),
    "stop": [4],
    "session": None,
    "parent": None,
    "sampler": None,
}
SUBMITTED = {
    "prompt": {"a list"},
    "stop": {"a list", "a set"},
    "session": NONE,
    "parent": NONE,
    "sampler": {"None", "a type", "a function"},
}


#: What the cache and its attention ask of a layer.
INTERNAL = frozenset(
    {
        *("check", "grow", "hold", "mask_at", "read_again", "restore", "settle", "step_back"),
        *("take", "write", "wrote_last"),
    }
)

SUBJECTS: dict[str, Subject] = {
    "MLXSequenceCache": Subject(
        kv.MLXSequenceCache,
        sequence_cache,
        one.observe,
        {
            "attend": {**ATTEND, "positions": 6},
            "can_extend": {"count": 3},
            "clear": {},
            "fork": {"up_to": 5},
            "layer": {"index": 1},
            "reserve": {"length": 20},
            "restore": lambda cache: {"snapshot": cache.snapshot()},
            "rewind": {"position": 5},
            "snapshot": {},
        },
        {"attend": OPTIONS, "fork": {"up_to": NONE}, "can_extend": {"count": {"a large number"}}},
    ),
    "MLXCellCache": shared_subject(
        kv.MLXCellCache,
        {
            "cell_map": {"width": 20},
            "defragment": {},
            "pool": {"layer": 1},
            "reserve": {"cells": 30},
        },
        {"cell_map": {"width": {"a large number"}}},
    ),
    "MLXBatchedSequenceCache": shared_subject(
        kv.MLXBatchedSequenceCache,
        {"rewind_floor": {"sequence": 0}, "sequence": {"sequence": 0}},
        {},
    ),
    "PromptCache": Subject(
        PromptCache,
        prompt_cache,
        lambda cache: one.observe(cache.sequence),
        {
            "fork": {"up_to": 3},
            "recurrent_states": {},
            "restore": lambda cache: {"snapshot": cache.snapshot()},
            "restore_recurrent": {"states": ()},
            "rewind": {"position": 3},
            "snapshot": {},
        },
        {"fork": {"up_to": NONE}},
    ),
    "a layer of a PromptCache": Subject(
        MLXLMLayer,
        lambda: kv.MLXSequenceCache(GEOMETRY, CONFIG, MLXLMLayer).layer(0),
        lambda layer: (layer.offset, layer.rows, [*map(one.raw, layer.store.state)]),
        {
            "empty": {},
            "is_trimmable": {},
            "keys_and_values": {},
            "make_mask": {"N": 2, "return_array": True, "window_size": 2},
            "maybe_trim_front": {},
            "size": {},
            "trim": {"n": 0},
            "update_and_fetch": {"keys": rows(2)["keys"], "values": rows(2)["values"]},
        },
        {
            "make_mask": {"return_array": {"a bool"}, "window_size": {"None", "a large number"}},
            "trim": {"n": {"a large number"}},
        },
        INTERNAL,
        makers={"keys_and_values": lambda: written_layer(), "trim": lambda: written_layer()},
    ),
    "CacheFactory": Subject(
        kv.CacheFactory,
        factory,
        lambda made: made.kinds(),
        {
            "build": {"backend": "mlx", "kind": "sequence", "geometry": GEOMETRY, "config": CONFIG},
            "kinds": {},
            "register": {"backend": "mine", "kind": "own", "builder": kv.MLXSequenceCache},
        },
        {
            "build": {"geometry": {"a geometry"}, "config": {"None", "a config"}},
            "register": {
                "backend": {"a string"},
                "kind": {"a string"},
                "builder": {"a type", "a function"},
            },
        },
    ),
    "CacheRegistry": Subject(
        kv.CacheRegistry,
        lambda: registry_with(sequence_cache()),
        lambda registry: registry.keys(),
        {
            "active": {"key": "cache-1"},
            "current": {},
            "get": {"key": "cache-1"},
            "keys": {},
        },
    ),
    "CacheSession": Subject(
        kv.CacheSession,
        lambda: kv.CacheSession(GEOMETRY, CONFIG, registry=kv.CacheRegistry()),
        lambda session: session.is_open,
        {
            "around": {"cache": sequence_cache(), "registry": kv.CacheRegistry()},
            "close": {},
            "open": {},
        },
        {"around": {"cache": {"a cache"}}},
    ),
    "CacheGeometry": Subject(
        kv.CacheGeometry,
        lambda: GEOMETRY,
        lambda geometry: repr(geometry),
        {
            "from_hf": {"config": {"model_type": "llama", "hidden_size": 8, "head_dim": 4,
                                   "num_hidden_layers": 2, "num_attention_heads": 2}},
            "from_metadata": {"metadata": GEOMETRY.to_metadata()},
            "of_mlx_lm": {"config": {"model_type": "llama", "hidden_size": 8, "head_dim": 4,
                                     "num_hidden_layers": 2, "num_attention_heads": 2}},
            "to_metadata": {},
            "with_windows": {"windows": [3, 4]},
        },
    ),
    "LayerPolicy": Subject(
        kv.LayerPolicy,
        kv.LayerPolicy.flat,
        repr,
        {"flat": {}, "from_window": {"window": 4}, "ring": {"window": 4}},
        {"from_window": {"window": {"a large number"}}, "ring": {"window": {"a large number"}}},
    ),
    "Engine": Subject(
        Engine,
        lambda: engine()[0],
        lambda engine: seen_of(engine),
        {
            "cancel": lambda engine: {"request": request_of(engine)},
            "close": lambda engine: {"session": session_of(engine)},
            "compact": {},
            "follow": lambda engine: {"request": request_of(engine)},
            "fork": lambda engine: {"session": session_of(engine), "up_to": 2},
            "open": {},
            "position": lambda engine: {"session": session_of(engine)},
            "run": {},
            "shutdown": {},
            "step": {},
            "submit": lambda engine: {**SUBMIT, "session": session_of(engine)},
        },
        {"fork": {"up_to": NONE}, "submit": SUBMITTED},
    ),
    "Session": Subject(
        Session,
        lambda: engine()[1],
        lambda session: seen_of(session.host),
        {
            "close": {},
            "fork": {"up_to": 2},
            "submit": {name: value for name, value in SUBMIT.items() if name != "session"},
        },
        {"fork": {"up_to": NONE}, "submit": SUBMITTED},
    ),
    "Request": Subject(
        Request,
        lambda: request_of(engine()[0]),
        lambda request: seen_of(request.host),
        {"cancel": {}, "stream": {}},
    ),
    "AttendSpec": Subject(
        kv.AttendSpec,
        lambda: kv.AttendSpec("causal"),
        repr,
        {"from_mask": {"mask": mx.array([[True, False]])}},
        {"from_mask": {"mask": NONE}},
    ),
}  # fmt: skip


def written_layer() -> Any:
    cache = kv.MLXSequenceCache(GEOMETRY, CONFIG, MLXLMLayer)
    step(cache, 2)
    return cache.layer(0)


#: Foreign objects, right for no argument but by chance.
FOREIGN: dict[str, Any] = {
    "a cache": sequence_cache(),
    "a snapshot of another config": kv.MLXSequenceCache(GEOMETRY).snapshot(),
    "a snapshot of another kind": sequence_of(kv.MLXCellCache, OTHER).snapshot(),
    "a snapshot of batches": sequence_of(kv.MLXBatchedSequenceCache, OTHER).snapshot(),
    "a config": CONFIG,
    "a geometry": GEOMETRY,
    "a store": DenseRows(),
}
VALUES = {**STRANGE, **FOREIGN}

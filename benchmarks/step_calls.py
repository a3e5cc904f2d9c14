"""How much Python a step takes: calls into the package, counted by file. Nothing is timed.

What is counted are the `call` events of `sys.setprofile` whose code lies in the package's folder:
functions, properties and, before Python 3.12, comprehensions, which are functions there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import mlx.core as mx
import typer
from common import Machine
from mlx_lm.models.llama import Model, ModelArgs
from report import Report, require_directory

import mlx_kvcache
from mlx_kvcache import make_prompt_cache
from mlx_kvcache.engine import Engine

PACKAGE = Path(mlx_kvcache.__file__).parent
LAYERS = 2
WINDOW = 8
PROMPT = 5

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Counted:
    """The calls of one step by file, with `LAYERS` layers, and how many each layer adds."""

    name: str
    calls: Counter[str]
    layer: float

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "files": len(self.calls),
            "calls": self.calls.total(),
            "calls_per_layer": self.layer,
            "by_file": dict(self.calls.most_common()),
        }


def calls_of(step: Callable[[], object]) -> Counter[str]:
    """The calls into the package while `step` runs, by file below the package's folder."""
    calls: Counter[str] = Counter()
    prefix = f"{PACKAGE}/"

    def count(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix):
            calls[path.removeprefix(prefix)] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def model_of(layers: int) -> Model:
    """A llama as small as can be."""
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=layers,
            intermediate_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=64,
        )
    )
    mx.eval(model.parameters())
    return model


def drop_in(layers: int, before: list[int], tokens: int, **choices: Any) -> Counter[str]:
    """A step of `tokens` tokens of mlx-lm's model on our cache, after steps of `before` tokens."""
    model = model_of(layers)
    cache = make_prompt_cache(model, **choices)

    def step(count: int) -> None:
        mx.eval(model(mx.zeros((1, count), mx.int32), cache=cache))

    for count in before:
        step(count)
    return calls_of(lambda: step(tokens))


def engine_step(layers: int, kind: str, requests: int = 2) -> Counter[str]:
    """A step of an engine in which `requests` requests get a token each, and nothing else."""
    engine = Engine(model_of(layers), 128, kind)
    for _ in range(requests):
        engine.submit([1] * PROMPT, max_tokens=20)
    for _ in range(4):
        engine.step()
    return calls_of(engine.step)


CASES: dict[str, Callable[[int], Counter[str]]] = {
    "drop-in, a decode step": lambda layers: drop_in(layers, [PROMPT, 1], 1),
    "drop-in, a decode step of a wrapped ring": lambda layers: drop_in(
        layers, [PROMPT, *[1] * 40], 1, windows=[WINDOW] * layers, spare=4
    ),
    "drop-in, the first write": lambda layers: drop_in(layers, [], PROMPT),
    "drop-in, a write that wraps a ring": lambda layers: drop_in(
        layers, [WINDOW], 4, windows=[WINDOW] * layers, spare=4
    ),
    "engine, a decode step (cell)": lambda layers: engine_step(layers, "cell"),
    "engine, a decode step (batched)": lambda layers: engine_step(layers, "batched"),
}


def count(name: str) -> Counted:
    """One case, counted with two numbers of layers after a run that imports what is lazy."""
    case = CASES[name]
    case(LAYERS)
    calls, more = case(LAYERS), case(2 * LAYERS)
    return Counted(name, calls, (more.total() - calls.total()) / LAYERS)


@app.command()
def main(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the counts to this file.")
    ] = None,
) -> None:
    """Count the calls into the package, and the files they lie in, of single steps."""
    require_directory(json_file)
    settings = {"layers": LAYERS, "requests": 2, "ring window": WINDOW}
    report = Report("step_calls", Machine.here(), settings, markdown)
    results = [count(name) for name in CASES]
    report.table(
        f"Calls of a step, {LAYERS} layers",
        ["step", "files", "calls", "of them for each layer"],
        [
            [each.name, str(len(each.calls)), str(each.calls.total()), f"{each.layer:g}"]
            for each in results
        ],
    )
    for each in results:
        rows = [[file, str(calls)] for file, calls in each.calls.most_common()]
        report.table(each.name, ["file", "calls"], rows)
    report.results = {each.name: each.as_dict() for each in results}
    if json_file is not None:
        report.write(json_file)


if __name__ == "__main__":
    app()

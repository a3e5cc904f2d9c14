"""How `inspect` shows its facts: a table of layers, a table of bytes, a picture, or JSON."""

from __future__ import annotations

from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlx_kvcache.commands.figures import layer_facts, ranges_text, size_text
from mlx_kvcache.commands.inspection import Inspection
from mlx_kvcache.facts.config import MAX_CAPACITY
from mlx_kvcache.facts.layer_kinds import LayerGroup, LayerKind, summary
from mlx_kvcache.layout.footprint import MLX_LM_PREFILL_STEP, Extent, bytes_per_token

_BAR_WIDTH = 36
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


def print_inspection(console: Console, found: Inspection) -> None:
    """The whole report, for 80 columns and more."""
    family = f" ({found.family})" if found.family else ""
    console.print(f"[bold]{escape(found.name)}[/]{escape(family)}: {summary(found.geometry)}")
    console.print(_layer_table(found))
    console.print(_growth_line(found))
    console.print()
    console.print(_byte_table(found))
    console.print()
    console.print(_picture(found))
    for note in _notes(found):
        console.print(note, style="dim")


def _layer_table(found: Inspection) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layers", overflow="fold")
    table.add_column("kind", no_wrap=True)
    for name in ("window", "KV heads", "key dim", "value dim", "bytes/token"):
        table.add_column(name, justify="right")
    for group in found.groups:
        table.add_row(*_layer_row(group, found.size))
    return table


def _layer_row(group: LayerGroup, size: int) -> list[str]:
    kind = group.kind
    layers = ranges_text(group.model_layers) or "-"
    cache = kind.cache
    if cache is None:
        return [layers, kind_text(kind), *["-"] * 5]
    window = str(cache.policy.window) if cache.policy.window else "-"
    per_token = str(bytes_per_token(cache, size)) if kind.owns_rows else "-"
    dims = [str(cache.kv_heads), str(cache.key_dim), str(cache.value_dim)]
    return [layers, kind_text(kind), window, *dims, per_token]


def kind_text(kind: LayerKind) -> str:
    """A kind in words: "ring", "shared with layer 14", "flat + state"."""
    text: str = kind.kind
    if kind.kind == "shared":
        text = "shared" if kind.owner is None else f"shared with layer {kind.owner}"
    if kind.ordinal:
        text += f", cache {kind.ordinal + 1}"
    return f"{text} + state" if kind.state else text


def _growth_line(found: Inspection) -> str:
    everything = found.bytes_per_token()
    flat = found.bytes_per_token(window=False)
    line = f"One token takes {everything:,} bytes in {found.config.kv_dtype}"
    if flat != everything:
        line += f"; past the windows only {flat:,}, in the flat layers"
    return line + "."


def _byte_table(found: Inspection) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"at {found.own.tokens:,} tokens, {found.config.kv_dtype}")
    for name in ("used", "allocated", "bytes allocated"):
        table.add_column(name, justify="right")
    for name, footprint in (("mlx_kvcache", found.own), ("mlx-lm's caches", found.theirs)):
        total = footprint.total
        table.add_row(
            name, size_text(total.used), size_text(total.allocated), f"{total.allocated:,}"
        )
    return table


def _picture(found: Inspection) -> Table:
    groups = [group for group in found.groups if group.kind.owns_rows]
    largest = max(found.own.total.allocated, found.theirs.total.allocated)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(width=_BAR_WIDTH)
    table.add_column(justify="right")
    for title, footprint in (("mlx_kvcache", found.own), ("mlx-lm", found.theirs)):
        table.add_row(f"[bold]{title}[/]", size_text(footprint.total.allocated), "", "")
        for number, group in enumerate(groups):
            extent = found.group_extent(group, footprint)
            share = extent.allocated / footprint.total.allocated
            bar = Bar(
                largest,
                0,
                extent.allocated,
                width=_BAR_WIDTH,
                color=_STYLES[number % len(_STYLES)],
            )
            table.add_row(
                f"  {_group_title(group)}", size_text(extent.allocated), bar, f"{share:.0%}"
            )
    return table


def _group_title(group: LayerGroup) -> str:
    cache = group.kind.cache
    window = cache.policy.window if cache is not None else 0
    kind = f"ring({window})" if window else "flat"
    return f"{len(group.cache_layers)} {kind}"


def _notes(found: Inspection) -> list[str]:
    config = found.config
    notes = [
        f"mlx_kvcache: flat layers double from {config.initial_capacity} rows up to the capacity"
        f"{_capacity_text(config.capacity)}; rings hold their window and {config.spare - 1} "
        "spare rows. mlx-lm: rows in steps of 256, windows without spare rows.",
    ]
    if found.prefill is not None and found.prefill > found.theirs.total.allocated:
        notes.append(
            f"While {found.own.tokens:,} tokens are prefilled in chunks of {MLX_LM_PREFILL_STEP}, "
            f"mlx-lm's rotating caches grow by a chunk: {size_text(found.prefill)} in all."
        )
    if any(layer.recurrent for layer in found.geometry.model_layers):
        notes.append("Recurrent states are mlx-lm's own, of fixed size, and not counted here.")
    return notes


def _capacity_text(capacity: int) -> str:
    return "" if capacity == MAX_CAPACITY else f" of {capacity:,}"


def inspect_facts(found: Inspection) -> dict[str, Any]:
    """The same facts for a program. All sizes are bytes."""
    config = found.config
    return {
        "model": found.name,
        "model_type": found.family or None,
        "tokens": found.own.tokens,
        "kv_dtype": config.kv_dtype,
        "capacity": None if config.capacity == MAX_CAPACITY else config.capacity,
        "initial_capacity": config.initial_capacity,
        "spare": config.spare,
        "summary": summary(found.geometry),
        "bytes_per_token": {
            "all": found.bytes_per_token(),
            "flat": found.bytes_per_token(window=False),
            "ring": found.bytes_per_token(window=True),
        },
        "total": {
            "mlx_kvcache": _extent_facts(found.own.total),
            "mlx_lm": {
                **_extent_facts(found.theirs.total),
                "allocated_during_prefill": found.prefill,
            },
        },
        "groups": [_group_facts(found, group) for group in found.groups],
        "cache_layers": [
            {
                **layer_facts(layer),
                "bytes_per_token": bytes_per_token(layer, found.size),
                "mlx_kvcache": _extent_facts(own),
                "mlx_lm": _extent_facts(theirs),
            }
            for layer, own, theirs in zip(
                found.geometry.layers, found.own.layers, found.theirs.layers, strict=True
            )
        ],
        "model_layers": [
            {"caches": list(layer.caches), "shares": layer.shares, "recurrent": layer.recurrent}
            for layer in found.geometry.model_layers
        ],
    }


def _group_facts(found: Inspection, group: LayerGroup) -> dict[str, Any]:
    return {
        "kind": group.kind.kind,
        "model_layers": list(group.model_layers),
        "cache_layers": list(group.cache_layers),
        "shared_with": group.kind.owner,
        "has_state": group.kind.state or group.kind.kind == "recurrent",
        "mlx_kvcache": _extent_facts(found.group_extent(group, found.own)),
        "mlx_lm": _extent_facts(found.group_extent(group, found.theirs)),
    }


def _extent_facts(extent: Extent) -> dict[str, int]:
    return {"used": extent.used, "allocated": extent.allocated}

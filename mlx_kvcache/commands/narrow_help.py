"""`--help` for a narrow terminal, where typer's table would cut names and words short."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from mlx_kvcache.commands.flags import ARGUMENTS, OPTIONS

#: Below so many columns, names stand above their explanation.
NARROW = 72


class Command(TyperCommand):
    """A command whose help is readable at any width."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        if not printed_narrow_help(self, ctx):
            super().format_help(ctx, formatter)


def printed_narrow_help(command: Any, ctx: Any) -> bool:
    """Print the help of a command or group, and say so, where the terminal is narrow."""
    console = Console(highlight=False)
    if console.width >= NARROW:
        return False
    # Slow to import, and seldom needed.
    from rich.markdown import Markdown
    from rich.padding import Padding

    console.print(Text(command.get_usage(ctx), style="bold"))
    console.print()
    console.print(Markdown(command.help or ""))
    for title, entries in _panels(command, ctx).items():
        console.print()
        console.print(Text(f"{title}:", style="bold"))
        for names, text in entries:
            console.print(Padding(Text(names, style="bold cyan"), (0, 0, 0, 2)))
            console.print(Padding(Text(text), (0, 0, 0, 4)))
    return True


def _panels(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Names and help of all parameters and commands, by panel; typer's order."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            default = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
            title = getattr(parameter, "rich_help_panel", None) or default
            panels.setdefault(title, []).append(record)
    commands = getattr(command, "commands", {})
    if commands:
        panels["Commands"] = [
            (name, each.get_short_help_str(1000)) for name, each in commands.items()
        ]
    return panels

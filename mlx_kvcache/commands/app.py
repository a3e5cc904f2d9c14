"""The command line `mlx-kvcache`: what it offers, and how its errors end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mlx_kvcache.commands.batch import batch
from mlx_kvcache.commands.chat import chat
from mlx_kvcache.commands.console import (
    BROKEN_PIPE,
    INTERRUPTED,
    SYSTEM_ERROR,
    USER_ERROR,
    discard_stdout,
    prepare_stdout,
    print_error,
    print_note,
    versions,
)
from mlx_kvcache.commands.generate import generate
from mlx_kvcache.commands.inspect import inspect
from mlx_kvcache.commands.models import models
from mlx_kvcache.commands.op import op
from mlx_kvcache.errors import KVCacheError

# The base of typer's usage errors, wherever the installed version of typer has it.
_ClickException: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


class Application(TyperGroup):
    """The root command: a wrong request ends in one line and status 2, never in a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run as typer does, but for the form of usage errors."""
        try:
            status = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
        except _ClickException as error:
            print_error(f"{error.format_message().rstrip('.')} (--help lists the options)")
            status = USER_ERROR
        if standalone_mode:
            sys.exit(status)
        return status

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and turn what it may end with into an exit status."""
        try:
            return super().invoke(ctx)
        except KVCacheError as error:
            print_error(str(error))
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt as error:
            print_note("interrupted", style="yellow")
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            discard_stdout()
            raise typer.Exit(BROKEN_PIPE) from error
        except OSError as error:
            print_error(str(error))
            raise typer.Exit(SYSTEM_ERROR) from error


app = typer.Typer(
    cls=Application,
    name="mlx-kvcache",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(batch)
app.command()(inspect)
app.command()(models)
app.command()(op)


def _show_version(wanted: bool) -> None:
    if wanted:
        for name, version in versions().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of this package and of what it runs on, and exit.",
        ),
    ] = False,
) -> None:
    """Run Hugging Face LLMs with MLX on the mlx_kvcache KV cache.

    Examples:

    ```sh
    mlx-kvcache generate "What is the capital of France?"
    mlx-kvcache generate --model ./my-model --max-tokens 64 < prompt.txt
    mlx-kvcache chat --system "Answer in one sentence."
    mlx-kvcache inspect ./my-model/config.json --context 32768
    ```
    """
    prepare_stdout()
    if ctx.invoked_subcommand is None and not version:
        typer.echo(ctx.get_help())


def main() -> None:
    """Run the command line with the arguments of the process."""
    app()

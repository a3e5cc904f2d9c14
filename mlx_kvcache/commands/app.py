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
from mlx_kvcache.commands.narrow_help import Command, printed_narrow_help
from mlx_kvcache.commands.op import op
from mlx_kvcache.commands.signals import Terminated
from mlx_kvcache.errors import KVCacheError

# The base of typer's usage errors, wherever the installed version of typer has it.
_ClickException: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


class Application(TyperGroup):
    """The root command: whatever ends it is told in one line, never in a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run as typer does, but for what is said of errors."""
        try:
            status = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
            # What fails at Python's own end would be told of in a traceback.
            sys.stdout.flush()
        except _ClickException as error:
            print_error(f"{error.format_message().rstrip('.')} (--help lists the options)")
            status = USER_ERROR
        except SystemExit as error:
            # What rich and typer make of a broken pipe.
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            discard_stdout()
            status = BROKEN_PIPE
        except _TOLD as error:
            status = _tell(error)
        if standalone_mode:
            sys.exit(status)
        return status

    def make_context(self, *arguments: Any, **choices: Any) -> Any:
        """Take the arguments apart; `--help` and `--version` are answered here."""
        try:
            return super().make_context(*arguments, **choices)
        except KeyboardInterrupt as error:
            raise typer.Exit(_tell(error)) from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        if not printed_narrow_help(self, ctx):
            super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and turn what it may end with into an exit status."""
        try:
            return super().invoke(ctx)
        except _TOLD as error:
            raise typer.Exit(_tell(error)) from error


_TOLD = (KVCacheError, OSError, KeyboardInterrupt, Terminated)


def _tell(error: BaseException) -> int:
    """Say in one line what ended a command; answers the exit status."""
    if isinstance(error, KVCacheError):
        print_error(str(error))
        return USER_ERROR
    if isinstance(error, KeyboardInterrupt):
        print_note("interrupted", style="yellow")
        return INTERRUPTED
    if isinstance(error, Terminated):
        print_note("terminated", style="yellow")
        return error.status
    # It may be stdout that failed, and then its flush at exit would fail again.
    discard_stdout()
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    print_error(str(error))
    return SYSTEM_ERROR


app = typer.Typer(
    cls=Application,
    name="mlx-kvcache",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (generate, chat, batch, inspect, op):
    app.command(cls=Command)(_command)


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

    Exit status: 0 done; 1 the system failed (a full disk, a closed output), a request of `batch`
    did, or `op` is above its tolerance; 2 a wrong request, of which nothing was computed; 130
    Ctrl-C, 141 the reader of the output is gone, 143 SIGTERM, 129 SIGHUP.
    """
    prepare_stdout()
    if ctx.invoked_subcommand is None and not version:
        typer.echo(ctx.get_help())


def main() -> None:
    """Run the command line with the arguments of the process."""
    app()

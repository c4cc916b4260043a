"""The program ``perilune``: its verbs, its only error printer, its exit codes.

Each verb lives in a file of its own and imports what is heavy when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from perilune import __version__
from perilune.cli import chat, serve
from perilune.cli.settings import Verb
from perilune.cli.terminal import abandon, print_error, show_error
from perilune.errors import PeriluneError

_EPILOG = """\b
Examples:
  perilune serve                        the bundled model on http://127.0.0.1:8000
  perilune serve ./my-model --port 9000
  perilune chat                         talk to the bundled model
  echo "12+30?" | perilune chat         one question, the answer on stdout
  perilune inspect ./my-model           what is in a checkpoint, from its headers

\b
Exit codes: 0 done, 1 unexpected or no room for the output, 2 usage, 3 model files, 4 memory, 5 port, 6 peer, 7 engine,
130 interrupted, 141 nobody reads the output any more.
"""
_INSPECT_EPILOG = """\b
Examples:
  perilune inspect ./my-model
  perilune inspect ./my-model --json | jq .tensor_bytes
"""
_INTERRUPTED = 130
_NOBODY_READS = 141  # as shells tell of a program that SIGPIPE ended
_NO_OUTPUT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})

app = typer.Typer(
    name="perilune",
    help="An inference stack for Kimi K2 Thinking and its family.",
    epilog=_EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help: readable everywhere, and three times as fast
    pretty_exceptions_enable=False,
)


@dataclass(slots=True)
class _Session:
    """What an invocation was asked before its verb."""

    debug: bool = False


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"perilune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    context.obj.debug = debug
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


app.command("serve", cls=Verb, epilog=serve.EPILOG, context_settings=serve.SETTINGS)(serve.serve)
app.command("chat", cls=Verb, epilog=chat.EPILOG)(chat.chat)


@app.command("inspect", cls=Verb, epilog=_INSPECT_EPILOG)
def _inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model directory in Hugging Face layout.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what is in a checkpoint, from its headers alone: format, sizes, missing or unknown tensors."""
    from perilune.cli.inspect import inspect

    inspect(model, as_json)


def run(arguments: Sequence[str]) -> int:
    """Runs one invocation; its exit code."""
    session = _Session(debug="--debug" in arguments)
    try:
        code = app(args=list(arguments), prog_name="perilune", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except PeriluneError as error:
        if session.debug:
            traceback.print_exc()
        print_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # The reader of our output has gone, as `head` does; typer and rich end the program then. Nothing is wrong.
        if not isinstance(error if isinstance(error, OSError) else error.__context__, BrokenPipeError):
            raise
        abandon(sys.stdout)
        return _NOBODY_READS
    except Exception as error:  # noqa: BLE001 - the last handler: a person gets a sentence, not a stack
        return _unexpected(error, session)
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception, session: _Session) -> int:
    usage = getattr(error, "format_message", None)  # the parser's own errors: unknown option, missing argument
    if usage is not None:
        verb = getattr(getattr(error, "ctx", None), "command_path", "perilune")
        show_error(str(usage()).rstrip(".").strip(), f"{verb} --help lists what there is")
        return 2
    if session.debug:
        traceback.print_exc()
    if isinstance(error, OSError) and error.errno in _NO_OUTPUT and error.filename is None:
        abandon(sys.stdout)
        show_error(f"the output cannot be written: {os.strerror(error.errno or 0).lower()}")
        return 1
    show_error(f"unexpected {type(error).__name__}: {str(error)[:500]}", "run again with --debug for the traceback")
    return 1


def _open_closed_streams() -> None:
    """Gives the program the three streams that whoever started it may have closed.

    Nothing else can then get their numbers. What is written to an output that was closed fails, as it should.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest number that is free: this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - they live as long as the program
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def main() -> None:
    """Entry point of the console script."""
    _open_closed_streams()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

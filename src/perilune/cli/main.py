"""The program ``perilune``: its verbs, its only error printer, its exit codes.

Each verb lives in a file of its own and imports what is heavy when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from perilune import __version__
from perilune.cli import chat, serve
from perilune.cli.terminal import print_error, show_error
from perilune.errors import PeriluneError

_EPILOG = """\b
Examples:
  perilune serve                        the bundled model on http://127.0.0.1:8000
  perilune serve ./my-model --port 9000
  perilune chat                         talk to the bundled model
  echo "12+30?" | perilune chat         one question, the answer on stdout
  perilune inspect ./my-model           what is in a checkpoint, from its headers

\b
Exit codes: 0 done, 1 unexpected, 2 usage, 3 model files, 4 memory, 5 port, 6 peer, 7 engine, 130 interrupted.
"""

app = typer.Typer(
    name="perilune",
    help="An inference stack for Kimi K2 Thinking and its family.",
    epilog=_EPILOG,
    no_args_is_help=True,
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


app.command("serve", epilog=serve.EPILOG, context_settings=serve.SETTINGS)(serve.serve)
app.command("chat", epilog=chat.EPILOG)(chat.chat)


@app.command("inspect")
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
    except PeriluneError as error:
        if session.debug:
            traceback.print_exc()
        print_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does: nothing is wrong, and nothing more can be told.
        sys.stderr.close()
        return 1
    except Exception as error:  # noqa: BLE001 - the last handler: a person gets a sentence, not a stack
        return _unexpected(error, session)
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception, session: _Session) -> int:
    usage = getattr(error, "format_message", None)  # the parser's own errors: unknown option, missing argument
    if usage is not None:
        show_error(str(usage()).rstrip(".").strip(), "perilune --help lists what there is")
        return 2
    if session.debug:
        traceback.print_exc()
    show_error(f"unexpected {type(error).__name__}: {str(error)[:500]}", "run again with --debug for the traceback")
    return 1


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

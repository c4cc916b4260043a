"""``perilune serve``: a model behind an OpenAI-compatible API."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from perilune.cli.start import (
    Device,
    DeviceOption,
    DtypeOption,
    MaxModelLen,
    ModelArgument,
    ModelChoice,
    ThreadsOption,
    banner,
    loader,
)

EPILOG: Final = """\b
Examples:
  perilune serve
  perilune serve ./Kimi-K2-Thinking --device cuda --max-model-len 32768
  perilune serve ./my-model --served-model-name kimi --served-model-name k2
"""


def serve(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated.  [default: the directory]")
    ] = None,
    max_model_len: MaxModelLen = None,
    device: DeviceOption = Device.CPU,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    max_body_mib: Annotated[int, typer.Option(min=1, max=1024, help="Largest request.")] = 16,
    grace: Annotated[int, typer.Option(min=0, max=3600, help="Seconds for open answers when the server ends.")] = 5,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Listen beyond this machine, although anyone may then ask.")
    ] = False,
) -> None:
    """Serve a model over HTTP: chat completions as OpenAI's and Moonshot's clients speak them."""
    import logging

    from perilune.cli.terminal import LoadView
    from perilune.server.limits import Limits
    from perilune.server.runner import Running, base_url, bind, run_blocking
    from perilune.server.state import ServerState

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    choice = ModelChoice(model, max_model_len, device, dtype, threads)
    state = ServerState(tuple(served_model_name or (choice.name,)), Limits(max_body_bytes=max_body_mib << 20))
    view = LoadView()
    load = loader(choice, state, view)
    sock = bind(host, port, public=insecure_no_auth)
    url = base_url(sock)
    view.phase(f"listening on {url}, not ready yet")
    try:
        run_blocking(Running(state, sock, load, lambda engine: banner(view, engine, url, state), grace))
    finally:
        view.close()
    view.note("stopped")

"""``perilune serve``: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import typer

from perilune.cli.options import Format, ServeOptions
from perilune.cli.settings import show, unknown_variables
from perilune.cli.start import KEY_VARIABLE, Launch, ModelChoice, banner, loader
from perilune.errors import PeriluneError, UsageError

if TYPE_CHECKING:
    from perilune.engine.options import EngineOptions
    from perilune.server.auth import Key, KeyRing
    from perilune.server.limits import Limits
    from perilune.server.state import Engine, ServerState

EPILOG: Final = """\b
Examples:
  perilune serve
  perilune serve ./Kimi-K2-Thinking --device cuda --max-model-len 32768
  perilune serve ./my-model --served-model-name kimi --served-model-name k2
  perilune serve --config /etc/perilune.toml --show-config

\b
Each option can stand in the file (max-num-seqs = 32) and in the environment (PERILUNE_MAX_NUM_SEQS=32).
A single key for clients can be given as PERILUNE_API_KEY.
"""
SETTINGS: Final = {"auto_envvar_prefix": "PERILUNE"}
_BODIES: Final = 4  # of the largest size: two are being tokenised, two arrive or wait


def serve(context: typer.Context, **values: Any) -> None:
    """Serve a model over HTTP: completions and chat completions as OpenAI's and Moonshot's clients speak them."""
    import logging

    from perilune import logs

    options = ServeOptions(**values)
    logs.configure(options.log_format.value, options.log_level.value)
    for warning in unknown_variables(context):
        logging.getLogger("perilune.start").warning(warning)
    if options.show_config:
        check(options)
        show(context, as_json=options.as_json)
        return
    _serve(options)


@dataclass(frozen=True, slots=True)
class Checked:
    """What options say, where they make sense."""

    engine: EngineOptions
    limits: Limits
    read_keys: Callable[[], KeyRing | None]
    keys: KeyRing | None
    public: bool


def check(options: ServeOptions) -> Checked:
    """All that can be told before a model is loaded and a port is taken; changes no file.

    Raises:
        PeriluneError: an option cannot be, or options do not go together.
    """
    from perilune.config import ModelSpec, read_json
    from perilune.engine.addresses import check_event_addresses
    from perilune.server.runner import address_of
    from perilune.server.usage import check_log

    read_keys = _key_source(options)
    keys = read_keys()
    public = options.insecure_no_auth or keys is not None
    engine = check_event_addresses(_engine(options), public=public)
    if options.usage_log is not None:
        check_log(options.usage_log)
    limits = _limits(options)
    ModelSpec.from_config(read_json(_choice(options).path / "config.json"))
    address_of(options.host, options.port, public=public)
    return Checked(engine, limits, read_keys, keys, public)


def _signature() -> inspect.Signature:
    """The options as parameters: what the command line is derived from. All have a variable: one line says so."""
    kinds = get_type_hints(ServeOptions, include_extras=True)
    for kind in kinds.values():
        for info in kind.__metadata__:
            info.show_envvar = False
    keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    options = (
        inspect.Parameter(each.name, keyword, default=each.default, annotation=kinds[each.name])
        for each in fields(ServeOptions)
    )
    return inspect.Signature([context, *options])


serve.__signature__ = _signature()  # type: ignore[attr-defined]  # what `inspect.signature` looks for


def _serve(options: ServeOptions) -> None:
    import logging

    from perilune import logs, memory
    from perilune.cli.terminal import LoadView, LogView
    from perilune.engine.remote import Supervision
    from perilune.server.runner import Running, base_url, bind, run_blocking
    from perilune.server.state import ServerState
    from perilune.server.usage import UsageLog

    as_json = options.log_format is Format.JSON
    view = LogView() if as_json else LoadView()
    try:
        checked = check(options)
        launch = Launch(_choice(options).path, checked.engine, Supervision(options.restart, options.step_deadline))
        names = tuple(options.served_model_name or (_choice(options).name,))
        usage_log = None if options.usage_log is None else UsageLog(options.usage_log)
        state = ServerState(names, checked.limits, checked.keys, usage_log)
        state.metrics_compat = options.metrics_compat.value
        state.strict = options.strict_params
        load = loader(launch, state, view)
        sock = bind(options.host, options.port, public=checked.public)
        url = base_url(sock)
        view.phase(f"listening on {url}, not ready yet")

        def ready(engine: Engine) -> None:
            memory.settle()
            banner(view, engine, url, state)

        run_blocking(
            Running(
                state,
                sock,
                load,
                on_ready=ready,
                grace_s=options.grace,
                on_hangup=lambda: _hang_up(state, checked.read_keys),
            )
        )
    except PeriluneError as error:
        view.close()
        if not as_json:
            raise
        logging.getLogger("perilune.start").error(error.message, extra=logs.fields(hint=error.hint or None))
        raise typer.Exit(error.exit_code) from None
    finally:
        view.close()
    view.note("stopped")


def _choice(options: ServeOptions) -> ModelChoice:
    return ModelChoice(options.model, options.max_model_len, options.device, options.dtype, options.threads)


def _engine(options: ServeOptions) -> EngineOptions:
    from dataclasses import replace

    return replace(
        _choice(options).engine_options,
        max_num_seqs=options.max_num_seqs,
        max_batched_tokens=options.max_batched_tokens,
        kv_tokens=options.kv_tokens,
        block_size=options.block_size,
        policy=options.policy.value,
        prefix_cache=options.prefix_cache,
        row_invariant=options.row_invariant,
        kv_events=options.kv_events,
        kv_events_replay=options.kv_events_replay,
        kv_events_topic=options.kv_events_topic,
        log_format=options.log_format.value,
        log_level=options.log_level.value,
    )


def _limits(options: ServeOptions) -> Limits:
    from perilune.server.limits import Limits

    bodies_mib = options.max_bodies_mib or _BODIES * options.max_body_mib
    if bodies_mib < options.max_body_mib:
        raise UsageError(
            f"--max-bodies-mib is {bodies_mib}: no request could be of --max-body-mib, {options.max_body_mib}",
            hint="raise the one or lower the other",
        )
    return Limits(
        max_body_bytes=options.max_body_mib << 20,
        max_bodies_bytes=bodies_mib << 20,
        body_timeout_s=options.body_timeout,
        send_timeout_s=options.send_timeout,
        token_processes=options.token_processes,
        token_deadline_s=options.token_deadline,
        max_queue=options.max_queue,
        max_queue_tokens=options.max_queue_tokens,
        queue_timeout_s=options.queue_timeout,
        request_timeout_s=options.request_timeout,
        idle_timeout_s=options.idle_timeout,
        max_connections=options.max_connections,
        header_timeout_s=options.header_timeout,
    )


def _key_source(options: ServeOptions) -> Callable[[], KeyRing | None]:
    """Reads the keys that hold now; None where nobody gave any. The variable is taken out of the environment, so that
    no child process has it."""
    from perilune.server.auth import KeyRing, key_of, read_keys

    secret = os.environ.pop(KEY_VARIABLE, None)
    fixed: tuple[Key, ...] = () if secret is None else (key_of("default", secret, where=f"{KEY_VARIABLE}: the key"),)
    path = options.api_key_file

    def read() -> KeyRing | None:
        keys = fixed if path is None else (*fixed, *read_keys(path))
        return KeyRing(keys) if keys else None

    return read


def _hang_up(state: ServerState, read_keys: Callable[[], KeyRing | None]) -> None:
    """SIGHUP: keys are read again, the usage log is opened anew. What is wrong with them changes nothing."""
    import logging

    from perilune.logs import fields as facts

    log = logging.getLogger("perilune.start")
    if state.usage_log is not None:
        state.usage_log.reopen()
    try:
        keys = read_keys()
    except PeriluneError as error:
        log.error("the keys stay as they were: %s", error.message)
        return
    if keys is not None:
        state.set_keys(keys)
        log.info("keys were read again", extra=facts(keys=len(keys)))

"""Every option of ``perilune serve``, once: its name, type, bounds, default and help.

The class below is the only table: the command line, the environment, the configuration file, ``--show-config`` and the
reference in the documentation are derived from it. Imports nothing heavy: it is read for every ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.settings import use
from perilune.cli.start import Device, DeviceOption, DtypeOption, MaxModelLen, ModelArgument, ThreadsOption


class Policy(StrEnum):
    """Order of requests that wait."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


class Format(StrEnum):
    """Form of log lines."""

    TEXT = "text"
    JSON = "json"


class Level(StrEnum):
    """From which severity on log lines are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Compat(StrEnum):
    """Whose metric names are told beside our own."""

    NONE = ""
    VLLM = "vllm"


def _seconds(text: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(min=0.001, metavar="SECONDS", help=text)
    return info


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What an operator may choose. None: decided from the model and the machine."""

    model: ModelArgument = None
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated.  [default: the directory]")
    ] = None

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000
    api_key_file: Annotated[
        Path | None, typer.Option(help="TOML file of keys and their limits, mode 0600; SIGHUP reads it again.")
    ] = None
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Listen beyond this machine without any key.")
    ] = False

    device: DeviceOption = Device.CPU
    dtype: DtypeOption = None
    threads: ThreadsOption = None
    max_model_len: MaxModelLen = None
    max_num_seqs: Annotated[int, typer.Option(min=1, max=1 << 16, help="Requests that run at once.")] = 16
    max_batched_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Tokens of one step; longer prompts are split.")
    ] = 512
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the cache holds.  [default: a share of the free memory]")
    ] = None
    block_size: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Tokens of a cache block.  [default: 32 on cpu, 64 on cuda]")
    ] = None
    policy: Annotated[Policy, typer.Option(help="Who of those that wait is next.")] = Policy.FCFS
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the cache of prompts that begin alike.")] = True
    row_invariant: Annotated[
        bool, typer.Option("--row-invariant", help="The same bits whatever runs beside a request; slow.")
    ] = False
    kv_events: Annotated[str, typer.Option(help="ZMQ address on which cache events are published.")] = ""
    kv_events_replay: Annotated[
        str, typer.Option(help="ZMQ address on which missed cache events can be asked for.")
    ] = ""
    kv_events_topic: Annotated[str, typer.Option(help="Topic of cache events.")] = ""
    restart: Annotated[bool, typer.Option("--restart", help="Start a new engine when it dies.")] = False
    step_deadline: Annotated[float, _seconds("Longest step; past it the engine counts as hung.")] = 300.0

    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 256
    max_queue_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens that may wait.")] = 1 << 20
    queue_timeout: Annotated[float, _seconds("Longest wait for the first step.")] = 60.0
    request_timeout: Annotated[float, _seconds("Longest answer; clients may ask for less.")] = 3600.0

    max_connections: Annotated[int, typer.Option(min=1, help="Connections at once.")] = 2048
    max_body_mib: Annotated[int, typer.Option(min=1, max=1024, help="Largest request.")] = 16
    max_bodies_mib: Annotated[
        int | None,
        typer.Option(min=1, help="All long requests that are being read.  [default: four times the largest]"),
    ] = None
    token_processes: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that read and tokenise all but short requests.")
    ] = 2
    token_deadline: Annotated[float, _seconds("For one request there.")] = 20.0
    header_timeout: Annotated[float, _seconds("For a request's head to arrive.")] = 10.0
    body_timeout: Annotated[float, _seconds("For a request's body to arrive.")] = 30.0
    send_timeout: Annotated[float, _seconds("For a client that does not read.")] = 30.0
    idle_timeout: Annotated[float, _seconds("Between two requests of a connection.")] = 5.0

    grace: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="For open answers when the server ends.")] = (
        30.0
    )
    usage_log: Annotated[Path | None, typer.Option(help="File for a JSON line per request; SIGHUP opens it anew.")] = (
        None
    )
    log_format: Annotated[Format, typer.Option(help="Form of log lines.")] = Format.TEXT
    log_level: Annotated[Level, typer.Option(help="Least severity of log lines.")] = Level.INFO
    metrics_compat: Annotated[Compat, typer.Option(help="Tell metrics under vLLM's names too.")] = Compat.NONE

    strict_params: Annotated[
        bool, typer.Option("--strict-params", help="Refuse unknown fields, and what Moonshot's own service refuses.")
    ] = False

    config: Annotated[Path | None, typer.Option(help="TOML file of these options.", is_eager=True, callback=use)] = None
    show_config: Annotated[bool, typer.Option("--show-config", help="Print every option with its origin, and end.")] = (
        False
    )
    as_json: Annotated[bool, typer.Option("--json", help="With --show-config: print JSON.")] = False

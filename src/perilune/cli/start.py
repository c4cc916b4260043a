"""What ``serve`` and ``chat`` share: their model options, the bundled model, loading with progress, the banner.

Imports nothing heavy: this file is read for every ``--help``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perilune import __version__
from perilune.errors import UsageError

if TYPE_CHECKING:
    from perilune.cli.terminal import StartView
    from perilune.config import EngineConfig
    from perilune.engine.options import EngineOptions
    from perilune.engine.remote import Supervision
    from perilune.server.runner import Load, Loaded
    from perilune.server.state import Engine, ServerState

BUNDLED: Final = "pico"
KEY_VARIABLE: Final = "PERILUNE_API_KEY"
"""Environment variable with a key: the one that ``serve`` asks for, the one that ``chat --url`` sends."""
_QUESTION: Final = "What is 12+30?"
_SHORT: Final = 8192


class Device(StrEnum):
    """Where the model runs."""

    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Type of activations and cache."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help=f"A model directory in Hugging Face layout.  [default: the bundled {BUNDLED}]"
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of prompt and answer together.  [default: what model and memory allow]"),
]
DeviceOption = Annotated[Device, typer.Option(help="Where to run.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Of activations and cache.  [default: float32 on cpu, bfloat16 on cuda]")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=1024, help="CPU threads of the model.  [default: torch's choice]")
]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model and how to run it, as the command line says."""

    directory: Path | None
    max_model_len: int | None = None
    device: Device = Device.CPU
    dtype: Dtype | None = None
    threads: int | None = None

    @property
    def path(self) -> Path:
        """The model's directory.

        Raises:
            UsageError: none was given and none is bundled.
        """
        return bundled_model() if self.directory is None else self.directory

    @property
    def engine_options(self) -> EngineOptions:
        """The same as an engine takes it; the rest of its options as they are by default."""
        from perilune.engine.options import EngineOptions

        return EngineOptions(
            max_model_len=self.max_model_len,
            device=self.device.value,
            dtype=None if self.dtype is None else self.dtype.value,
            threads=self.threads,
        )

    @property
    def name(self) -> str:
        """What clients call the model when nobody says otherwise."""
        return BUNDLED if self.directory is None else self.directory.resolve().name or "model"


def bundled_model() -> Path:
    """The directory of the model that comes with the package.

    Raises:
        UsageError: this build has none.
    """
    path = Path(str(resources.files("perilune").joinpath("assets", BUNDLED)))
    if not (path / "config.json").is_file():
        raise UsageError(
            f"this build has no bundled model {BUNDLED!r}", hint="give a model directory: perilune serve PATH"
        )
    return path


@dataclass(frozen=True, slots=True)
class Launch:
    """A model's directory, and how its engine is run and watched."""

    path: Path
    options: EngineOptions
    supervision: Supervision | None = None


def loader(launch: Launch, state: ServerState, view: StartView) -> Load:
    """The load of a ``Running`` server; phases go to ``view``, bytes to ``/ready`` too.

    Raises:
        ConfigError: config.json is missing or unusable.
    """
    from perilune.config import ModelSpec, read_json

    path = launch.path
    ModelSpec.from_config(read_json(path / "config.json"))  # what is no model is refused before torch is read

    def progress(done: int, total: int) -> None:
        state.progress = (done, total)
        view.progress(done, total)

    async def load() -> Loaded:
        from perilune.engine.remote import RemoteEngine
        from perilune.server.state import read_defaults

        view.phase("starting the engine")
        defaults = read_defaults(path)
        return await RemoteEngine.start(path, launch.options, launch.supervision, progress), defaults

    return load


def banner(view: StartView, engine: Engine, url: str, state: ServerState) -> None:
    """What was started and how to use it, in six lines."""
    spec, config = engine.spec, engine.config
    _, weight_bytes = state.progress
    facts = {
        "model": ", ".join(state.names),
        "format": f"{spec.model_type}, {spec.expert_format} experts, {weight_bytes / 1e6:.1f} MB of weights, "
        f"runs in {config.dtype} on {config.device}",
        "cache": cache_line(engine.status().stats.total_blocks, config),
        "URL": f"{url}/v1",
        "try": curl_line(url, state.names[0], needs_key=state.keys is not None),
    }
    view.ready(f"perilune {__version__} is ready after {view.seconds:.1f} s", facts)


def cache_line(blocks: int, config: EngineConfig) -> str:
    """How much the cache holds, and how many requests at full context and at 8k."""
    lengths = [config.max_model_len, *([_SHORT] if config.max_model_len > _SHORT else [])]
    fits = (f"{blocks // -(-length // config.block_size)} requests of {length} tokens" for length in lengths)
    return f"{blocks * config.block_size} tokens: {' or '.join(fits)}; {config.max_num_seqs} run at once"


def curl_line(url: str, name: str, *, needs_key: bool = False) -> str:
    """A shell command that streams an answer."""
    request = {"model": name, "stream": True, "messages": [{"role": "user", "content": _QUESTION}]}
    body = json.dumps(request, separators=(",", ":"), ensure_ascii=False)
    key = ' -H "authorization: Bearer $KEY"' if needs_key else ""
    return f"curl -N {url}/v1/chat/completions{key} -H 'content-type: application/json' -d {_quoted(body)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"

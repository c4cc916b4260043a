"""A vocabulary without the format's markers is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perilune.chat.markers import Marker, require_markers
from perilune.checkpoint.tiny import write_tiny
from perilune.errors import ConfigError
from perilune.text.tokenizer import Tokenizer


def test_every_marker_is_needed(tmp_path: Path) -> None:
    spec = write_tiny(tmp_path, None, "bf16", seed=0)
    require_markers(Tokenizer.from_dir(tmp_path, spec.vocab_size))
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for marker in Marker:
        names = {k: v for k, v in config["added_tokens_decoder"].items() if v["content"] != marker}
        file.write_text(json.dumps({"added_tokens_decoder": names}))
        with pytest.raises(ConfigError, match="no special token"):
            require_markers(Tokenizer.from_dir(tmp_path, spec.vocab_size))

"""What a client may wish of sampling: one table for chat and completions, and its translation for the engine.

Owns defaults, the bounds of every field, and the checks against the model: ids in the vocabulary, tokens in the
context. Torch-free and without HTTP, since long requests are prepared in a process of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from perilune.errors import ContextLengthError, NotFoundError, RequestError
from perilune.server.fields import Fields
from perilune.server.params import MAX_COUNT, MAX_NAME, Param, count, flag, integer, number, offset, positive
from perilune.types import SamplingParams

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_IDS: Final = 64
MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100.0
MAX_TOP_LOGPROBS: Final = 20
MAX_SEED: Final = (1 << 63) - 1
MAX_PRIORITY: Final = (1 << 31) - 1


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What checks must know of the server: names, the model's sizes and defaults, bounds of one request.

    ``known_ids``: ids below it have a meaning; those between it and the model's ``vocab_size`` have none.
    ``max_prompt_tokens``: of all prompts of a request together. ``strict``: nothing is taken with a warning.
    """

    names: tuple[str, ...]
    known_ids: int
    max_model_len: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_choices: int = 16
    max_prompts: int = 1024
    max_sequences: int = 1024
    max_prompt_tokens: int = 1 << 20
    strict: bool = False


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``SAMPLING``, checked. None: the client did not say, so the model's default holds."""

    n: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    priority: int
    cache_salt: str


def _top_k(fields: Fields) -> int | None:
    """0 and -1 both mean off: clients of different servers send either."""
    value = fields.integer("top_k", -1, MAX_COUNT)
    return 0 if value == -1 else value


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.fail("stop", "a string or an array of strings is needed", code="invalid_type")
    if len(stops) > MAX_STOPS:
        raise fields.fail("stop", f"at most {MAX_STOPS} strings are allowed, it has {len(stops)}")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise fields.fail("stop", f"each string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise fields.fail("stop_token_ids", "an array of token ids is needed", code="invalid_type")
    if len(value) > MAX_STOP_IDS:
        raise fields.fail("stop_token_ids", f"at most {MAX_STOP_IDS} ids are allowed, it has {len(value)}")
    return tuple(dict.fromkeys(value))


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.nested("logit_bias")
    if biases is None:
        return ()
    keys = biases.keys()
    if len(keys) > MAX_BIASES:
        raise fields.fail("logit_bias", f"at most {MAX_BIASES} ids are allowed, it has {len(keys)}")
    found: dict[int, float] = {}
    for key in keys:
        token = int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else -1
        if token < 0 or token in found:
            raise fields.fail("logit_bias", f"its keys must be token ids, each once, and one of them is {key[:40]!r}")
        found[token] = biases.number(key, -MAX_BIAS, MAX_BIAS) or 0.0
    return tuple(found.items())


def _cache_salt(fields: Fields) -> str:
    value = fields.string("cache_salt", MAX_NAME)
    if value == "":
        raise fields.fail("cache_salt", "a string that is not empty is needed")
    return value or ""


def _priority(fields: Fields) -> int:
    return fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0


_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}

SAMPLING: Final[tuple[Param[Any], ...]] = (
    count("n", "answers to each prompt", 1),
    number("temperature", "0 is greedy; default: the model's", 0.0, 2.0),
    positive("top_p", "nucleus; default: the model's", 1.0, "`temperature` 0 is greedy"),
    Param("top_k", _top_k, {"type": "integer", "minimum": -1, "maximum": MAX_COUNT}, "0 and -1: off"),
    number("min_p", "least probability, as a share of the most likely token's", 0.0, 1.0),
    integer("seed", "same seed, same answer; choice i uses seed + i", 0, MAX_SEED),
    Param(
        "stop",
        _stop,
        {
            "oneOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                    "maxItems": MAX_STOPS,
                },
            ]
        },
        "end before any of these strings",
    ),
    Param("stop_token_ids", _stop_token_ids, {**_IDS, "maxItems": MAX_STOP_IDS}, "end at any of these ids"),
    flag("ignore_eos", "do not end at the model's end markers"),
    count("min_tokens", "tokens before the answer may end", 0),
    offset("presence_penalty", "taken from the logits of ids that were said", 0.0, -2.0, 2.0),
    offset("frequency_penalty", "taken for each time that an id was said", 0.0, -2.0, 2.0),
    Param(
        "repetition_penalty",
        lambda fields: positive("repetition_penalty", "", 10.0).read(fields) or 1.0,
        positive("repetition_penalty", "", 10.0).schema,
        "divides the logits of ids in the prompt or the answer",
    ),
    Param(
        "logit_bias",
        _logit_bias,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "maxProperties": MAX_BIASES,
        },
        "added to the logits of these ids",
    ),
    Param(
        "priority",
        _priority,
        {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY, "default": 0},
        "lower runs first, where the scheduling policy is priority",
    ),
    Param(
        "cache_salt",
        _cache_salt,
        {"type": "string", "minLength": 1, "maxLength": MAX_NAME},
        "prompts share cached beginnings only with prompts of the same salt",
    ),
)


def check_ids(name: str, ids: Sequence[int], known_ids: int) -> None:
    """Refuses ids that the vocabulary does not have.

    Raises:
        RequestError: names the field and the id.
    """
    if ids and not 0 <= min(ids) <= max(ids) < known_ids:
        wrong = next(token for token in ids if not 0 <= token < known_ids)
        shown = wrong if abs(wrong) < 1 << 64 else "a number beyond 64 bits"
        raise RequestError(f"`{name}` has {shown}, ids from 0 to {known_ids - 1} are known", param=name)


def check_choices(n: int, prompts: int, facts: Facts) -> None:
    """Bounds what one request may fan out to.

    Raises:
        RequestError: ``n``, or ``n`` for every prompt, is too much.
    """
    if n > facts.max_choices:
        raise RequestError(f"`n` is {n}, an integer from 1 to {facts.max_choices} is needed", param="n")
    if n * prompts > facts.max_sequences:
        raise RequestError(
            f"`n` is {n} for each of {prompts} prompts, {facts.max_sequences} answers at once are allowed",
            param="n",
            hint="send fewer prompts in each request",
        )


def served_name(asked: str | None, names: tuple[str, ...]) -> str:
    """The name under which to answer: what was asked for, or the first one.

    Raises:
        NotFoundError: the model has no such name.
    """
    if asked is None:
        return names[0]
    if asked not in names:
        raise NotFoundError(
            f"there is no model {asked[:120]!r}, this server has {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    return asked


def sampling(
    wishes: Wishes, max_tokens: int | None, prompt_len: int, facts: Facts, param: str, banned: tuple[int, ...] = ()
) -> SamplingParams:
    """For the engine, without seed and logprobs. ``param`` is the field that the prompt came in.

    Raises:
        ContextLengthError: there is not enough room. RequestError: an id is not in the vocabulary.
    """
    check_ids("stop_token_ids", wishes.stop_token_ids, facts.known_ids)
    check_ids("logit_bias", tuple(token for token, _ in wishes.logit_bias), facts.known_ids)
    limit = _max_tokens(max_tokens, prompt_len, facts.max_model_len, param)
    if wishes.min_tokens > limit:
        raise RequestError(
            f"`min_tokens` is {wishes.min_tokens}, at most the {limit} tokens of the answer are allowed",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=limit,
        temperature=facts.temperature if wishes.temperature is None else wishes.temperature,
        top_p=facts.top_p if wishes.top_p is None else wishes.top_p,
        top_k=wishes.top_k or 0,
        min_p=wishes.min_p or 0.0,
        stop=wishes.stop,
        stop_token_ids=wishes.stop_token_ids,
        banned_ids=banned,
        logit_bias=wishes.logit_bias,
        presence_penalty=wishes.presence_penalty,
        frequency_penalty=wishes.frequency_penalty,
        repetition_penalty=wishes.repetition_penalty,
        min_tokens=wishes.min_tokens,
        ignore_eos=wishes.ignore_eos,
    )


def _max_tokens(asked: int | None, prompt_len: int, context: int, param: str) -> int:
    """What was asked for, else the rest of the context.

    Raises:
        ContextLengthError: there is not enough room.
    """
    room = context - prompt_len
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens, the context (max_model_len) holds {context} with the answer",
            param=param,
            hint="shorten it",
        )
    if asked is not None and asked > room:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens and max_tokens is {asked}: together {prompt_len + asked}, "
            f"the context (max_model_len) holds {context}",
            param="max_tokens",
            hint=f"ask for at most {room} tokens, or leave max_tokens out",
        )
    return room if asked is None else asked

"""One request, several sequences: their news as one stream.

The first answer to a prompt leads: the others to it are sent when its first news has come, so that they find the
prompt in the prefix cache instead of computing it again. One sequence that fails ends them all; closing the stream
ends them in the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from perilune.errors import EngineError
from perilune.server.replies import HttpError
from perilune.server.state import Engine
from perilune.types import FinishReason, Request, TokenOut

logger = logging.getLogger(__name__)

News = tuple[int, TokenOut]


async def run(engine: Engine, requests: Sequence[Request]) -> AsyncGenerator[News, None]:
    """News of ``requests``, each with its index, until all have ended.

    Raises:
        RequestError: one can't be admitted. EngineError: the engine is gone. HttpError: one failed.
    """
    if len(requests) == 1:
        async with aclosing(engine.generate(requests[0])) as outs:
            async for out in outs:
                yield 0, healthy(out, engine)
        return
    news: asyncio.Queue[News | Exception] = asyncio.Queue()
    tasks = _start(engine, requests, news)
    left = len(requests)
    try:
        while left:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            yield item[0], healthy(item[1], engine)
            left -= item[1].finish is not None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def healthy(out: TokenOut, engine: Engine) -> TokenOut:
    """The same; the end of a sequence without an answer raises.

    Raises:
        EngineError: the engine is gone. HttpError: only this request failed.
    """
    if out.finish in (FinishReason.ERROR, FinishReason.ABORT):
        logger.error("request %s ended with %s: %s", out.request_id, out.finish, out.error)
        if engine.status().phase != "ready":
            raise EngineError(out.error or "the engine stopped")
        raise HttpError(500, "generation failed; see the server's log", code="generation_failed")
    return out


def _start(
    engine: Engine, requests: Sequence[Request], news: asyncio.Queue[News | Exception]
) -> list[asyncio.Task[None]]:
    shared = engine.config.block_size if engine.config.prefix_cache else None
    tasks: list[asyncio.Task[None]] = []
    leader: tuple[Request, asyncio.Event] | None = None
    for index, request in enumerate(requests):
        follows = None
        if leader is not None and leader[0].prompt is request.prompt:
            # A prompt shorter than a block is not cached: there is nothing to wait for.
            follows = leader[1] if shared is not None and len(request.prompt) > shared else None
        else:
            leader = (request, asyncio.Event())
        tasks.append(asyncio.create_task(_pump(engine, (index, request), news, follows, leader[1])))
    return tasks


async def _pump(
    engine: Engine,
    item: tuple[int, Request],
    news: asyncio.Queue[News | Exception],
    follows: asyncio.Event | None,
    begun: asyncio.Event,
) -> None:
    index, request = item
    try:
        if follows is not None:
            await follows.wait()
        async with aclosing(engine.generate(request)) as outs:
            async for out in outs:
                if out.completion_tokens or out.finish is not None:
                    begun.set()
                news.put_nowait((index, out))
    except Exception as error:  # noqa: BLE001 - told to whoever reads the stream
        news.put_nowait(error)
    finally:
        begun.set()

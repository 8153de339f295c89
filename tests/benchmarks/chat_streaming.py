"""The chat while an answer streams: what a flush costs, and how soon a key is on the screen.

`python -m tests.benchmarks.chat_streaming [--rate TOKENS_PER_S]`. A scripted engine; no model.
A flush is timed with all that follows from it: parsing, layout, painting. Processor time is what
counts for the token rate; wall time has the test driver's waiting in it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator

from textual.pilot import Pilot

from engine import messages as wire
from tests.chat_app import ChatApp, opened, say

SIZE = (120, 40)
CHARACTERS_PER_TOKEN = 4
WORDS = ("the", "model", "routes", "tokens", "to", "experts", "read", "from", "disk", "in", "cache")


def words(dice: random.Random, count: int) -> str:
    """Some prose."""
    return " ".join(dice.choice(WORDS) for _ in range(count))


def mixed(dice: random.Random) -> Iterator[str]:
    """An answer as models write them: headings, prose, lists, code, tables."""
    while True:
        yield f"## {words(dice, 4)}\n\n{words(dice, 60)} **{words(dice, 3)}** `x`.\n\n"
        yield "".join(f"- {words(dice, 12)}\n" for _ in range(5)) + "\n"
        yield (
            "```python\n" + "".join(f"def f{n}(x): return x + {n}\n" for n in range(8)) + "```\n\n"
        )
        yield "| a | b |\n|---|---|\n" + "".join(f"| {n} | {words(dice, 2)} |\n" for n in range(4))
        yield f"\n{words(dice, 80)}\n\n"


def code(dice: random.Random) -> Iterator[str]:
    """One code block that never ends."""
    yield "```python\n"
    while True:
        yield "".join(f"def f{n}(x): return x + {n}  # {words(dice, 3)}\n" for n in range(8))


def prose(dice: random.Random) -> Iterator[str]:
    """One paragraph that never ends."""
    while True:
        yield words(dice, 50) + " "


async def flush_costs(kind: Callable[[random.Random], Iterator[str]]) -> None:
    """Print what one flush costs when the answer is short and when it is long."""
    app = ChatApp()
    async with app.run_test(size=SIZE) as pilot:
        app.hear(opened(40_000))
        await say(pilot, "Go")
        source, n_tokens = kind(random.Random(1)), 0
        for target in (1_000, 5_000, 20_000):
            while n_tokens < target:
                text = next(source)
                n_tokens += len(text) // CHARACTERS_PER_TOKEN
                app.hear(wire.Text(1, text))
            flush(app)
            await pilot.pause(0.2)
            idle = await measure(pilot, lambda: None)
            cost = await measure(pilot, lambda: one_flush(app))
            print(
                f"{kind.__name__:6} {target:6} tokens: {len(list(app.screen.walk_children())):3} "
                f"widgets, {cost - idle:5.1f} ms of processor per flush"
            )


def flush(app: ChatApp) -> None:
    """Show what came, however soon after the last time."""
    app.chat._flush_after = 0.0
    app.chat.flush()


def one_flush(app: ChatApp) -> None:
    """A token comes and is shown."""
    app.hear(wire.Text(1, " more"))
    flush(app)


async def measure(pilot: Pilot[None], act: Callable[[], object], times: int = 30) -> float:
    """Median processor time in ms of doing something and seeing it painted."""
    spent = []
    for _ in range(times):
        began = time.process_time()
        act()
        await pilot.pause()
        spent.append((time.process_time() - began) * 1e3)
    return statistics.median(spent)


async def key_latency(rate: float, seconds: float) -> None:
    """Print how long a key takes to the screen while an answer of 20 000 tokens grows."""
    app = ChatApp()
    async with app.run_test(size=SIZE) as pilot:
        app.hear(opened(40_000))
        await say(pilot, "Go")
        source = mixed(random.Random(2))
        text = "".join(next(source) for _ in range(300))
        app.hear(wire.Text(1, text[: 20_000 * CHARACTERS_PER_TOKEN]))
        flush(app)
        await pilot.pause(0.3)
        stop = asyncio.Event()
        began, cpu = time.perf_counter(), time.process_time()
        stream = asyncio.create_task(tokens(app, source, rate, stop))
        waits = []
        while time.perf_counter() - began < seconds:
            await asyncio.sleep(random.uniform(0.02, 0.12))
            waits.append(await one_key(app))
        busy = (time.process_time() - cpu) / (time.perf_counter() - began)
        stop.set()
        await stream
        waits.sort()
        print(
            f"keys while streaming {rate:g} tok/s at 20 000 tokens: median "
            f"{waits[len(waits) // 2]:.1f} ms, 95 % {waits[int(len(waits) * 0.95)]:.1f} ms, "
            f"worst {waits[-1]:.1f} ms of {len(waits)}; processor {busy * 100:.0f} % of a core"
        )


async def tokens(app: ChatApp, source: Iterator[str], rate: float, stop: asyncio.Event) -> None:
    """Tokens at a steady rate."""
    text = ""
    while not stop.is_set():
        text = text or next(source)
        piece, text = text[:CHARACTERS_PER_TOKEN], text[CHARACTERS_PER_TOKEN:]
        app.hear(wire.Text(1, piece))
        await asyncio.sleep(1 / rate)


async def one_key(app: ChatApp) -> float:
    """Milliseconds from a key to the frame that has it."""
    composer = app.chat.composer
    before = len(composer.text)
    painted = asyncio.Event()
    began = time.perf_counter()
    app.simulate_key("x")
    while len(composer.text) == before:
        await asyncio.sleep(0)
    app.call_after_refresh(painted.set)
    await painted.wait()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of typing")
    options = parser.parse_args()
    for kind in (mixed, code, prose):
        asyncio.run(flush_costs(kind))
    asyncio.run(key_latency(options.rate, options.seconds))


if __name__ == "__main__":
    main()

"""Token rate under the app against the headless rate, in turn, with all panels shown.

Runs the app in tmux at 200×60, types a prompt, and reads the answer's own figures off the screen.
See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from tests.benchmarks.limits import drop_page_cache

_SESSION = "tuiwork-benchmark"
_ANSWERED = re.compile(r"(\d+) tokens · ([\d.]+) tok/s(?! · Esc)")
"""The finished answer's own line; the composer's border has a running rate, with a key behind."""
PROMPT = "tell me a long story about the sea"


def headless(model: Path, settings: list[str]) -> float:
    """Tokens per second of `tuiwork run`."""
    drop_page_cache()
    command = [sys.executable, "-m", "tuiwork", "run", str(model), "-p", PROMPT, "--json"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["tok_s"])


def under_app(model: Path, settings: list[str], patience_s: float) -> float:
    """Tokens per second that the app shows for the same prompt."""
    drop_page_cache()
    command = shlex.join([sys.executable, "-m", "tuiwork", str(model), *settings])
    _tmux("new-session", "-d", "-s", _SESSION, "-x", "200", "-y", "60", command)
    try:
        _wait_for(re.compile(r"dense \d"), patience_s)
        _tmux("send-keys", "-t", _SESSION, "Escape")  # closes the welcome of a first run
        time.sleep(1)
        _tmux("send-keys", "-t", _SESSION, "-l", PROMPT)
        time.sleep(1)
        _tmux("send-keys", "-t", _SESSION, "Enter")
        return float(_wait_for(_ANSWERED, patience_s)[2])
    finally:
        subprocess.run(["tmux", "kill-session", "-t", _SESSION], check=False)


def _tmux(*words: str) -> str:
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=True).stdout


def _wait_for(wanted: re.Pattern[str], patience_s: float) -> re.Match[str]:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        screen = _tmux("capture-pane", "-p", "-t", _SESSION)
        found = wanted.search(screen)
        if found:
            return found
        time.sleep(1)
    raise TimeoutError(f"the app did not show {wanted.pattern!r} in time:\n{screen}")


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--cache-mb", type=int, default=5800)
    arguments = parser.parse_args()
    settings = [
        *("--set", f"cache-mb={arguments.cache_mb}", "--set", f"n-predict={arguments.tokens}"),
        *("--set", "drop-cold-experts=0", "--set", "temp=0"),
    ]
    ratios = []
    for number in range(arguments.rounds):
        plain = headless(arguments.model, settings)
        shown = under_app(arguments.model, settings, 300)
        ratios.append(shown / plain)
        print(f"round {number + 1}: headless {plain:.2f} tok/s, under the app {shown:.2f} tok/s")
    print(f"under the app: {100 * median(ratios):.1f} % of the headless rate")


if __name__ == "__main__":
    main()

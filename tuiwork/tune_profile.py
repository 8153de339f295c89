"""The profile that `tuiwork tune` writes: settings, and in comments what was measured for them."""

from __future__ import annotations

import textwrap
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.config import AUTO
from engine.errors import InputError
from engine.machine import cpu_name, memory
from engine.profile import load_profile
from engine.profile_edit import replace_file
from engine.tune import TuneResult
from engine.tune_knobs import FRACTION, PREFETCH
from engine.tune_search import Trial
from tuiwork import __version__
from tuiwork.figures import lossy_words
from tuiwork.tables import count
from tuiwork.text import MIB, one_line, size

_WIDTH = 96


def write(result: TuneResult, path: Path) -> None:
    """Write the profile in one step, and read it again. Raises InputError."""
    replace_file(path, profile_text(result))
    load_profile(path)


def profile_text(result: TuneResult) -> str:
    """The whole file. Comments hold untrusted names, so control characters are made visible."""
    # Imported here: it takes longer than the rest of the command's start.
    import tomlkit

    document = tomlkit.document()
    for line in _head(result):
        document.add(tomlkit.comment(line))
    document.add(tomlkit.nl())
    document["description"] = description(result)
    tables: dict[str, dict[str, Any]] = {}
    for key, value in result.changes.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    for table, values in tables.items():
        section = tomlkit.table()
        for name, value in values.items():
            for line in _evidence(result, f"{table}.{name}"):
                section.add(tomlkit.comment(line))
            section.add(name, value)
        document[table] = section
    return tomlkit.dumps(document)


def description(result: TuneResult) -> str:
    """One line for lists of profiles; it says LOSSY where it is."""
    name = one_line(Path(result.model.path).name)
    lossy = "LOSSY: " if lossy_words(result.tuned) else ""
    unfinished = "" if result.complete else " (UNFINISHED)"
    rate = ""
    whole = result.search.whole
    if whole is not None:
        rate = f", {whole.comparison.after.tok_s:.3g} tok/s when it was measured"
    return f"{lossy}tuned for {name}{rate}{unfinished}"


def trial_words(trial: Trial) -> str:
    """One trial in a line: what was compared, what came out, what was believed."""
    found, rounds = trial.comparison, trial.rounds
    name = trial.key.rpartition(".")[2]
    head = f"{name} {shown(trial.before)} -> {shown(trial.after)}: " if name else ""
    rates = f"{found.before.tok_s:.3g} -> {found.after.tok_s:.3g} tok/s, ratio {found.ratio:.3f}"
    by_tokens = f"{found.interval.low:.3f} to {found.interval.high:.3f} by tokens"
    by_rounds = f"{rounds.low:.3f} to {rounds.high:.3f} by {len(trial.round_ratios)} rounds"
    if len(trial.round_ratios) < 2:
        by_rounds = "one round"
    kl = f"; {kl_words(trial)}" if trial.held is not None else ""
    return f"{head}{rates} ({by_tokens}, {by_rounds}){kl}. {trial.reason}: {_outcome(trial)}"


def kl_words(trial: Trial) -> str:
    """The mean KL, its interval, and whether the bound holds."""
    bounds = trial.kl.interval
    around = f" ({bounds.low:.3g} to {bounds.high:.3g})" if bounds else ""
    value = "unmeasured" if trial.kl.value is None else f"{trial.kl.value:.3g}"
    return f"KL {value}{around} nats, bound {trial.held}"


def _outcome(trial: Trial) -> str:
    if not trial.key:
        return "all settings together"
    return f"{shown(trial.after if trial.accepted else trial.before)} kept"


def shown(value: Any) -> str:
    """A setting's value in few characters."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _head(result: TuneResult) -> list[str]:
    model, plan, rules = result.model, result.plan, result.plan.rules
    now = datetime.now().astimezone()
    bound = "nothing lossy" if rules.max_kl is None else f"mean KL at most {rules.max_kl:g} nats"
    lines = [
        f"Written by tuiwork {__version__} tune, {now:%Y-%m-%d %H:%M}, for "
        f"{one_line(Path(model.path).name)} ({one_line(model.arch)}, {model.n_expert} experts, "
        f"top-{model.n_expert_used}).",
        f"Machine: {one_line(cpu_name())}, {count(result.place.cores, 'core')}, "
        f"{size(memory().total_bytes)} of memory; load {result.load:.1f} when it began.",
        f"Measured: cells of {plan.n_tokens} tokens behind {plan.warm_up} that are not counted, "
        f"from an empty cache, on {one_line(Path(plan.corpus.name).name)}; interleaved, "
        f"at most {rules.max_rounds} rounds, the order reversed in every second.",
        f"Believed: a ratio whose {100 * rules.confidence:g} % interval leaves out 1 by tokens and "
        f"by rounds. What is not separated changed nothing. Bound: {bound}.",
    ]
    if not result.complete:
        lines.append("UNFINISHED: it was stopped; what had been decided by then is below.")
    whole = result.search.whole
    if whole is not None:
        lines.append(f"Against the start: {trial_words(whole)}.")
    elif result.complete:
        lines.append("Nothing that was tried was faster than the settings it began with.")
    lines.append("These figures hold for this machine, this text and this cache size.")
    return [line for text in lines for line in textwrap.wrap(text, _WIDTH)]


def _evidence(result: TuneResult, key: str) -> list[str]:
    """What was measured for a setting, as lines of comment."""
    notes: list[str] = []
    if key == "stream.cache-mb":
        why = one_line(result.cache_reason) or "as it was asked for"
        notes.append(f'{why}; not searched. "auto" sizes it anew each time')
    if key == "stream.io-threads" and result.lane_rates:
        rates = ", ".join(
            f"{rate.lanes}: {rate.bytes_per_s / MIB:.0f} MiB/s" for rate in result.lane_rates
        )
        notes.append(f"the disk with so many readers: {rates}")
    notes += [trial_words(trial) for trial in result.search.trials if trial.key == key]
    if key == PREFETCH and result.tuned.stream.prefetch == AUTO:
        notes.append(
            "auto where experts are dropped: on for every token, and what is dropped does not "
            "depend on how fast the disk was"
        )
    if key == FRACTION:
        notes.insert(0, "LOSSY: leaves experts out")
    return [line for note in notes for line in textwrap.wrap(note, _WIDTH)]


def check_target(path: Path, *, force: bool) -> None:
    """Refuse a profile that cannot be written, before the work. Raises InputError."""
    if path.is_dir():
        raise InputError(f"--out {path}: is a directory; give a file's name, as in tuned.toml")
    if path.exists() and not force:
        raise InputError(
            f"{path}: is there already; --force replaces it, --out FILE writes another"
        )

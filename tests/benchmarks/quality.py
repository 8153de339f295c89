"""What lossy settings cost, at several cache sizes: the figures of docs/quality.md.

    python -m tests.benchmarks.quality [MODEL] [--tokens N] [--keep DIR] [--write]

Runs `tuiwork quality` once for each cache size, all in the same fine set of settings, and prints
Markdown. With --write it goes into docs/quality.md, between its marks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.model_file import ModelFile
from tuiwork.models import demo_model

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "quality.md"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
PICTURE = DOCUMENT.parent / "pictures" / "quality.png"
FRACTIONS = ",".join(f"{0.05 * step:.2f}" for step in range(4, 21, 2))
SETS = (
    f"drop-cold-experts={FRACTIONS}+drop-renorm=true,false",
    f"cold-policy=substitute+drop-cold-experts={FRACTIONS}",
)
CACHE_SHARES = (0.25, 0.5, 0.75)
"""Cache sizes, of all experts together."""
MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and with --write replace the document's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--keep", type=Path, help="folder for the JSON documents")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    documents = [
        measure(options.model, budget, options.tokens, draw=options.write and number == 1)
        for number, budget in enumerate(budgets(options.model or demo_model()))
    ]
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        for document in documents:
            budget = document["reference"]["cache"]["budget_bytes"] // MIB
            (options.keep / f"quality-{budget}-mib.json").write_text(json.dumps(document, indent=2))
    figures = "\n\n".join([*map(section, documents), *pictured(options.write)])
    print(figures)
    if options.write:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), figures))
    return 0


def budgets(model: Path) -> list[int]:
    """Whole MiB that are about these shares of a model's experts."""
    experts = ModelFile.open(model).experts.expert_bytes / MIB
    return [max(1, round(share * experts)) for share in CACHE_SHARES]


def measure(model: Path | None, budget: int, tokens: int, *, draw: bool) -> dict[str, Any]:
    """One run of `tuiwork quality`; its document."""
    command = [sys.executable, "-m", "tuiwork", "quality", *([str(model)] if model else [])]
    # Divergence does not depend on threads, and one does not wait for other work's.
    command += ["--json", "--tokens", str(tokens), "--threads", "1"]
    command += ["--set", f"cache-mb={budget}"]
    command += ["--set", "force-cache=true", "--set-of", f"n-expert-used={fewer(model)}"]
    for one in SETS:
        command += ["--set-of", one]
    if draw:
        command += ["--plot", str(PICTURE)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def fewer(model: Path | None) -> str:
    """Every number of experts below the model's own."""
    top_k = ModelFile.open(model or demo_model()).experts.n_expert_used
    return ",".join(map(str, range(top_k - 1, 0, -1)))


def section(document: dict[str, Any]) -> str:
    """One cache size in Markdown."""
    reference, model, text = document["reference"], document["model"], document["text"]
    cache = reference["cache"]
    share = 100 * cache["budget_bytes"] / model["expert_bytes_total"]
    head = (
        f"**Cache {cache['budget_bytes'] // MIB} MiB ({share:.0f} % of all experts)**: "
        f"{text['scored_tokens']} tokens of `{Path(text['name']).name}`, top-"
        f"{model['n_expert_used']} of {model['n_expert']} experts; lossless perplexity "
        f"{reference['ppl']:.3f} ({reference['ppl_lo']:.3f}–{reference['ppl_hi']:.3f}), hits "
        f"{percent(reference['hit_rate'])} %."
    )
    words = [textwrap.fill(text, 100, break_on_hyphens=False) for text in sentences(document)]
    parts = [textwrap.fill(head, 100), settings_table(document), levels_table(document), *words]
    return "\n\n".join(part for part in parts if part)


def settings_table(document: dict[str, Any]) -> str:
    """Every setting's figures."""
    lines = [
        "| setting | KL mean (95 %) | KL p99 | top-1 % | ppl ratio (95 %) | saved % | out % |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in document["settings"]:
        out = one["drop_rate"] + one["substitute_rate"]
        lines.append(
            f"| {one['name']} | {number(one['kl_mean'])} ({number(one['kl_lo'])}–"
            f"{number(one['kl_hi'])}) | {number(one['kl_p99'])} | {percent(one['top1'])} | "
            f"{one['ppl_ratio']:.4f} ({one['ppl_ratio_lo']:.4f}–{one['ppl_ratio_hi']:.4f}) | "
            f"{percent(one['reads_saved'])} | {percent(out)} |"
        )
    return "\n".join(lines)


def levels_table(document: dict[str, Any]) -> str:
    """Kinds of settings at equal reads saved."""
    levels = [level for level in document["at_equal_reads"] if len(level["families"]) > 1]
    if not levels:
        return ""
    kinds = sorted({one["family"] for level in levels for one in level["families"]})
    lines = [
        f"| reads saved | {' | '.join(f'KL: {kind}' for kind in kinds)} | cheapest |",
        "| --- " * (len(kinds) + 2) + "|",
    ]
    for level in levels:
        costs = {one["family"]: number(one["kl"]) for one in level["families"]}
        best = level["families"][0]["family"]
        sure = {True: "", False: ", not separated", None: ", unmeasured"}[level["separated"]]
        cells = " | ".join(costs.get(kind, "–") for kind in kinds)
        lines.append(f"| {100 * level['reads_saved']:.0f} % | {cells} | {best}{sure} |")
    return "\n".join(lines)


def sentences(document: dict[str, Any]) -> list[str]:
    """Renormalising and turns, a line each."""
    pairs = []
    for pair in document["renormalising"]:
        helps = "helps" if pair["difference"] > 0 else "hurts"
        words = {True: helps, False: "makes no difference beyond chance", None: "unmeasured"}
        pairs.append(
            f"{pair['fraction']:g}: {number(pair['kl_with'])} with, "
            f"{number(pair['kl_without'])} without ({words[pair['separated']]})"
        )
    turns = [
        f"{turn['family']} at {turn['name']} ({percent(turn['agreement'])} % of the resamples)"
        for turn in document["turns"]
    ]
    found = [f"Renormalising, mean KL: {'; '.join(pairs)}."] if pairs else []
    return [*found, f"The curves turn: {'; '.join(turns)}."] if turns else found


def pictured(drawn: bool) -> list[str]:
    """The plot of the middle cache size, where it was drawn."""
    return ["![KL divergence against reads saved](pictures/quality.png)"] if drawn else []


def replaced(text: str, figures: str) -> str:
    """The document with other figures between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def number(value: float | None) -> str:
    """Three significant digits, or a dash."""
    return "–" if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A fraction in percent, or a dash."""
    return "–" if value is None else f"{100 * value:.1f}"


if __name__ == "__main__":
    sys.exit(main())

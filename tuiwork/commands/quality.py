"""`tuiwork quality`: what lossy settings cost, measured against the lossless run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from engine.errors import InputError
from tuiwork import console
from tuiwork.settings import CommonFlags, switch, whole_number

if TYPE_CHECKING:
    from engine.config import RunConfig
    from engine.quality import QualityPlan, QualityResult
    from engine.quality_sets import Variant

MEASURED = Group("What is measured", sort_key=1)


def quality(
    model: Annotated[
        str | None,
        Parameter(help="the GGUF file; of a split model, its first part; default: a demo model"),
    ] = None,
    /,
    *,
    text: Annotated[
        str | None,
        Parameter(
            help="a text file in UTF-8, or the name of a text that comes along; default: prose "
            "that is in the public domain",
            metavar="FILE|NAME",
            group=MEASURED,
        ),
    ] = None,
    tokens: Annotated[
        int,
        whole_number("most tokens of the text; 0: all of it", MEASURED, gte=0),
    ] = 1024,
    warm_up: Annotated[
        int,
        whole_number(
            "tokens that are read as a prompt before scoring, so that the cache is warm; "
            "0: start cold",
            MEASURED,
            gte=0,
            lte=2**20,
        ),
    ] = 64,
    set_of: Annotated[
        list[str] | None,
        Parameter(
            help="settings to compare: drop-cold-experts=0.5,1.0; keys of one set joined by +; "
            "may be repeated; default: drop, substitute and fewer experts, renormalised and not",
            metavar="KEY=A,B,C",
            negative="",
            consume_multiple=False,
            group=MEASURED,
        ),
    ] = None,
    sets: Annotated[
        Path | None,
        Parameter(help="settings to compare, from a TOML file with [[sets]]", group=MEASURED),
    ] = None,
    scratch: Annotated[
        Path | None,
        Parameter(
            help="folder for the lossless run's logits while it measures; default: the cache "
            "folder of tuiwork doctor",
            metavar="DIR",
            group=MEASURED,
        ),
    ] = None,
    plot: Annotated[
        Path | None, Parameter(help="draw it into this file, PNG or SVG", group=MEASURED)
    ] = None,
    json: Annotated[bool, switch("one JSON document on stdout", MEASURED)] = False,
    common: CommonFlags | None = None,
) -> int:
    """Measure what lossy settings cost: perplexity, KL divergence and top-1 agreement.

    Runs a text token by token, lossless first, then under each setting.
    Ctrl-C ends it and shows the settings that were finished.
    """
    from engine.quality_corpus import read_corpus
    from tuiwork.models import open_config

    common = common or CommonFlags()
    # All is checked before a demo model may have to be made.
    common.resolve(model)
    variants = _chosen(set_of, sets)
    corpus = read_corpus(text or text_for(model))
    if plot is not None:
        _check_plot(plot)
    config = open_config(model, common)

    from engine.quality import QualityPlan
    from engine.quality_sets import configured, default_variants
    from tuiwork.models import cache_dir

    own = configured(config)
    if own is not None:
        variants = [own, *(variants or default_variants(_top_k(config)))]
    plan = QualityPlan(corpus, variants, tokens, warm_up, scratch or cache_dir() / "quality")
    return _measure(config, plan, plot, as_json=json)


def _chosen(set_of: list[str] | None, sets: Path | None) -> list[Variant]:
    from engine.quality_sets import parse_sets, read_sets

    if set_of and sets is not None:
        raise InputError("--set-of and --sets both say what to compare: give one of them")
    return parse_sets(set_of) if set_of else read_sets(sets) if sets is not None else []


def text_for(model: str | None) -> str | None:
    """The demo model knows one small world; it is measured on a text of that, where it has one."""
    from engine.demo import DEMO_MODEL
    from engine.quality_corpus import DEMO_TEXT, shipped_texts

    is_demo = model is None or Path(model).expanduser().resolve() == DEMO_MODEL.resolve()
    return DEMO_TEXT if is_demo and DEMO_TEXT in shipped_texts() else None


def _top_k(config: RunConfig) -> int:
    from engine.model_file import ModelFile

    return ModelFile.open(config.model.path).experts.n_expert_used


def _check_plot(path: Path) -> None:
    from tuiwork.replay_plot import check_plot

    check_plot(path)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"--plot {path}: there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"--plot {path}: cannot be written")


def _measure(config: RunConfig, plan: QualityPlan, plot: Path | None, *, as_json: bool) -> int:
    # Imported here: all that could be refused without native code has been.
    from engine.quality import QualityRun
    from tuiwork.interrupt import cancel_on_interrupt
    from tuiwork.opening import end_clearly_on_abort
    from tuiwork.progress import ProgressBar
    from tuiwork.time_left import TimeLeft

    end_clearly_on_abort(config.model.path)
    with ProgressBar() as bar:

        def note(line: str) -> None:
            bar.close()
            console.note(line)

        run = QualityRun(config, plan, progress=TimeLeft(bar), note=note)
        with cancel_on_interrupt(run.cancel):
            result = run.run()
    if result is None:
        console.note("Stopped before the lossless run was done: there is nothing to show.")
        return 130
    return _show(result, plot, as_json)


def _show(result: QualityResult, plot: Path | None, as_json: bool) -> int:
    from tuiwork.quality_view import document, table

    if as_json:
        console.write_json(document(result))
    else:
        console.write(table(result) + "\n")
    if plot is not None:
        from tuiwork.quality_plot import write_plot

        write_plot(result, plot)
        console.note(f"Drawn into {plot}")
    if result.failed:
        return 1
    return 130 if result.unfinished else 0

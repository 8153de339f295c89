"""`tuiwork tune`: find settings for a model on this machine, and write them as a profile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from engine.errors import InputError
from tuiwork import console
from tuiwork.settings import CommonFlags, switch, whole_number

if TYPE_CHECKING:
    from engine.config import RunConfig
    from engine.tune import TunePlan, TuneResult

TUNING = Group("Tuning", sort_key=1)


def tune(
    model: Annotated[
        str | None,
        Parameter(help="the GGUF file; of a split model, its first part; default: a demo model"),
    ] = None,
    /,
    *,
    lossless: Annotated[
        bool, switch("try nothing that changes answers (the default)", TUNING)
    ] = False,
    max_kl: Annotated[
        float | None,
        Parameter(
            help="allow dropping cold experts while the mean KL divergence from the lossless run "
            "stays below this, in nats: 0.02",
            metavar="NATS",
            allow_leading_hyphen=True,
            group=TUNING,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(
            help="the profile to write; default: one named after the model, among your profiles",
            metavar="FILE",
            group=TUNING,
        ),
    ] = None,
    force: Annotated[bool, switch("replace a profile that is there", TUNING)] = False,
    tokens: Annotated[
        int,
        whole_number("tokens that each measurement counts", TUNING, gte=16, lte=2**20),
    ] = 48,
    warm_up: Annotated[
        int,
        whole_number(
            "tokens before them, which fill the cache and are not counted", TUNING, gte=0, lte=2**20
        ),
    ] = 32,
    rounds: Annotated[
        int,
        whole_number(
            "most rounds of a comparison; a gain is believed after three at the earliest",
            TUNING,
            gte=3,
            lte=50,
        ),
    ] = 5,
    text: Annotated[
        str | None,
        Parameter(
            help="the text to measure on, or the name of one that comes along",
            metavar="FILE|NAME",
            group=TUNING,
        ),
    ] = None,
    scratch: Annotated[
        Path | None,
        Parameter(
            help="folder for the lossless run's logits while it measures",
            metavar="DIR",
            group=TUNING,
        ),
    ] = None,
    json: Annotated[bool, switch("one JSON document on stdout", TUNING)] = False,
    common: CommonFlags | None = None,
) -> int:
    """Find settings by measuring, and write them as a profile with the evidence.

    Sizes the cache from memory, measures the disk, and tries readers, overlap,
    threads and, with --max-kl, drop fractions. Settings that you give are held.
    Ctrl-C ends it; the profile then has what was decided until then.
    """
    from engine.quality_corpus import read_corpus
    from tuiwork.commands.quality import text_for
    from tuiwork.models import cache_dir, open_config

    common = common or CommonFlags()
    # All is checked before a demo model may have to be made.
    common.resolve(model)
    _check_bound(max_kl, lossless)
    corpus = read_corpus(text or text_for(model))
    config = open_config(model, common)
    path = _target(config, out, force)

    from engine.tune import TunePlan
    from engine.tune_search import Rules

    rules = Rules(max_kl=max_kl, max_rounds=rounds)
    plan = TunePlan(corpus, rules, tokens, warm_up, scratch or cache_dir() / "quality")
    return _tune(config, plan, path, as_json=json)


def _check_bound(max_kl: float | None, lossless: bool) -> None:
    if max_kl is None:
        return
    if lossless:
        raise InputError("--lossless and --max-kl: give one of them")
    if not 0 < max_kl < math.inf:
        raise InputError(
            f"--max-kl {max_kl:g}: must be a number above 0, in nats, such as 0.02; for nothing "
            "lossy at all, --lossless"
        )


def _target(config: RunConfig, out: Path | None, force: bool) -> Path:
    from engine.profile_paths import user_profiles_dir
    from tuiwork.tune_profile import check_target

    stem = Path(config.model.path).stem or "model"
    path = (out or user_profiles_dir() / f"{stem}-tuned.toml").expanduser()
    check_target(path, force=force)
    return path


def _tune(config: RunConfig, plan: TunePlan, path: Path, *, as_json: bool) -> int:
    # Imported here: all that could be refused without native code has been.
    from engine.tune import TuneRun
    from tuiwork.interrupt import cancel_on_interrupt
    from tuiwork.opening import end_clearly_on_abort
    from tuiwork.progress import ProgressBar
    from tuiwork.time_left import TimeLeft
    from tuiwork.tune_profile import write

    end_clearly_on_abort(config.model.path)
    told = 0
    with ProgressBar() as bar:

        def learned(result: TuneResult) -> None:
            nonlocal told
            # Kept at once: what was learned survives whatever comes.
            write(result, path)
            for trial in result.search.trials[told:]:
                bar.close()
                _tell(trial)
            told = len(result.search.trials)

        run = TuneRun(config, plan, progress=TimeLeft(bar), learned=learned)
        with cancel_on_interrupt(run.cancel):
            result = run.run()
    if result is None:
        console.note("Stopped before anything was known; no profile was written.")
        return 130
    write(result, path)
    return _show(result, path, as_json)


def _tell(trial: object) -> None:
    from engine.tune_search import Trial
    from tuiwork.tables import wrapped
    from tuiwork.tune_profile import trial_words

    assert isinstance(trial, Trial)
    console.note(wrapped(trial_words(trial), 4))


def _show(result: TuneResult, path: Path, as_json: bool) -> int:
    from tuiwork import tune_view

    if as_json:
        console.write_json(tune_view.document(result, path))
    else:
        console.write(tune_view.text(result, path) + "\n")
    return 0 if result.complete else 130

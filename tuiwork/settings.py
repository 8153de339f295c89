"""The flags that `run` and the chat share: a setting each, and where settings come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Group, Parameter, validators

from engine.config import SETTINGS, RunConfig, allowed
from engine.profile import resolve

STREAMING = Group("Streaming", sort_key=2)
LOSSY = Group("Lossy: these change the answer", sort_key=3)
SAMPLING = Group("Sampling", sort_key=4)


def setting_flag(key: str, group: Group, *names: str) -> Parameter:
    """A flag whose help is the setting's own; its value is checked with all other settings."""
    spec = SETTINGS[key]
    name = "--" + key.rpartition(".")[2]
    doc = spec.doc.removeprefix("lossy: ")
    return Parameter(
        name=[name, *names],
        help=f"{doc} [{allowed(spec)}; default: {spec.default}]",
        metavar="VALUE",
        show_default=False,
        group=group,
        # `--temp -1` shall be told what is allowed, not that -1 is no option.
        allow_leading_hyphen=True,
        # A script may add to a command line that it was given: the last one counts.
        allow_repeating=True,
    )


def switch(help: str, group: Group | None = None) -> Parameter:
    """A flag that is there or not."""
    if group is None:
        # Said as None, it would be in no group, and so not in the help.
        return Parameter(help=help, negative="", show_default=False)
    return Parameter(help=help, negative="", show_default=False, group=group)


def whole_number(help: str, group: Group, gte: int, lte: int | None = None) -> Parameter:
    """A number from `gte` to `lte`; said twice, the last one counts."""
    return Parameter(
        help=help,
        validator=validators.Number(gte=gte, lte=lte),
        metavar="N",
        # As of a setting: -5 is out of range and no option, and the last one counts.
        allow_leading_hyphen=True,
        allow_repeating=True,
        group=group,
    )


@Parameter(name="*")
@dataclass(frozen=True)
class CommonFlags:
    """What can be said on every command line that runs a model."""

    profile: Annotated[
        list[str],
        Parameter(
            help="settings from a profile; may be repeated, later ones win",
            metavar="NAME|FILE",
            negative="",
            show_default=False,
            consume_multiple=False,
        ),
    ] = field(default_factory=list)
    set: Annotated[
        list[str],
        Parameter(
            help="any setting: stream.cache-mb=4000, or cache-mb=4000; may be repeated",
            metavar="KEY=VALUE",
            negative="",
            show_default=False,
            consume_multiple=False,
        ),
    ] = field(default_factory=list)
    cache_mb: Annotated[str | None, setting_flag("stream.cache-mb", STREAMING)] = None
    io_threads: Annotated[str | None, setting_flag("stream.io-threads", STREAMING)] = None
    no_stream: Annotated[
        bool, switch("plain llama.cpp with a mapped file, to compare with", STREAMING)
    ] = False
    threads: Annotated[str | None, setting_flag("model.threads", STREAMING)] = None
    ctx: Annotated[str | None, setting_flag("model.ctx", STREAMING)] = None
    n_expert_used: Annotated[str | None, setting_flag("routing.n-expert-used", LOSSY)] = None
    drop_cold_experts: Annotated[str | None, setting_flag("routing.drop-cold-experts", LOSSY)] = (
        None
    )
    temp: Annotated[str | None, setting_flag("sampling.temp", SAMPLING)] = None
    seed: Annotated[str | None, setting_flag("sampling.seed", SAMPLING)] = None
    n_predict: Annotated[str | None, setting_flag("run.n-predict", SAMPLING, "-n")] = None
    raw: Annotated[
        bool, switch("complete the prompt as it is, without the chat template", SAMPLING)
    ] = False
    system: Annotated[str | None, setting_flag("run.system", SAMPLING)] = None

    def resolve(
        self,
        model: str | None,
        more: Mapping[str, Any] | None = None,
        *,
        base: Sequence[str] = (),
    ) -> RunConfig:
        """All settings together. Raises InputError.

        `more` are further settings by dotted key; `base` are profiles that any other overrides.
        """
        flags: dict[str, Any] = {
            "model.path": model,
            "stream.cache-mb": self.cache_mb,
            "stream.io-threads": self.io_threads,
            "stream.enabled": False if self.no_stream else None,
            "model.threads": self.threads,
            "model.ctx": self.ctx,
            "routing.n-expert-used": self.n_expert_used,
            "routing.drop-cold-experts": self.drop_cold_experts,
            "sampling.temp": self.temp,
            "sampling.seed": self.seed,
            "run.n-predict": self.n_predict,
            "run.raw": True if self.raw else None,
            "run.system": self.system,
            **(more or {}),
        }
        return resolve([*base, *self.profile], self.set, flags)

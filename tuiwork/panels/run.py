"""The run: which model, under which settings, how full its context is, and what fell back."""

from __future__ import annotations

import textwrap

from engine.config import SETTINGS, get
from engine.messages import Opened
from tuiwork.meters.glyphs import bar
from tuiwork.meters.meters import Doing
from tuiwork.panels.panel import Line, Panel
from tuiwork.text import one_line, sanitize, size
from tuiwork.tuning.changes import short_name, value_text

_NAME_WIDTH = 9


class RunPanel(Panel):
    """What a person would want to quote beside a figure."""

    TITLE = "Run"
    TAB = "Run"
    HELP = (
        "The model and its shape, the profile and what in it changes the answer (LOSSY), how much "
        "of the context is used, and everything that was asked for but could not be had."
    )

    def lines(self, width: int, height: int) -> list[Line]:
        """The model, the settings, the context, the notes."""
        opened = self.meters.opened
        if opened is None:
            return self._without_model(width)
        model = self._named("model", [(one_line(opened.info.name), "strong")])
        notes = self._notes(opened, width)
        most_wanted = [model, self._profile(), self._context_line(width), *notes]
        path = _short_path(opened.info.path, width - _NAME_WIDTH)
        rest = [
            self._named("runs", [(self._runs(opened), "")]),
            self._named("shape", [(_shape(opened), "")]),
            self._named("file", [(path, "")]),
        ]
        if len(most_wanted) + len(rest) > height and len(most_wanted) < height:
            rest = rest[: height - len(most_wanted)]
        return [*most_wanted[:3], *rest, *notes]

    def _without_model(self, width: int) -> list[Line]:
        if self.meters.doing is Doing.OPENING:
            stage = one_line(self.meters.stage)
            return [
                [(f"{stage} {100 * self.meters.fraction:.0f} %", "strong")],
                [(bar(self.meters.fraction, width, self.palette.glyphs), "accent")],
            ]
        if self.meters.trouble:
            text = sanitize(self.meters.trouble)
            return [[(line, "bad")] for line in textwrap.wrap(text, width)]
        return [[("No model is open.", "dim")]]

    def _named(self, name: str, line: Line) -> Line:
        return [(f"{name:<{_NAME_WIDTH}}", "dim"), *line]

    def _profile(self) -> Line:
        config = self.meters.config
        line: Line = [(one_line(self.meters.profile) or "built-in defaults", "")]
        if self.meters.changes.changes:
            line.append((f" + {len(self.meters.changes.changes)} changes", "accent"))
        if config is not None:
            for key, spec in SETTINGS.items():
                value = get(config, key)
                if spec.lossy_at(value):
                    line.append((f"  LOSSY {short_name(key)} {value_text(key, value)}", "lossy"))
        return self._named("profile", line)

    def _context_line(self, width: int) -> Line:
        opened = self.meters.opened
        assert opened is not None
        used, ctx = self.meters.context_used, opened.info.ctx
        tail = f" {used} of {ctx} tokens"
        cells = max(4, min(40, width - _NAME_WIDTH - len(tail)))
        role = "bad" if used > 0.95 * ctx else "warn" if used > 0.8 * ctx else "good"
        filled = bar(used / max(ctx, 1), cells, self.palette.glyphs)
        return self._named("context", [(filled, f"{role}/trough"), (tail, "")])

    def _runs(self, opened: Opened) -> str:
        config = self.meters.config or opened.resolved
        threads = f"{config.model.threads} threads"
        if not config.stream.enabled:
            return f"{threads}, mapped file, not streaming"
        direct = "O_DIRECT" if config.stream.o_direct else "through the page cache"
        cache = config.stream.cache_mb
        kept = f"cache {cache} MiB" if cache else "no cache"
        return (
            f"{threads}, {kept}, {config.stream.io_threads} lanes, {direct}, "
            f"dense {config.stream.dense_weights}; opened in {opened.load_s:.1f} s"
        )

    def _notes(self, opened: Opened, width: int) -> list[Line]:
        lines: list[Line] = []
        for note in opened.notes:
            wrapped = textwrap.wrap(sanitize(note), max(10, width - 2)) or [""]
            lines.append([("! ", "warn"), (wrapped[0], "")])
            lines += [[("  " + more, "")] for more in wrapped[1:]]
        return lines


def _shape(opened: Opened) -> str:
    info = opened.info
    n_routed = len(opened.layers)
    layers = (
        f"{n_routed} of {info.n_layer}" if n_routed and n_routed != info.n_layer else info.n_layer
    )
    return (
        f"{one_line(info.arch)}, {layers} layers of {info.n_expert} experts, "
        f"top-{info.n_expert_used}, experts {size(info.expert_bytes_total)}, "
        f"{size(info.token_demand_bytes)} per token"
    )


def _short_path(path: str, width: int) -> str:
    text = one_line(path)
    return text if len(text) <= width else "…" + text[-max(width - 1, 1) :]

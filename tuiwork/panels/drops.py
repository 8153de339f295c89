"""Dropped routings: what was left out, where, and what share of the router's weight it was."""

from __future__ import annotations

from tuiwork.meters.glyphs import chart, thousands
from tuiwork.meters.meters import RoutingTotals
from tuiwork.panels.panel import Line, Panel, fitting


class DropsPanel(Panel):
    """Totals above, then each layer as a column."""

    TITLE = "Dropped routings"
    TAB = "Drops"
    HELP = (
        "LOSSY: routed experts that were left out or replaced because they were not in memory and "
        "weighed little, by layer, since the last change of a setting; the share of the router's "
        "weight that was discarded with them; and the weight below which they go."
    )

    def lines(self, width: int, height: int) -> list[Line]:
        """Totals, what is in force, and the layers as columns."""
        totals = self.meters.routing()
        if totals is None or self.meters.opened is None:
            return [[("Nothing streams, so nothing can be left out.", "dim")]]
        head = [self._in_force(width), *self._totals(totals, width)]
        room = height - len(head) - 1
        if room < 1 or not totals.left_out.any():
            return head
        return [*head, *self._layers(totals, width, min(room, 8)), self._scale(totals, width)]

    def _in_force(self, width: int) -> Line:
        config, opened = self.meters.config, self.meters.opened
        assert config is not None and opened is not None
        routing, top_k = config.routing, self.meters.top_k()
        threshold = self.meters.threshold()
        if threshold != threshold:
            if self.meters.config is not None and routing.n_expert_used:
                return [("LOSSY", "lossy"), (f" only {top_k} experts per token; none dropped", "")]
            return [
                ("lossless", "good"),
                (" nothing is left out; ] raises the drop fraction", "dim"),
            ]
        parts: list[Line] = [
            [
                ("LOSSY", "lossy"),
                (f" {routing.cold_policy} {routing.drop_cold_experts:.2f}", "strong"),
            ],
            [
                ("below ", "dim"),
                (f"{100 * threshold:.1f} %", "strong"),
                (" of a token's weight", "dim"),
            ],
            [(f"top-{top_k}", "dim")],
            [("renormalised" if routing.drop_renorm else "not renormalised", "dim")],
        ]
        if routing.drop_in_prefill:
            parts.append([("also in the prompt", "lossy")])
        return fitting(parts, width, "  ")

    def _totals(self, totals: RoutingTotals, width: int) -> list[Line]:
        routed, dropped = int(totals.routed.sum()), int(totals.dropped.sum())
        substituted = int(totals.substituted.sum())
        share = f"{100 * dropped / routed:.1f} %" if routed else self.palette.glyphs.unmeasured
        parts: list[Line] = [
            [("dropped ", ""), (share, "strong"), (f" of {thousands(routed)} routed", "")],
            [(thousands(dropped), "strong"), (" dropped", "")],
            [(thousands(substituted), "strong"), (" substituted", "")],
        ]
        if substituted and not dropped:
            parts = parts[2:]
        mass = totals.mass_share()
        shown = self.palette.glyphs.unmeasured if mass != mass else f"{100 * mass:.2f} %"
        line: Line = [(shown, "strong"), (" of the weight discarded", "")]
        return [fitting(parts, width), line]

    def _layers(self, totals: RoutingTotals, width: int, height: int) -> list[Line]:
        routed = totals.routed.clip(min=1)
        shares = (totals.left_out / routed).tolist()
        repeat = max(1, min(3, width // len(shares)))
        columns = [share for share in shares for _ in range(repeat)][:width]
        top = max(max(shares), 1e-9)
        drawn = chart(columns, len(columns), height, top, self.palette.glyphs)
        return [[(line, "lossy")] for line in drawn]

    def _scale(self, totals: RoutingTotals, width: int) -> Line:
        shares = totals.left_out / totals.routed.clip(min=1)
        worst = int(shares.argmax())
        opened = self.meters.opened
        layers = opened.layers if opened is not None else ()
        first, last = (layers[0].number, layers[-1].number) if layers else (0, len(shares) - 1)
        number = layers[worst].number if layers else worst
        parts: list[Line] = [
            [(f"layers {first} to {last}", "dim")],
            [(f"most in {number}: {100 * float(shares[worst]):.1f} %", "dim")],
            [("since the last change", "dim")],
        ]
        return fitting(parts, width, "  ")

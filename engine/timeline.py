"""The timeline of tokens in a model's context: what is decoded, kept, reused and taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.counters import StoreCounters
from engine.errors import GraphChanged, TuiworkError
from engine.ggml import llama
from engine.open_model import OpenModel
from engine.recorder import Recorder

_ABORTED = 2


class Timeline:
    """Decodes tokens one batch at a time. Only `cancel` may be called from another thread."""

    def __init__(self, opened: OpenModel, recorder: Recorder, n_vocab: int) -> None:
        self._opened = opened
        self._recorder = recorder
        self._n_vocab = n_vocab
        self._batch: Any = llama.llama_batch_init(llama.llama_n_batch(opened.context), 0, 1)
        self._totals = StoreCounters(opened.allocate)
        self.tokens: list[int] = []
        """Tokens whose keys and values are in the context."""
        self.cancelled = False
        self.logits: np.ndarray | None = None
        """The logits of the last decoded token, until the next decode."""

    @property
    def reads_so_far(self) -> tuple[int, int]:
        """Reads of expert slices by all completed decodes, and their bytes."""
        totals = dict(zip(self._totals.NAMES, self._totals.totals.tolist(), strict=True))
        return totals["reads"], totals["read_bytes"]

    def cancel(self) -> None:
        """Stop the running decode after its current node, and those that would follow."""
        self.cancelled = True
        self._opened.abort.set()

    def clear(self) -> None:
        """Empty the context."""
        llama.llama_memory_clear(self._memory, True)
        self.tokens = []

    def close(self) -> None:
        """Free the batch."""
        if self._batch is not None:
            llama.llama_batch_free(self._batch)
            self._batch = None

    def reuse_prefix(self, tokens: Sequence[int]) -> int:
        """Keep what the context and `tokens` begin with alike, the last token excepted.

        Returns how many are kept: the rest must be decoded.
        """
        common = 0
        for ours, theirs in zip(self.tokens, tokens[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        self._cut_to(common)
        return len(self.tokens)

    def decode(self, tokens: list[int], *, want_logits: bool) -> None:
        """Decode tokens behind those in the context.

        On any failure the context is as before, or empty if it cannot be rewound. A cancelled
        decode returns without having added anything.
        """
        for attempt in (1, 2):
            try:
                self._decode_once(tokens, want_logits)
                return
            except GraphChanged:
                kept = len(self.tokens)
                self._rewind()
                if attempt == 2:
                    raise
                self._opened.learn_again()
                if len(self.tokens) < kept:
                    raise  # a recurrent state does not go back: what the tokens follow is gone
                self._recorder.undo_decode()
            except BaseException:
                self._rewind()
                raise

    @property
    def _memory(self) -> Any:
        return llama.llama_get_memory(self._opened.context)

    def _cut_to(self, length: int) -> None:
        if length == len(self.tokens):
            return
        if length and llama.llama_memory_seq_rm(self._memory, 0, length, -1):
            self.tokens = self.tokens[:length]
        else:
            self.clear()

    def _rewind(self) -> None:
        """After a stopped decode nothing behind the kept tokens may remain."""
        if self.tokens and not llama.llama_memory_seq_rm(self._memory, 0, len(self.tokens), -1):
            self.clear()

    def _decode_once(self, tokens: list[int], want_logits: bool) -> None:
        opened, hook = self._opened, self._opened.hook
        self._fill_batch(tokens, want_logits)
        hook.begin()
        if not self.cancelled:
            opened.abort.clear()
        with opened.pool.computing(), self._recorder.timed_decode():
            status = llama.llama_decode(opened.context, self._batch)
        if status != 0 and opened.router is not None:
            opened.router.loader.end_decode()
        if status == _ABORTED:
            opened.abort.clear()
            hook.check()
            if self.cancelled:
                self._rewind()
                return
        if status != 0:
            hook.check()
            raise TuiworkError(f"llama.cpp could not decode (llama_decode returned {status})")
        if opened.router is not None:
            try:
                hook.end()
            finally:
                opened.router.loader.end_decode()
            self._publish()
        self.tokens += tokens
        if want_logits:
            pointer = llama.llama_get_logits_ith(opened.context, -1)
            self.logits = np.ctypeslib.as_array(pointer, (self._n_vocab,))

    def _fill_batch(self, tokens: list[int], want_logits: bool) -> None:
        batch, start = self._batch, len(self.tokens)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = start + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = 0
        batch.logits[len(tokens) - 1] = want_logits

    def _publish(self) -> None:
        """Bring the live totals up to date, once per decode."""
        router, totals = self._opened.router, self._totals
        assert router is not None
        step = router.step
        for name in ("io_ns", "stall_ns", "mgmt_ns", "reads", "read_bytes"):
            totals.totals[totals.NAMES.index(name)] += getattr(step, name)
        self.publish_store()

    def publish_store(self) -> None:
        """Bring the live totals of the cache up to date."""
        store = self._opened.store
        self._totals.publish(
            clock=store.clock,
            hits=store.hits,
            misses=store.misses,
            evictions=store.evictions,
            resident_bytes=store.resident_bytes,
            budget_bytes=store.budget_bytes,
        )

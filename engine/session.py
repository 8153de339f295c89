"""A session: one opened model and one changing timeline of tokens in its context.

Every caller (headless runs, the app's engine process, tests) runs this same loop. One thread at a
time may use a session; only `cancel` may be called from another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from engine import live_settings
from engine.auto_cache import AutoCache
from engine.chat import ChatTemplate, Message, begun_reasoning, split_reasoning
from engine.closing import Closing
from engine.config import RunConfig, require_valid
from engine.counters import Allocate, private
from engine.diagnostics import Diagnostics
from engine.errors import ContextFull, InputError
from engine.open_model import OpenModel
from engine.opening import open_model
from engine.recorder import Recorder
from engine.results import Answer, LayerCounts, LayerShape, ModelInfo, StreamCounts
from engine.sampling import Sampler
from engine.sizing import token_demand_bytes
from engine.tallies import layer_counts, stream_counts
from engine.teacher_forcing import teacher_forced
from engine.telemetry import MIB, Metrics
from engine.timeline import Timeline
from engine.turn import Turn
from engine.vocabulary import TextStream, Vocabulary
from engine.warm_start import WarmStart

__all__ = ["Answer", "ModelInfo", "Progress", "Session"]

Progress = Callable[[str, float], None]


class Session(Closing):
    """An opened model, ready to generate."""

    def __init__(self, config: RunConfig, opened: OpenModel, options: Diagnostics) -> None:
        self.config = config
        self.notes = opened.notes
        self.cache_reason = opened.cache_reason
        self._opened = opened
        self._options = options
        self._vocabulary = Vocabulary(opened.model)
        self._template = self._read_template()
        self.auto = AutoCache(opened, config, self.notes, poison=options.poison)
        self._recorder = Recorder(opened, self.model_info, self.resolved, options)
        self._timeline = Timeline(opened, self._recorder, self._vocabulary.n_tokens)
        self.auto.watchers.append(self._timeline.publish_store)
        self._warm = WarmStart(opened, config, self.notes)
        self._open = True

    @classmethod
    def open(
        cls,
        config: RunConfig,
        *,
        progress: Progress | None = None,
        options: Diagnostics | None = None,
        allocate: Allocate = private,
    ) -> Session:
        """Open the model of `config`.

        `progress(stage, fraction)` is called while a person waits. Raises InputError for settings
        that cannot be used, ModelError for the file, AbiMismatch for the installed llama.cpp.
        """
        options = options or Diagnostics()
        require_valid(config)
        config = options.adjust(config)
        opened = open_model(
            config,
            progress,
            poison=options.poison,
            observe=options.observes,
            allocate=allocate,
        )
        try:
            if opened.router is not None:
                opened.router.compiled.allowed = not options.interpreted
            return cls(config, opened, options)
        except BaseException:
            opened.close()
            raise

    @property
    def model_info(self) -> ModelInfo:
        """What was opened."""
        opened, file = self._opened, self._opened.file
        layout, top_k = (
            file.experts,
            self.config.routing.n_expert_used or file.experts.n_expert_used,
        )
        return ModelInfo(
            str(file.paths[0]),
            file.name,
            file.arch,
            layout.n_layer,
            layout.n_expert,
            top_k,
            opened.n_ctx,
            self._vocabulary.n_tokens,
            token_demand_bytes(opened.layers, top_k)
            if opened.layers
            else layout.token_demand_bytes,
            layout.layer_demand_bytes // max(layout.n_expert_used, 1) * top_k,
            layout.expert_bytes,
            opened.dense_bytes or layout.dense_bytes,
            self._template is not None,
            opened.row_bytes,
        )

    @property
    def resolved(self) -> RunConfig:
        """The configuration as it is really in use: nothing automatic is left in it."""
        opened = self._opened
        changes: dict[str, Any] = {
            "model.path": str(opened.file.paths[0]),
            "model.ctx": opened.n_ctx,
            "model.threads": opened.n_threads,
            "model.batch": opened.batch,
            "stream.cache-floor-mb": self.auto.floor_bytes // MIB,
            "stream.overlap": "on" if opened.router and opened.router.loader.overlap else "off",
            "stream.prefetch": opened.router.prefetch if opened.router else "off",
        }
        if opened.streams and opened.lanes is not None:
            changes["stream.cache-mb"] = opened.store.budget_bytes // MIB
            changes["stream.io-threads"] = opened.lanes.count
            changes["stream.o-direct"] = opened.lanes.o_direct
        else:
            changes["routing.drop-cold-experts"] = 0.0
        return self.config.replace(changes)

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's own tokens."""
        return self._vocabulary

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The routed layers; none where nothing is streamed."""
        return tuple(
            LayerShape(layer.number, layer.n_expert, layer.entry_bytes)
            for layer in self._opened.layers
        )

    @property
    def kv_bytes(self) -> int | None:
        """Memory of the context's keys, values and states; None: unknown."""
        return self._opened.kv_bytes

    @property
    def metrics(self) -> Metrics:
        """Every token so far."""
        return self._recorder.metrics

    @property
    def kept_tokens(self) -> Sequence[int]:
        """The tokens that the context holds."""
        return self._timeline.tokens

    @property
    def last_logits(self) -> np.ndarray | None:
        """The logits of the last decoded token, until the next decode."""
        return self._timeline.logits

    def counts(self) -> StreamCounts | None:
        """What streaming did so far; None where nothing is streamed."""
        return stream_counts(self._opened, *self._timeline.reads_so_far)

    def layer_counts(self) -> list[LayerCounts]:
        """What became of routed experts, by layer; empty where nothing is streamed."""
        return layer_counts(self._opened)

    def _read_template(self) -> ChatTemplate | None:
        try:
            return ChatTemplate.of_model(self._opened.model, self._vocabulary)
        except InputError as error:
            # The weights are as good as ever: what needs no template still works.
            self.notes.append(f"{error}. Only raw text can be completed")
            return None

    def tokenize(self, prompt: str | Sequence[Message]) -> list[int]:
        """The tokens of a raw text, or of messages through the model's template.

        Raises InputError for an empty prompt, or for messages to a model without a template.
        """
        return self._tokenized(prompt)[0]

    def _tokenized(self, prompt: str | Sequence[Message]) -> tuple[list[int], str]:
        """The tokens, and the reasoning mark with which the template ends."""
        if isinstance(prompt, str):
            tokens = self._vocabulary.tokenize(prompt, add_special=True, parse_special=True)
            empty, opening = not prompt, ""
        else:
            if self._template is None:
                raise InputError(
                    "this model has no chat template, so it can only complete raw text (--raw)"
                )
            text = self._template.prompt(prompt)
            opening = begun_reasoning(text)
            # The template writes its own begin-of-text where it wants one.
            add_bos = self._vocabulary.adds_bos and not text.startswith(
                self._vocabulary.bos_text or "\0"
            )
            tokens = self._vocabulary.tokenize(text, add_special=add_bos, parse_special=True)
            empty = not any(message["content"] for message in prompt)
        if empty or not tokens:
            raise InputError("the prompt is empty: give a text to answer or to go on from")
        return tokens, opening

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        n_predict: int | None = None,
        fit_answer: bool = False,
        on_text: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
        progress: Progress | None = None,
    ) -> Answer:
        """Answer messages, or go on from a raw text.

        What the context holds already of the prompt is not computed again. `n_predict` defaults to
        `run.n-predict`; with `fit_answer` it shrinks to the room that is left. Raises ContextFull
        before any work if prompt and answer do not fit, ReadError if the disk fails (the session
        stays usable).
        """
        self._timeline.cancelled = False
        tokens, opening = self._tokenized(prompt)
        limit = self._room_for(len(tokens), n_predict or self.config.run.n_predict, fit_answer)
        sampler = Sampler(self.config.sampling)
        turn = Turn(TextStream(self.config.run.stop), limit, sampler, on_text, on_token, opening)
        self._recorder.begin_turn(len(tokens))
        try:
            turn.n_reused = self._prefill(tokens, progress)
            if not self._timeline.cancelled:
                self._decode_loop(turn)
        finally:
            turn.sampler.close()
            self._recorder.end_turn()
            self._warm.turn_ended()
        if self._timeline.cancelled:
            turn.stop_reason = "cancelled"
        return self._answer(turn, len(tokens))

    def teacher_force(
        self, tokens: Sequence[int], n_prompt: int = 0, on_prompt: Callable[[], None] | None = None
    ) -> Iterator[np.ndarray]:
        """Decode given tokens one by one in an emptied context (see `engine.teacher_forcing`)."""
        return teacher_forced(self._timeline, self._recorder, tokens, n_prompt, on_prompt)

    def cancel(self) -> None:
        """Stop the running generation within a token. May be called from any thread."""
        self._timeline.cancel()

    def set_live(self, changes: dict[str, Any]) -> None:
        """Change settings between tokens, by dotted key.

        Takes stream.cache-mb, stream.io-threads, routing.n-expert-used and everything of
        sampling and run. Raises InputError for others (they need the model reopened) and for
        impossible values; then nothing has changed.
        """
        config = live_settings.changed_config(self.config, changes)
        if self._opened.streams:
            live_settings.apply(self._opened, config, changes, poison=self._options.poison)
        self.config = config
        self.auto.follow(config)

    @property
    def wants_looks(self) -> bool:
        """Whether `look` has anything to do while nothing is asked for."""
        return self.auto.holds or self._warm.is_busy

    def look(self) -> None:
        """Between answers: an automatic cache follows the memory, and what came in is counted."""
        warms = self._warm.is_busy
        self.auto.hold()
        if warms:
            assert self._opened.router is not None
            self._opened.router.loader.collect()
            self._timeline.publish_store()

    def trace_routes(self, path: Path | None) -> None:
        """Write every routing from the next decode on to a new file; None: stop.

        May be called between tokens. Raises InputError for a file that cannot be written.
        """
        self._recorder.trace_routes(path)

    def clear(self) -> None:
        """Forget the conversation; the expert cache stays warm."""
        self._timeline.clear()

    def close(self) -> None:
        """Free the model. The session cannot be used afterwards."""
        if self._open:
            self._open = False
            self._warm.save()
            self._recorder.close()
            self._timeline.close()
            self._opened.close()

    def _room_for(self, n_prompt: int, wanted: int, fit_answer: bool) -> int:
        room = self._opened.n_ctx - n_prompt
        if room < 1 or (room < wanted and not fit_answer):
            raise ContextFull(
                f"the prompt has {n_prompt} tokens and the answer may have {wanted}, together "
                f"{n_prompt + wanted}; the context holds {self._opened.n_ctx}. Raise model.ctx "
                "(--ctx), shorten the prompt, or ask for fewer tokens (-n)"
            )
        return min(room, wanted)

    def _prefill(self, tokens: list[int], progress: Progress | None) -> int:
        """Bring the context to `tokens`, all decoded; return how many it held already."""
        reused = self._timeline.reuse_prefix(tokens)
        started = perf_counter()
        position = reused
        while position < len(tokens) and not self._timeline.cancelled:
            self.auto.hold()
            chunk = tokens[position : position + self._opened.batch]
            last = position + len(chunk) == len(tokens)
            self._recorder.begin_decode(position, len(chunk), prefill=True)
            self._timeline.decode(chunk, want_logits=last)
            position += len(chunk)
            if progress is not None:
                progress("reading the prompt", position / len(tokens))
        self._recorder.prefilled(reused, perf_counter() - started)
        return reused

    def _decode_loop(self, turn: Turn) -> None:
        recorder = self._recorder
        while True:
            token = self._next_token(turn)
            if self._vocabulary.ends_generation(token) and not self.config.run.ignore_eos:
                turn.stop_reason = "eos"
                break
            turn.take(token, self._vocabulary.piece(token))
            if turn.stream.stopped is not None:
                turn.stop_reason = "stop"
                break
            if len(turn.tokens) >= turn.limit:
                full = len(self._timeline.tokens) + 1 >= self._opened.n_ctx
                turn.stop_reason = "context" if full else "length"
                break
            if self._timeline.cancelled:
                break
            self.auto.hold()
            recorder.begin_decode(len(self._timeline.tokens), 1, prefill=False)
            self._timeline.decode([token], want_logits=True)
            if self._timeline.cancelled:
                break
            recorder.end_token(token, turn.limit)
        turn.finish()

    def _next_token(self, turn: Turn) -> int:
        assert self._timeline.logits is not None
        if self._options.random_tokens is not None:
            return self._options.random_token(len(turn.tokens), self._vocabulary.n_tokens)
        if turn.sampler.part is not self.config.sampling:
            turn.sampler.close()
            turn.sampler = Sampler(self.config.sampling)
        return turn.sampler.choose(self._opened.context, self._timeline.logits)

    def _answer(self, turn: Turn, n_prompt: int) -> Answer:
        reasoning, text = split_reasoning("".join(turn.text))
        figures = self._recorder.turn_summary()
        decoded, prefill_s = figures["tokens"], figures["prefill_s"]
        new_prompt = n_prompt - turn.n_reused
        return Answer(
            text,
            reasoning,
            turn.tokens,
            n_prompt,
            turn.n_reused,
            len(turn.tokens),
            figures["tok/s"] if decoded else None,
            new_prompt / prefill_s if prefill_s > 0 and new_prompt else None,
            turn.stop_reason,
            figures,
        )

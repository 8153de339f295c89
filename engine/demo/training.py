"""Training the demo model on a CPU. `python -m engine.demo.training --help`.

Everything is kept in the folder of a run: checkpoint.pt (to go on), weights.npz (to export) and
log.jsonl. A run that is stopped (Ctrl-C) keeps its checkpoint; started again it goes on from there.

The rows of a step are shared among processes with a thread each, which meet twice per step. One
process with several threads would meet at every operation, and wait there for whoever else uses
the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.demo import tokenizer
from engine.demo.corpus import SHARES
from engine.demo.loss import WeightedLoss
from engine.demo.model import Model
from engine.demo.optimizer import Optimizer
from engine.demo.packing import Packer, Rows, held_out_rows
from engine.demo.schedule import Schedule
from engine.demo.shape import Shape

BALANCE = 0.01
"""Weight of the balance loss, which keeps experts from being left out."""
_HELD_OUT_ROWS = 8
_PATIENCE = 3600
"""Seconds after which a process takes the others for dead."""
_END, _PAUSE = -1.0, -2.0


class Run:
    """A model, what trains it, and where both are kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder: Path = args.run
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        torch.set_num_threads(1)
        words = tokenizer.load(args.corpus / "tokenizer.json")
        end = words.token_to_id(tokenizer.END)
        shape = Shape(n_vocab=words.get_vocab_size())
        self.shape = shape.dense() if args.dense else shape
        self.model = Model(self.shape)
        self.optimizer = Optimizer(self.model, args.workers)
        self.packer = Packer(args.corpus / "corpus.npz", SHARES, end)
        self.step, self.tokens, self.seconds, progress = 0, 0, 0.0, 0.0
        saved = self.folder / "checkpoint.pt"
        if saved.exists():
            state = torch.load(saved, weights_only=False)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.tokens = state["step"], state["tokens"]
            self.seconds = state["seconds"]
            progress = args.progress if args.progress is not None else state["progress"]
        self.schedule = Schedule(progress, args.steps, args.minutes)
        self.held_out = {
            domain: held_out_rows(
                list(tokenizer.encode_all(words, texts)), _HELD_OUT_ROWS, args.length + 1, end
            )[0]
            for domain, texts in json.loads((args.corpus / "held-out.json").read_text()).items()
        }

    def gather(self, worker: int) -> dict[str, float]:
        """This process's gradients for the step; what they say about the model."""
        self.optimizer.begin(worker)
        self.packer.seed(self.args.seed, self.step, worker)
        rows = self.packer.rows(self.args.rows // self.args.workers, self.args.length + 1)
        loss, balance, loads = self._loss(rows)
        (loss + BALANCE * balance).backward()
        uneven = (loads.float().amax(1) / loads.float().mean(1)).max().item()
        return {"loss": loss.item(), "balance": balance.item(), "busiest": uneven}

    def update(self, worker: int, factor: float) -> None:
        """This process's part of the step."""
        self.step += 1
        self.tokens += self.args.rows * self.args.length
        self.optimizer.step(worker, self.step, factor)

    def _loss(self, rows: Rows) -> tuple[Any, Any, Any]:
        ids, documents = torch.from_numpy(rows.ids), torch.from_numpy(rows.documents)
        hidden, balance, loads = self.model(ids[:, :-1], documents[:, :-1])
        weights = torch.from_numpy(rows.weights)[:, 1:].reshape(-1)
        targets = ids[:, 1:].reshape(-1)
        loss = WeightedLoss.apply(
            hidden.reshape(-1, self.shape.n_embd), self.model.output, targets, weights
        )
        return loss, balance, loads

    def held_out_loss(self) -> dict[str, float]:
        """Nats per token of held-out text, by domain."""
        with torch.no_grad():
            return {d: self._loss(rows)[0].item() for d, rows in self.held_out.items()}

    def save(self) -> None:
        """Keep everything; a run that is cut off while it saves keeps the checkpoint before."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "progress": self.schedule.progress,
        }
        unfinished = self.folder / "checkpoint.partial"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / "checkpoint.pt")
        arrays = {name: value.numpy() for name, value in self.model.state_dict().items()}
        unfinished = self.folder / "partial.npz"
        facts = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds)}
        about = json.dumps({**dataclasses.asdict(self.shape), **facts, "seed": self.args.seed})
        np.savez(unfinished, about=np.array(about), **arrays)
        unfinished.replace(self.folder / "weights.npz")

    def log(self, **values: Any) -> None:
        """A line for the log and the terminal."""
        line = json.dumps({"step": self.step, "tokens": self.tokens, **values})
        print(line, flush=True)
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(line + "\n")


def train(run: Run) -> None:
    """Train until the schedule is done."""
    args = run.args
    context = multiprocessing.get_context("fork")
    meet = context.Barrier(args.workers)
    # The first process decides: the learning rate's factor, negative to end.
    factor = context.Value("d", 0.0, lock=False)
    helpers = [
        context.Process(target=_help, args=(run, worker, meet, factor), daemon=True)
        for worker in range(1, args.workers)
    ]
    for helper in helpers:
        helper.start()
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.append(number))
    saved_at, recent = time.monotonic(), []
    while not run.schedule.done and not stopping:
        start = time.monotonic()
        factor.value = run.schedule.factor(run.step)
        meet.wait(_PATIENCE)
        recent.append(run.gather(0))
        meet.wait(_PATIENCE)
        run.update(0, factor.value)
        seconds = time.monotonic() - start
        run.schedule.advance(seconds, _seconds_until(args.finish_at))
        run.seconds += seconds
        if run.step % args.log_every == 0:
            means = {key: sum(r[key] for r in recent) / len(recent) for key in recent[0]}
            rounded = {key: round(value, 4) for key, value in means.items()}
            rate = args.rows * args.length / seconds
            run.log(progress=round(run.schedule.progress, 4), rate=round(rate), **rounded)
            recent.clear()
        measure = run.step % args.measure_every == 0 or run.schedule.done
        save = time.monotonic() - saved_at > 60 * args.save_every or run.schedule.done
        save = save or bool(stopping)
        if measure or save:
            # The others' part of the step must be done too.
            factor.value = _PAUSE
            meet.wait(_PATIENCE)
        if measure:
            losses = run.held_out_loss()
            run.log(perplexity={d: round(math.exp(loss), 2) for d, loss in losses.items()})
        if save:
            run.save()
            saved_at = time.monotonic()
        if measure or save:
            meet.wait(_PATIENCE)
    factor.value = _END
    meet.wait(_PATIENCE)
    run.log(finished=True, seconds=round(run.seconds))


def _help(run: Run, worker: int, meet: Any, factor: Any) -> None:
    """What the other processes do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        meet.wait(_PATIENCE)
        if factor.value == _END:
            return
        if factor.value == _PAUSE:
            meet.wait(_PATIENCE)
            continue
        now = factor.value
        run.gather(worker)
        meet.wait(_PATIENCE)
        run.update(worker, now)


def _seconds_until(clock: str | None) -> float | None:
    if clock is None:
        return None
    hour, minute = map(int, clock.split(":"))
    now = datetime.datetime.now()
    end = now.replace(hour=hour, minute=minute, second=0)
    return (end - now).total_seconds()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("corpus", type=Path, help="the folder that engine.demo.corpus filled")
    add("run", type=Path, help="the folder of this run; not in the repository")
    add("--minutes", type=float, help="train so long (a stopped process does not count)")
    add("--finish-at", metavar="HH:MM", help="end at this time of this day")
    add("--steps", type=int, help="take so many steps")
    add("--progress", type=float, help="put the schedule here (0 to 1) when going on")
    add("--dense", action="store_true", help="the baseline without experts")
    add("--rows", type=int, default=16, help="rows per step")
    add("--length", type=int, default=256, help="tokens per row")
    add("--workers", type=int, default=2, help="processes; they share the rows")
    add("--seed", type=int, default=1)
    add("--log-every", type=int, default=20, metavar="STEPS")
    add("--measure-every", type=int, default=250, metavar="STEPS")
    add("--save-every", type=float, default=5, metavar="MINUTES")
    args = parser.parse_args()
    if args.minutes is None and args.steps is None and args.finish_at is None:
        parser.error("say how long: --minutes, --finish-at or --steps")
    train(Run(args))


if __name__ == "__main__":
    main()

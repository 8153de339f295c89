"""Cells on a Dask cluster. Needs `distributed`, which is an optional extra.

Dask queues, places and repeats; nothing here schedules. A worker runs one cell at a time, however
many threads it has. tuiwork and the models must be installed on every worker at the same paths.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import InputError, TuiworkError
from tuiwork.sweep.cell import Order, Outcome, Stop, execute

_LOCAL = re.compile(r"local:(\d+)$")
_MOST_LOCAL = 256
_CONNECT_S = 15
_POLL_S = 0.2

_one_at_a_time = threading.Lock()
"""In a worker: two cells at once would measure each other."""


class Farm:
    """A cluster that runs cells."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def workers(self) -> int:
        """How many workers there are now."""
        return len(self._client.scheduler_info(n_workers=-1)["workers"])

    def run(
        self, orders: Sequence[Order], stop: Stop, waiting: Callable[[str], None]
    ) -> Iterator[Outcome]:
        """Run cells, those first in `orders` first; what comes of each, as it comes."""
        pending = {
            self._client.submit(run_on_worker, order, pure=False, priority=-place): order
            for place, order in enumerate(orders)
        }
        try:
            while pending and not stop.pressed:
                for future in [future for future in pending if future.done()]:
                    yield _outcome(future, pending.pop(future))
                waiting("")
                time.sleep(_POLL_S)
        finally:
            self._client.cancel(list(pending), force=True)


def _outcome(future: Any, order: Order) -> Outcome:
    error = future.exception()
    if error is None:
        found: Outcome = future.result()
        return found
    return Outcome(order.id, {}, f"the cluster could not run it: {type(error).__name__}: {error}")


def run_on_worker(order: Order) -> Outcome:
    """Run one cell in a worker."""
    with _one_at_a_time, tempfile.TemporaryDirectory(prefix="tuiwork-cell-") as folder:
        try:
            return execute(order, Path(folder))
        except OSError as error:
            return Outcome(order.id, {}, f"{folder}: {error.strerror or error}")


def check_farm(address: str) -> None:
    """Raises InputError if there can be no such cluster."""
    local = _LOCAL.match(address)
    if address.startswith("local") and (not local or not 1 <= int(local[1]) <= _MOST_LOCAL):
        raise InputError(f"--dask {address}: write local:N, N from 1 to {_MOST_LOCAL}")
    if importlib.util.find_spec("distributed") is None:
        raise InputError(
            "--dask needs Dask's distributed, which is not installed: pip install distributed "
            "(or leave out --dask)"
        )


@contextmanager
def connected(address: str) -> Iterator[Farm]:
    """The cluster at an address, or a new one here for `local:N`. Raises TuiworkError."""
    # Imported here: it takes half a second, and only those who farm need it.
    import distributed

    # Its classes carry no types.
    untyped: Any = distributed
    new_cluster, new_client = untyped.LocalCluster, untyped.Client
    logging.getLogger("distributed").setLevel(logging.ERROR)
    local = _LOCAL.match(address)
    try:
        if local:
            with (
                new_cluster(
                    n_workers=int(local[1]),
                    threads_per_worker=1,
                    processes=True,
                    dashboard_address=None,
                    silence_logs=logging.ERROR,
                ) as cluster,
                new_client(cluster) as client,
            ):
                yield Farm(client)
        else:
            with new_client(address, timeout=_CONNECT_S) as client:
                yield Farm(client)
    except (OSError, TimeoutError, ValueError) as error:
        raise TuiworkError(f"--dask {address}: no cluster there: {error}") from error

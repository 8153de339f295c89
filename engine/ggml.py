"""The ABI: what this engine knows of llama.cpp's memory layout, and the proof that it is right.

Everything that depends on a struct layout is here. `check_abi` builds a few tensors with the
library itself and compares what we read from their memory with what the exported accessors say;
a mismatch is a refusal (`AbiMismatch`), never a wild pointer.

Importing this module loads llama.cpp, so nothing that must start fast imports it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.errors import AbiMismatch

# GNU OpenMP reads this when it is loaded. Its threads otherwise spin for milliseconds while the
# callback waits for reads, and take the cores that the I/O lanes need (docs/performance.md).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import llama_cpp as llama_cpp
import llama_cpp.llama_cpp as llama

__all__ = ["AbiMismatch", "AbortFlag", "Tensor", "ThreadPool", "llama", "llama_cpp"]

TENSOR_NAME_BYTES = 64
MAX_SRC = 10

_LIBRARY_DIR = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib")
libc = ctypes.CDLL(None, use_errno=True)


# Its messages are for developers and may hold a damaged file's bytes; whoever wants one takes it
# (`mapping.capture_log`).
SILENT_LOG = llama.llama_log_callback(lambda _level, _text, _data: None)
llama.llama_log_set(SILENT_LOG, None)


def _library(stem: str) -> ctypes.CDLL:
    """The library that llama.cpp itself has loaded.

    A wheel holds each library under several names, as copies and not as links: loading another
    name would bring a second library with settings and threads of its own.
    """
    loaded = _loaded_libraries()
    paths = _LIBRARY_DIR.glob(f"lib{stem}.*")
    for path in sorted(paths, key=lambda path: (str(path.resolve()) not in loaded, path.name)):
        if ".so" in path.name or path.suffix == ".dylib":
            return ctypes.CDLL(str(path))
    raise AbiMismatch(
        f"llama-cpp-python {llama_cpp.__version__} has no lib{stem} in {_LIBRARY_DIR}. "
        "Reinstall it: pip install --force-reinstall -r requirements/llama.txt"
    )


def _loaded_libraries() -> set[str]:
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return set()
    return {line.split(maxsplit=5)[-1] for line in maps.splitlines() if ".so" in line}


base = _library("ggml-base")
cpu = _library("ggml-cpu")


class Tensor(ctypes.Structure):
    """`struct ggml_tensor` as ggml.h declares it on 64-bit; `check_abi` proves it."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * TENSOR_NAME_BYTES),
    ]


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class ComputePlan(ctypes.Structure):
    """`struct ggml_cplan`: how a graph of our own is computed; proven by `check_abi`."""

    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    ]


class _ThreadpoolParams(ctypes.Structure):
    """`struct ggml_threadpool_params`; its size of the CPU mask is proven by `check_abi`."""

    _fields_ = [
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    ]


def declare(library: ctypes.CDLL, name: str, restype: Any, *argtypes: Any) -> Any:
    """The exported function `name` with its C signature.

    Raises AbiMismatch if the library does not export it.
    """
    try:
        function = library[name]
    except AttributeError:
        raise AbiMismatch(
            f"llama-cpp-python {llama_cpp.__version__} does not export {name}, "
            "which the engine needs; install the version that pyproject.toml pins"
        ) from None
    function.restype = restype
    function.argtypes = list(argtypes)
    return function


_void_p, _size_t, _int, _i64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
get_name = declare(base, "ggml_get_name", _void_p, _void_p)
get_data = declare(base, "ggml_get_data", _void_p, _void_p)
nbytes = declare(base, "ggml_nbytes", _size_t, _void_p)
nelements = declare(base, "ggml_nelements", _i64, _void_p)
op_name = declare(base, "ggml_op_name", ctypes.c_char_p, _int)
type_name = declare(base, "ggml_type_name", ctypes.c_char_p, _int)
row_size = declare(base, "ggml_row_size", _size_t, _int, _i64)

_init = declare(base, "ggml_init", _void_p, _InitParams)
free_context = declare(base, "ggml_free", None, _void_p)
_new_tensor_3d = declare(base, "ggml_new_tensor_3d", _void_p, _void_p, _int, _i64, _i64, _i64)
new_matrix = declare(base, "ggml_new_tensor_2d", _void_p, _void_p, _int, _i64, _i64)
_view_2d = declare(base, "ggml_view_2d", _void_p, _void_p, _void_p, _i64, _i64, _size_t, _size_t)
_mul_mat_id = declare(base, "ggml_mul_mat_id", _void_p, _void_p, _void_p, _void_p, _void_p)
mul_mat = declare(base, "ggml_mul_mat", _void_p, _void_p, _void_p, _void_p)
new_graph = declare(base, "ggml_new_graph_custom", _void_p, _void_p, _size_t, ctypes.c_bool)
expand_graph = declare(base, "ggml_build_forward_expand", None, _void_p, _void_p)
plan_graph = declare(cpu, "ggml_graph_plan", ComputePlan, _void_p, _int, _void_p)
_set_name = declare(base, "ggml_set_name", _void_p, _void_p, ctypes.c_char_p)

_threadpool_params_init = declare(
    base, "ggml_threadpool_params_init", None, ctypes.POINTER(_ThreadpoolParams), _int
)
_threadpool_new = declare(cpu, "ggml_threadpool_new", _void_p, ctypes.POINTER(_ThreadpoolParams))
_threadpool_free = declare(cpu, "ggml_threadpool_free", None, _void_p)
_attach_threadpool = declare(llama._lib, "llama_attach_threadpool", None, _void_p, _void_p, _void_p)
_detach_threadpool = declare(llama._lib, "llama_detach_threadpool", None, _void_p)

_AbortCallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_set_abort_callback = declare(base, "ggml_set_abort_callback", ctypes.c_void_p, _AbortCallback)
_abort_callback: Any = None

TYPE_F32, TYPE_I32 = 0, 26
_N_OPS = 256
_COUNT_OF_PROOF = 77
"""Threads asked for in a proof: a count that no other field holds by chance."""


def on_abort(report: Callable[[str], None]) -> None:
    """Let `report` have the last word when llama.cpp ends the process over a failed assertion.

    It gets llama.cpp's own words, on whatever thread that is. Without one, llama.cpp starts a
    debugger to print where it stood.
    """
    global _abort_callback  # C keeps the address: the object must live as long as the process
    _abort_callback = _AbortCallback(
        lambda words: report((words or b"").decode(errors="replace").strip())
    )
    _set_abort_callback(_abort_callback)


def op_numbers() -> dict[str, int]:
    """Every operation's number in this build, by its name (`MUL_MAT_ID`)."""
    return {op_name(number).decode(): number for number in range(_op_count())}


def _op_count() -> int:
    # ggml_op_name reads past its table for an unknown number, so stop at the last known name.
    for number in range(_N_OPS):
        if op_name(number) == b"GLU":
            return number + 1
    raise AbiMismatch("ggml_op_name knows no GLU operation; this llama.cpp is too old or too new")


def new_context(n_tensors: int) -> int:
    """A ggml context that holds tensor descriptions but no data; `free_context` frees it."""
    context: int = _init(_InitParams(n_tensors * 1024, None, True))
    return context


@contextmanager
def scratch_context(n_tensors: int = 64) -> Iterator[int]:
    """A context for as long as the block lasts."""
    context = new_context(n_tensors)
    try:
        yield context
    finally:
        free_context(context)


def check_abi() -> None:
    """Prove the layouts of this module against the loaded library.

    Raises AbiMismatch, naming the first field that is not where we expect it.
    """
    with scratch_context() as context:
        _check_tensor_layout(context)
        _check_plan_layout(context)
    _check_threadpool_layout()


def _check_tensor_layout(context: int) -> None:
    bank = _new_tensor_3d(context, TYPE_F32, 32, 8, 5)
    current = _new_tensor_3d(context, TYPE_F32, 32, 1, 3)
    every_id = new_matrix(context, TYPE_I32, 5, 3)
    ids = _view_2d(context, every_id, 2, 3, 20, 8)
    result = _mul_mat_id(context, bank, current, ids)
    _set_name(result, b"tuiwork-abi-check")
    node, view = Tensor.from_address(result), Tensor.from_address(ids)
    facts = {
        "name": (
            get_name(result) - result == Tensor.name.offset,
            node.name == b"tuiwork-abi-check",
        ),
        "op": (op_name(node.op) == b"MUL_MAT_ID", op_name(view.op) == b"VIEW"),
        "type": (node.type == TYPE_F32, view.type == TYPE_I32),
        "ne": (list(node.ne) == [8, 2, 3, 1], list(view.ne) == [2, 3, 1, 1]),
        "nb": (list(node.nb) == [4, 32, 64, 192], view.nb[1] == 20),
        "src": (list(node.src[:4]) == [bank, current, ids, None],),
        "view_src": (view.view_src == every_id, node.view_src is None),
        "view_offs": (view.view_offs == 8,),
        "data": _data_is_where_we_think(result),
    }
    for field, results in facts.items():
        if not all(results):
            raise AbiMismatch(
                f"ggml_tensor.{field} is not where llama-cpp-python {llama_cpp.__version__} "
                "is expected to keep it. Install the version that pyproject.toml pins"
            )


def _data_is_where_we_think(address: int) -> tuple[bool, ...]:
    tensor = Tensor.from_address(address)
    marker = 0x1230
    before = tensor.data
    tensor.data = marker
    seen = get_data(address)
    tensor.data = before
    return seen == marker, get_data(address) == before


def _check_plan_layout(context: int) -> None:
    matrix = new_matrix(context, TYPE_F32, 32, 8)
    graph = new_graph(context, 1, False)
    expand_graph(graph, mul_mat(context, matrix, matrix))
    plan = plan_graph(graph, _COUNT_OF_PROOF, None)
    if plan.n_threads != _COUNT_OF_PROOF or plan.work_data or plan.threadpool or plan.use_ref:
        raise AbiMismatch("ggml_cplan has another layout in this llama.cpp")


def _check_threadpool_layout() -> None:
    params = _ThreadpoolParams()
    _threadpool_params_init(ctypes.byref(params), _COUNT_OF_PROOF)
    if params.n_threads != _COUNT_OF_PROOF or params.paused or params.poll > 100:
        raise AbiMismatch("ggml_threadpool_params has another layout in this llama.cpp")


def uses_openmp() -> bool:
    """Whether this build of the CPU backend computes with OpenMP threads."""
    library = Path(cpu._name).read_bytes()
    return any(name in library for name in (b"libgomp.so", b"libomp.", b"libiomp5."))


def _cores() -> set[int]:
    """Where the calling thread may run; empty where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _run_on(cores: set[int]) -> None:
    # Only speed depends on it, and a container may lose cores while we run.
    with suppress(OSError):
        os.sched_setaffinity(0, cores)


_SPINS_BETWEEN_GRAPHS = 1
"""In llama.cpp's unit, 131 072 looks at whether there is work: some 2 ms. Its default is 50."""


class ThreadPool:
    """Compute threads that spin inside a graph, and for a moment between graphs.

    Between graphs the callback looks experts up, which takes some 0.03 ms: less than waking a
    thread. But it also waits for reads, and threads that spun for long would starve the lanes.

    Where there is a thread for every core, each is bound to one. They meet at a barrier after every
    node: if any other process makes the scheduler put two of them on one core, each barrier costs
    a time slice, and a token takes several times as long (docs/performance.md). With cores to
    spare the scheduler may choose: another process may want the very cores that we would take.

    An OpenMP build has its own threads: for it this is nothing.
    """

    def __init__(self, n_threads: int) -> None:
        self._pool: int | None = None
        self._own_core: set[int] = set()
        """Of the thread that decodes, while it decodes; empty: any."""
        if uses_openmp():
            return
        params = _ThreadpoolParams()
        _threadpool_params_init(ctypes.byref(params), n_threads)
        params.poll = _SPINS_BETWEEN_GRAPHS
        cores = _cores()
        bound = 1 < n_threads == len(cores) and max(cores) < len(params.cpumask)
        if bound:
            params.strict_cpu = True
            for core in cores:
                params.cpumask[core] = True
        # This also binds the thread that calls it, which has other things to do than to decode.
        self._pool = _threadpool_new(ctypes.byref(params))
        if bound:
            self._own_core = _cores()
            _run_on(cores)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While the calling thread decodes: it is one of the compute threads."""
        if not self._own_core:
            yield
            return
        before = _cores()
        _run_on(self._own_core)
        try:
            yield
        finally:
            _run_on(before)

    def attach(self, context: Any) -> None:
        """Let `context` compute on this pool."""
        if self._pool:
            _attach_threadpool(context, self._pool, self._pool)

    def close(self, context: Any | None) -> None:
        """Take the pool from its context and free it."""
        if self._pool:
            if context is not None:
                _detach_threadpool(context)
            _threadpool_free(self._pool)
            self._pool = None


class AbortFlag:
    """A flag that stops a running graph after its current node.

    llama.cpp asks an abort callback after every node, so it must not be Python. The C library's
    `strlen` is one that we can be sure to find: the flag is a text, and empty means go on.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self.function = ctypes.cast(libc.strlen, llama.ggml_abort_callback)
        self.argument = ctypes.addressof(self._text)

    def set(self) -> None:
        """Stop the graph that runs now, or the next one."""
        self._text[0] = b"\x01"

    def clear(self) -> None:
        """Let graphs run."""
        self._text[0] = b"\x00"

    def is_set(self) -> bool:
        """Whether a graph would be stopped."""
        return self._text[0] != b"\x00"

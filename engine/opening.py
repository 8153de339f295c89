"""Opening a model: check it against the settings, load it, and start streaming it.

The result, `OpenModel`, owns everything native; `Session` runs tokens through it.
"""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

from engine import ggml
from engine.config import AUTO, RunConfig
from engine.counters import Allocate, private
from engine.errors import InputError, ModelError
from engine.ggml import AbortFlag, ThreadPool, llama
from engine.hook import EvalHook
from engine.mapping import ShardMapping, capture_log, load_model
from engine.model_file import ModelFile
from engine.open_model import OpenModel
from engine.sizing import LARGEST_BATCH, default_threads
from engine.streaming import Progress, start_observing, start_streaming


def open_model(
    config: RunConfig,
    progress: Progress | None = None,
    *,
    poison: bool = False,
    observe: bool = False,
    allocate: Allocate = private,
) -> OpenModel:
    """Open the model that `config` names, ready for its first token.

    With `observe`, routings of a model that is not streamed can be watched and forced, too.
    Raises ModelError for a file that cannot be used, InputError for settings that do not suit it,
    AbiMismatch or GraphError if this llama.cpp is not one that the engine knows.
    """
    started = perf_counter()
    report = progress or (lambda _stage, _fraction: None)
    ggml.check_abi()
    file = ModelFile.open(config.model.path)
    _check_fits_model(config, file)
    report("loading", 0.0)
    opened = _load(config, file, allocate, hooked=config.stream.enabled or observe)
    try:
        if config.stream.enabled:
            start_streaming(opened, config, report, poison)
        else:
            if config.routing.drop_cold_experts:
                opened.notes.append(
                    "drop-cold-experts has no effect without streaming: nothing is dropped"
                )
            if observe:
                start_observing(opened)
        opened.load_s = perf_counter() - started
        return opened
    except BaseException:
        opened.close()
        raise


def _check_fits_model(config: RunConfig, file: ModelFile) -> None:
    layout = file.experts
    if config.stream.enabled and not layout.entry_bytes:
        raise ModelError(
            f"{file.paths[0]}: is a dense model ({file.arch}): it has no experts, so there is "
            "nothing to stream. Run it as it is with --no-stream (stream.enabled = false)"
        )
    wanted = config.routing.n_expert_used
    if wanted > layout.n_expert > 0:
        raise InputError(
            f"routing.n-expert-used = {wanted}: the model has {layout.n_expert} experts per layer "
            f"and routes to {layout.n_expert_used}"
        )


def _load(config: RunConfig, file: ModelFile, allocate: Allocate, *, hooked: bool) -> OpenModel:
    n_threads = default_threads() if config.model.threads == AUTO else int(config.model.threads)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    overrides = _kv_overrides(file, config.routing.n_expert_used)
    if overrides is not None:
        params.kv_overrides = overrides
    mappings: list[ShardMapping] = []
    if config.stream.enabled:
        model, mappings = load_model(file, params)
    else:
        model = _load_plainly(file, params)
    abort, pool = AbortFlag(), ThreadPool(n_threads)
    hook = EvalHook(abort)
    with capture_log() as log:
        context = _new_context(config, model, hook if hooked else None, abort, n_threads)
    if not context:
        llama.llama_model_free(model)
        pool.close(None)
        raise ModelError(
            f"{file.paths[0]}: llama.cpp cannot make a context of {config.model.ctx} tokens; "
            "a smaller model.ctx needs less memory"
        )
    pool.attach(context)
    return OpenModel(
        file,
        model,
        context,
        hook,
        abort,
        allocate,
        pool,
        n_threads,
        config.routing.n_expert_used or file.experts.n_expert_used,
        int(llama.llama_n_batch(context)),
        mappings=mappings,
        kv_bytes=log.state_bytes(),
    )


def _load_plainly(file: ModelFile, params: Any) -> Any:
    params.use_extra_bufts = False
    with capture_log() as log:
        model = llama.llama_model_load_from_file(os.fsencode(file.paths[0]), params)
        if not model:
            raise ModelError(f"{file.paths[0]}: llama.cpp cannot load it: {log.reason()}")
    return model


def _kv_overrides(file: ModelFile, n_expert_used: int) -> Any:
    if not n_expert_used:
        return None
    # Ends with an empty key, as llama.cpp wants it.
    overrides: Any = (llama.llama_model_kv_override * 2)()
    overrides[0].tag = llama.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[0].key = f"{file.arch}.expert_used_count".encode()
    overrides[0].value.val_i64 = n_expert_used
    return overrides


def _new_context(
    config: RunConfig, model: Any, hook: EvalHook | None, abort: AbortFlag, n_threads: int
) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx = config.model.ctx
    # One graph per decode: llama.cpp would otherwise split a batch behind our back.
    params.n_batch = params.n_ubatch = config.model.batch or LARGEST_BATCH
    params.n_outputs_max = 1
    params.n_threads = params.n_threads_batch = n_threads
    params.offload_kqv = False
    params.op_offload = False
    params.no_perf = True
    params.abort_callback = abort.function
    params.abort_callback_data = abort.argument
    if hook is not None:
        params.cb_eval = hook.function
        params.cb_eval_user_data = hook.data
    return llama.llama_init_from_model(model, params)

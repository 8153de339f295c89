/* The eval callback's quick answers, and how a core is made. All else is Python's. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

enum { VERSION = 1 };
enum { UNMARKED, MARKED, EXPERTS }; /* engine/native_library.py */

static void *pointer_at(const void *node, int offset) {
    void *pointer;
    memcpy(&pointer, (const char *)node + offset, sizeof pointer);
    return pointer;
}

static int64_t shape_at(const struct front *front, const void *node, int dimension) {
    int64_t shape[2];
    memcpy(shape, (const char *)node + front->layout.shape, sizeof shape);
    return shape[dimension];
}

/* What the router of layer `index` saw, whose routing node is `node`; NULL if the next layer cannot
 * be guessed from it. */
static void *router_input(const struct front *front, int index, void *node) {
    const struct layer *layer = &front->core->layers[index];
    if (index + 1 == front->core->n_layer || !layer->n_steps) return NULL;
    for (int i = 0; node && i < layer->n_steps; i++) {
        node = pointer_at(node, front->layout.sources + (int)sizeof(void *) * layer->steps[i]);
    }
    if (!node || shape_at(front, node, 0) != layer[1].router.n_columns) return NULL;
    return pointer_at(node, front->layout.data);
}

static int visit_routing(struct front *front, int index, void *node) {
    struct core *core = front->core;
    int n = (int)shape_at(front, node, 0);
    /* One token's ids lie side by side whatever the strides of the view are. */
    const int32_t *experts = pointer_at(node, front->layout.data);
    core->arrays.routings[index]++;
    core->arrays.experts_routed[index] += n;
    core->counts.routed += n;
    return core_load(core, index, experts, n, router_input(front, index, node), NULL, -1);
}

static bool visit(struct front *front, void *node) {
    if (front->stopped) {
        front->stopped = 0;
        return true;
    }
    int index = (int)front->routing;
    front->routing = -1;
    if (index < 0 || shape_at(front, node, 1) != 1) return front->slow(node, false, NULL);
    front->visited++;
    if (visit_routing(front, index, node) < 0) {
        front->failed = 1;
        return front->slow(node, false, NULL);
    }
    return true;
}

/* An equal address may be another node of a rebuilt graph; its name tells. */
static bool is_named(const struct front *front, const void *node, int64_t index) {
    return !strcmp((const char *)node + front->layout.name, front->names[index]);
}

/* `ggml_backend_sched_eval_callback`, with a front as its data. */
EXPORT bool core_on_node(void *node, bool ask, void *data) {
    struct front *front = data;
    if (!ask) return visit(front, node);
    int64_t index = front->index;
    bool is_expected = index > 0 && front->known && index < front->n_expected &&
                       front->expected[index] == (uintptr_t)node;
    if (is_expected && front->roles[index] == UNMARKED) {
        front->index++;
        return false;
    }
    if (is_expected && front->roles[index] == EXPERTS && front->core) {
        /* Most layers have no read under way when their experts are computed. */
        if (front->core->flight_layer < 0) {
            front->index++;
            return false;
        }
        if (!is_named(front, node, index)) return front->slow(node, true, NULL);
        int stop = core_asked(front->core, front->layers[index], front->banks[index]);
        if (stop >= 0) {
            front->index++;
            front->stopped = stop;
            if (stop) front->since_mark = index + 1;
            return stop;
        }
    }
    return front->slow(node, true, NULL);
}

/* What Python must know of the structures alike: a version, and their sizes. */
EXPORT void core_sizes(int64_t *sizes) {
    sizes[0] = VERSION;
    sizes[1] = sizeof(struct settings);
    sizes[2] = sizeof(struct counts);
    sizes[3] = sizeof(struct arrays);
    sizes[4] = sizeof(struct front);
    sizes[5] = sizeof(struct router);
}

static void *zeros(int64_t n, size_t size, bool *failed) {
    void *memory = calloc(n > 0 ? n : 1, size);
    *failed |= !memory;
    return memory;
}

EXPORT void core_free(struct core *core) {
    if (!core) return;
    for (int i = 0; core->layers && i < core->n_layer; i++) {
        free(core->layers[i].banks);
        free(core->layers[i].named);
    }
    void *memory[] = {
        core->layers, core->shards, core->unapplied, core->present, core->order,
        core->ranked, core->used_since, core->in_use, core->held, core->freed, core->freed_keys,
        core->freed_banks, core->gone, core->reads, core->releases, core->movers, core->begun,
        core->is_under_way, core->under_way, core->kept, core->kept_counts, core->flight,
        core->wanted, core->keys, core->missing,
    };
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) free(memory[i]);
    free(core);
}

/* NULL where memory is refused. */
EXPORT struct core *core_new(int n_layer, int n_expert, int most_banks, int n_shards,
                             const struct arrays *arrays, const double *decay,
                             const double *credit, void *compute) {
    struct core *core = calloc(1, sizeof *core);
    if (!core) return NULL;
    int64_t n = (int64_t)n_layer * n_expert, n_slices = n * most_banks;
    bool failed = false;
    *core = (struct core){
        .n_layer = n_layer, .n_expert = n_expert, .n_keys = (int)n, .most_banks = most_banks,
        .n_shards = n_shards, .arrays = *arrays, .present_layer = -1, .flight_layer = -1,
    };
    memcpy(&core->compute, &compute, sizeof compute);
    memcpy(core->decay, decay, sizeof core->decay);
    memcpy(core->credit, credit, sizeof core->credit);
    core->layers = zeros(n_layer, sizeof(struct layer), &failed);
    core->shards = zeros(n_shards, sizeof(struct shard), &failed);
    core->unapplied = zeros(n, sizeof(int32_t), &failed);
    core->present = zeros(n_expert, sizeof(int32_t), &failed);
    core->order = zeros(n, sizeof(int32_t), &failed);
    core->ranked = zeros(n, sizeof(struct ranked), &failed);
    core->used_since = zeros(n, 1, &failed);
    core->in_use = zeros(n, 1, &failed);
    core->held = zeros(n, 1, &failed);
    core->freed = zeros(n_slices, sizeof(struct extent), &failed);
    core->freed_keys = zeros(n_slices, sizeof(int32_t), &failed);
    core->freed_banks = zeros(n_slices, sizeof(int32_t), &failed);
    core->gone = zeros(n, sizeof(int32_t), &failed);
    core->reads = zeros(n_slices, sizeof(struct job), &failed);
    core->releases = zeros(n_slices, sizeof(struct job), &failed);
    core->movers = zeros(n_slices, sizeof(struct job *), &failed);
    core->begun = zeros(n, 1, &failed);
    core->is_under_way = zeros(n, 1, &failed);
    core->under_way = zeros(n, sizeof(int32_t), &failed);
    core->kept = zeros(n, sizeof(int32_t), &failed);
    core->kept_counts = zeros(n_layer + 4, sizeof(int32_t), &failed);
    core->flight = zeros(n_expert, sizeof(int32_t), &failed);
    /* What is in the way of a whole layer, its reads, and what all that was evicted gives back. */
    core->wanted = zeros(n_slices + 4LL * n_expert * most_banks, sizeof(struct job *), &failed);
    core->keys = zeros(n_expert, sizeof(int32_t), &failed);
    core->missing = zeros(n_expert, sizeof(int32_t), &failed);
    for (int i = 0; core->layers && i < n_layer; i++) {
        core->layers[i].banks = zeros(most_banks, sizeof(struct bank), &failed);
        core->layers[i].named = zeros(n_expert, sizeof(int32_t), &failed);
        core->layers[i].n_named = -1;
    }
    if (failed) {
        core_free(core);
        return NULL;
    }
    pthread_mutex_init(&core->lanes.mutex, NULL);
    pthread_cond_init(&core->lanes.work, NULL);
    pthread_cond_init(&core->lanes.done, NULL);
    return core;
}

/* `fd` stays the caller's. */
EXPORT void core_set_shard(struct core *core, int index, void *base, int64_t size, int fd) {
    core->shards[index] = (struct shard){base, size, fd};
}

/* Banks come in order of use; `entry_bytes` and `n_expert` are their layer's. */
EXPORT void core_add_bank(struct core *core, int index, int64_t entry_bytes, int n_expert,
                          int shard, int64_t offset, int64_t slice_bytes, int64_t core_bytes,
                          int64_t inside_first, int64_t inside_last) {
    struct layer *layer = &core->layers[index];
    layer->entry_bytes = entry_bytes;
    layer->n_expert = n_expert;
    layer->banks[layer->n_banks++] = (struct bank){
        shard, offset, slice_bytes, core_bytes, inside_first, inside_last,
    };
}

/* How a layer is guessed. */
EXPORT void core_set_router(struct core *core, int index, const struct router *router) {
    core->layers[index].router = *router;
}

/* Where a layer's routing node has what its router saw: which source leads there, node by node. */
EXPORT void core_set_steps(struct core *core, int index, const int32_t *steps, int n) {
    core->layers[index].n_steps = n;
    memcpy(core->layers[index].steps, steps, sizeof(int32_t) * n);
}

/* Before a decode: what lasted between decodes, if it was Python's meanwhile. */
EXPORT void core_take_over(struct core *core, int64_t resident_bytes, int layer, int64_t n_uses) {
    core->resident_bytes = resident_bytes;
    core->present_layer = layer;
    core->n_uses = n_uses;
    for (int i = 0; i < core->n_present; i++) core->in_use[core->present[i]] = 0;
    core->n_present = core->n_order = 0;
}

EXPORT struct settings *core_settings(struct core *core) { return &core->settings; }

EXPORT struct counts *core_counts(struct core *core) { return &core->counts; }

EXPORT int64_t core_resident_bytes(const struct core *core) { return core->resident_bytes; }

EXPORT int core_present_layer(const struct core *core) { return core->present_layer; }

EXPORT int64_t core_n_uses(const struct core *core) { return core->n_uses; }

EXPORT int core_is_flying(const struct core *core) { return core->flight_layer >= 0; }

/* Entries that left so far; `keys` gets the last `most` of them, the latest first. */
EXPORT int64_t core_gone(const struct core *core, int32_t *keys, int most) {
    for (int i = 0; i < most; i++) keys[i] = core->gone[(core->n_gone - 1 - i) % core->n_keys];
    return core->n_gone;
}

/* Which read failed, and why: key, bank, first and last byte in the file, errno. */
EXPORT int core_failure(const struct core *core, int64_t *answer) {
    const struct job *job = core->failed;
    if (!job) return 0;
    answer[0] = core->failed_key;
    answer[1] = core->failed_bank;
    answer[2] = job->first;
    answer[3] = job->last;
    answer[4] = job->error;
    return 1;
}

/* For tests: what must hold between two calls. Returns 0, or which of it does not. */
EXPORT int core_inconsistency(const struct core *core) {
    int64_t n_bytes = 0;
    for (int32_t key = 0; key < core->n_keys; key++) {
        bool is_resident = core->arrays.resident[key];
        n_bytes += is_resident ? core->layers[key / core->n_expert].entry_bytes : 0;
        if (core->is_under_way[key] && !(is_resident && core->held[key])) return 1;
        if (core->held[key] && !is_resident) return 2;
        if (core->begun[key] && !core->held[key]) return 3;
        if (core->arrays.state[key] != ABSENT && !is_resident) return 4;
    }
    if (n_bytes != core->resident_bytes) return 5;
    return core->n_freed ? 6 : 0;
}

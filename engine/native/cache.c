/* What is in memory, what it is worth, and whose memory a read takes over.
 *
 * See engine/retention.py for the formula and engine/residency.py for pages.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

static int64_t page_floor(int64_t value) { return value / PAGE * PAGE; }

static int64_t page_ceil(int64_t value) { return (value + PAGE - 1) / PAGE * PAGE; }

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t smallest(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t slice_start(const struct bank *bank, int expert) {
    return bank->offset + expert * bank->slice_bytes;
}

void apply_uses(struct core *core) {
    double *parts = core->arrays.parts;
    for (int i = 0; i < core->n_unapplied; i++) {
        int32_t key = core->unapplied[i];
        double worth = 0;
        for (int tau = 0; tau < N_TAUS; tau++) {
            worth += parts[(int64_t)tau * core->n_keys + key] += core->credit[tau];
        }
        core->arrays.worth[key] = worth;
        core->arrays.last[key] = core->n_uses++;
        core->used_since[key] = 0;
    }
    core->n_unapplied = 0;
}

static void begin_pass(struct core *core) {
    apply_uses(core);
    double *first = core->arrays.parts, *second = first + core->n_keys;
    double *third = second + core->n_keys, *worth = core->arrays.worth;
    for (int key = 0; key < core->n_keys; key++) {
        first[key] *= core->decay[0];
        second[key] *= core->decay[1];
        third[key] *= core->decay[2];
        worth[key] = first[key] + second[key] + third[key];
    }
    core->n_order = 0;
}

void use(struct core *core, int layer, const int32_t *keys, int n) {
    if (layer <= core->present_layer) begin_pass(core);
    core->present_layer = layer;
    for (int i = 0; i < core->n_present; i++) core->in_use[core->present[i]] = 0;
    memcpy(core->present, keys, sizeof(int32_t) * n);
    core->n_present = n;
    for (int i = 0; i < n; i++) {
        core->in_use[keys[i]] = 1;
        core->used_since[keys[i]] = 1;
        core->unapplied[core->n_unapplied++] = keys[i];
    }
}

static int lowest_last(const void *one, const void *other) {
    const struct ranked *a = one, *b = other;
    if (a->score != b->score) return a->score < b->score ? 1 : -1;
    if (a->last != b->last) return a->last < b->last ? 1 : -1;
    return a->key < b->key ? 1 : -1;
}

/* The lowest scores and what equals the highest of them; among equals the one used longest ago
 * leaves first. */
static void make_order(struct core *core) {
    apply_uses(core);
    const double *worth = core->arrays.worth;
    int ahead = core->n_layer - 1 - core->present_layer;
    const double *nearness = core->arrays.nearness + (int64_t)ahead * core->n_expert;
    struct ranked *ranked = core->ranked;
    double lowest[BATCH]; /* in rising order */
    int n = 0, n_lowest = 0;
    for (int32_t key = 0; key < core->n_keys; key++) {
        if (!core->arrays.resident[key] || core->held[key] || core->in_use[key]) continue;
        double score = worth[key] * nearness[key];
        if (n_lowest == BATCH && score > lowest[BATCH - 1]) continue;
        ranked[n++] = (struct ranked){score, core->arrays.last[key], key};
        int place = n_lowest < BATCH ? n_lowest++ : BATCH - 1;
        for (; place && lowest[place - 1] > score; place--) lowest[place] = lowest[place - 1];
        lowest[place] = score;
    }
    int n_kept = 0;
    for (int i = 0; i < n; i++) {
        if (ranked[i].score <= lowest[n_lowest - 1]) ranked[n_kept++] = ranked[i];
    }
    qsort(ranked, n_kept, sizeof *ranked, lowest_last);
    core->n_order = n_kept;
    for (int i = 0; i < n_kept; i++) core->order[i] = ranked[i].key;
}

static int32_t evict(struct core *core) {
    while (true) {
        while (core->n_order) {
            int32_t key = core->order[--core->n_order];
            if (core->arrays.resident[key] && !core->used_since[key] && !core->held[key]) {
                core->arrays.resident[key] = 0;
                return key;
            }
        }
        make_order(core);
        if (!core->n_order) return -1;
    }
}

/* The pages of a slice that go with it: its core, and what no resident neighbour shares. */
static struct extent pages_to_free(struct core *core, const struct bank *bank, int32_t key) {
    int expert = key % core->n_expert;
    int64_t start = slice_start(bank, expert), end = start + bank->slice_bytes;
    struct extent extent = {
        .shard = bank->shard, .core_first = page_ceil(start), .core_bytes = bank->core_bytes
    };
    if (core->settings.keeps_edges) {
        extent.first = extent.core_first;
        extent.last = extent.core_first + extent.core_bytes;
        return extent;
    }
    if (bank->slice_bytes < PAGE) return extent;
    const uint8_t *resident = core->arrays.resident;
    bool before = expert && resident[key - 1];
    bool after = expert + 1 < core->n_expert && resident[key + 1];
    extent.first = largest(before ? page_ceil(start) : page_floor(start), bank->inside_first);
    extent.last = smallest(after ? page_floor(end) : page_ceil(end), bank->inside_last);
    return extent;
}

static void drop(struct core *core, int32_t key) {
    struct layer *layer = &core->layers[key / core->n_expert];
    core->resident_bytes -= layer->entry_bytes;
    core->arrays.state[key] = ABSENT;
    core->gone[core->n_gone++ % core->n_keys] = key;
}

/* Evict until `n_bytes` more fit; whether they do, beside what may not leave. */
bool make_room(struct core *core, int64_t n_bytes) {
    while (core->resident_bytes + n_bytes > core->settings.budget_bytes) {
        int32_t key = evict(core);
        if (key < 0) return false;
        drop(core, key);
        core->counts.evictions++;
        struct layer *layer = &core->layers[key / core->n_expert];
        for (int bank = 0; bank < layer->n_banks; bank++) {
            struct extent extent = pages_to_free(core, &layer->banks[bank], key);
            if (extent.first >= extent.last) continue;
            core->freed[core->n_freed] = extent;
            core->freed_keys[core->n_freed] = key;
            core->freed_banks[core->n_freed++] = bank;
        }
    }
    return true;
}

/* What it moved last is moved. */
static void begin_anew(struct job *job) {
    if (job->mover && *job->mover == job) *job->mover = NULL;
    memset(job, 0, sizeof *job);
}

static void take_freed(struct core *core, int place, struct job *job) {
    int64_t of = (int64_t)core->freed_keys[place] * core->most_banks + core->freed_banks[place];
    job->freed = core->freed[place];
    job->mover = &core->movers[of];
    core->movers[of] = job;
    core->n_freed--;
    for (; place < core->n_freed; place++) {
        core->freed[place] = core->freed[place + 1];
        core->freed_keys[place] = core->freed_keys[place + 1];
        core->freed_banks[place] = core->freed_banks[place + 1];
    }
}

/* Let an entry's reads go into memory of slices of the same size that were evicted. */
void prepare_reads(struct core *core, int32_t key) {
    struct layer *layer = &core->layers[key / core->n_expert];
    int expert = key % core->n_expert;
    for (int i = 0; i < layer->n_banks; i++) {
        const struct bank *bank = &layer->banks[i];
        struct job *job = &core->reads[(int64_t)key * core->most_banks + i];
        int64_t start = slice_start(bank, expert);
        begin_anew(job);
        job->shard = job->freed.shard = bank->shard;
        job->most_delay_us = core->settings.most_delay_us;
        job->refuses_moves = core->settings.refuses_moves;
        job->first = largest(page_floor(start), bank->inside_first);
        job->last = smallest(page_ceil(start + bank->slice_bytes), bank->inside_last);
        if (job->first >= job->last || !bank->core_bytes || !core->settings.moves_pages) continue;
        for (int place = core->n_freed - 1; place >= 0; place--) {
            if (core->freed[place].core_bytes != bank->core_bytes) continue;
            job->has_move = true;
            job->target = page_ceil(start);
            take_freed(core, place, job);
            core->counts.moved++;
            break;
        }
    }
}

/* Jobs that give back what no read took over. */
int unpaired_releases(struct core *core, struct job **jobs) {
    int n = 0;
    while (core->n_freed) {
        int place = core->n_freed - 1;
        int64_t of = (int64_t)core->freed_keys[place] * core->most_banks + core->freed_banks[place];
        struct job *job = jobs[n++] = &core->releases[of];
        begin_anew(job);
        take_freed(core, place, job);
    }
    return n;
}

/* Jobs that must be done before this entry may be read: they take pages away that it shares. */
int in_the_way(struct core *core, int32_t key, struct job **jobs) {
    int n = 0;
    for (int32_t near = key - 1; near <= key + 1; near++) {
        if (near < 0 || near >= core->n_keys) continue;
        for (int bank = 0; bank < core->most_banks; bank++) {
            struct job **mover = &core->movers[(int64_t)near * core->most_banks + bank];
            if (*mover && is_done(*mover)) *mover = NULL;
            if (*mover) jobs[n++] = *mover;
        }
    }
    return n;
}

/* Count an entry as absent whose reads failed; nothing of it is under way. */
void forget(struct core *core, int32_t key) {
    if (!core->arrays.resident[key]) return;
    core->arrays.resident[key] = 0;
    core->held[key] = 0;
    drop(core, key);
    struct layer *layer = &core->layers[key / core->n_expert];
    for (int bank = 0; bank < layer->n_banks; bank++) {
        struct extent extent = pages_to_free(core, &layer->banks[bank], key);
        give_back(core, extent.shard, extent.first, extent.last);
    }
}

/* Slices that were given up hold poison (for tests). */
void poison_gone(struct core *core) {
    for (; core->n_poisoned < core->n_gone; core->n_poisoned++) {
        int32_t key = core->gone[core->n_poisoned % core->n_keys];
        struct layer *layer = &core->layers[key / core->n_expert];
        for (int i = 0; i < layer->n_banks && !core->arrays.resident[key]; i++) {
            const struct bank *bank = &layer->banks[i];
            int64_t start = slice_start(bank, key % core->n_expert);
            int64_t first = largest(start, bank->inside_first);
            int64_t last = smallest(start + bank->slice_bytes, bank->inside_last);
            if (first < last) memset(core->shards[bank->shard].base + first, 0xFF, last - first);
        }
    }
}

/* What a decode asks for: bring a layer's experts in, guess the next one's, wait for a bank. */
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { KEPT_LAYERS = 2, FAILED = -1 };

/* Time for which others had the core is not our work. */
static int64_t own_time_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static struct job *job_of(struct core *core, int32_t key, int bank) {
    return &core->reads[(int64_t)key * core->most_banks + bank];
}

static struct layer *layer_of(struct core *core, int32_t key) {
    return &core->layers[key / core->n_expert];
}

static bool is_there(struct core *core, int32_t key) {
    for (int bank = 0; bank < layer_of(core, key)->n_banks; bank++) {
        if (!is_done(job_of(core, key, bank))) return false;
    }
    return true;
}

static int jobs_of(struct core *core, int32_t key, struct job **jobs) {
    int n_banks = layer_of(core, key)->n_banks;
    for (int bank = 0; bank < n_banks; bank++) jobs[bank] = job_of(core, key, bank);
    return n_banks;
}

static bool failed(struct core *core, int32_t key) {
    for (int bank = 0; bank < layer_of(core, key)->n_banks; bank++) {
        if (job_of(core, key, bank)->error) return true;
    }
    return false;
}

static void count_reads(struct core *core, int32_t key) {
    for (int bank = 0; bank < layer_of(core, key)->n_banks; bank++) {
        struct job *job = job_of(core, key, bank);
        if (job->first >= job->last) continue;
        core->counts.reads++;
        core->counts.read_bytes += job->nbytes;
        core->counts.io_ns += job->latency_ns;
    }
}

/* Reading ahead. */

static bool is_kept(struct core *core, int32_t key) {
    for (int i = 0, place = 0; i < core->n_kept; place += core->kept_counts[i++]) {
        for (int j = 0; j < core->kept_counts[i]; j++) {
            if (core->kept[place + j] == key) return true;
        }
    }
    return false;
}

static void end_reading(struct core *core, int place) {
    core->is_under_way[core->under_way[place]] = 0;
    core->n_under_way--;
    memmove(core->under_way + place, core->under_way + place + 1,
            sizeof(int32_t) * (core->n_under_way - place));
}

static void arrived_ahead(struct core *core, int32_t key) {
    if (failed(core, key)) {
        core->begun[key] = 0;
        core->held[key] = 0;
        forget(core, key);
        return;
    }
    if (!core->begun[key] && !is_kept(core, key)) core->held[key] = 0;
    core->arrays.state[key] = RESIDENT;
    count_reads(core, key);
}

static void collect(struct core *core) {
    for (int i = 0; i < core->n_under_way;) {
        int32_t key = core->under_way[i];
        if (!is_there(core, key)) {
            i++;
            continue;
        }
        end_reading(core, i);
        arrived_ahead(core, key);
    }
}

/* Wrong guesses of the layer that was routed longest ago may leave, once they are there. */
static void let_overdue_go(struct core *core) {
    if (core->n_kept < KEPT_LAYERS) return;
    int n = core->kept_counts[0];
    for (int i = 0; i < n; i++) {
        int32_t key = core->kept[i];
        if (core->is_under_way[key]) wait_for(core, core->wanted, jobs_of(core, key, core->wanted));
        core->held[key] = 0;
    }
    int left = 0;
    for (int i = 1; i < core->n_kept; i++) left += core->kept_counts[i];
    memmove(core->kept, core->kept + n, sizeof(int32_t) * left);
    core->n_kept--;
    memmove(core->kept_counts, core->kept_counts + 1, sizeof(int32_t) * core->n_kept);
}

static void count_guess(struct core *core, int index, int n_routed) {
    struct layer *layer = &core->layers[index];
    if (layer->n_named < 0) return;
    int right = 0;
    for (int i = 0; i < layer->n_named; i++) {
        right += core->in_use[index * core->n_expert + layer->named[i]];
    }
    core->arrays.named[index] += layer->n_named;
    core->arrays.routed[index] += n_routed;
    core->arrays.right[index] += right;
    layer->n_named = -1;
}

/* A layer was routed and staged: what it uses and is still being read joins its flight. */
static void routed(struct core *core, int index, int n_routed) {
    count_guess(core, index, n_routed);
    for (int i = 0; i < core->n_under_way;) {
        int32_t key = core->under_way[i];
        if (key / core->n_expert != index || !core->in_use[key]) {
            i++;
            continue;
        }
        core->arrays.late[index] += core->begun[key];
        core->flight[core->n_flight++] = key;
        end_reading(core, i);
    }
    int place = 0, n_kept = 0;
    for (int i = 0; i < core->n_kept; i++) place += core->kept_counts[i];
    for (int32_t key = index * core->n_expert; key < (index + 1) * core->n_expert; key++) {
        if (!core->begun[key] && !core->in_use[key]) continue;
        bool stays;
        if (core->settings.steady) {
            stays = core->begun[key] && !core->in_use[key];
            if (stays) core->kept[place + n_kept++] = key;
        } else {
            stays = core->is_under_way[key] && !core->in_use[key];
        }
        core->arrays.used[index] += core->begun[key] && core->in_use[key];
        core->begun[key] = 0;
        if (!stays) core->held[key] = 0;
    }
    if (core->settings.steady) core->kept_counts[core->n_kept++] = n_kept;
}

/* Begin to read the absent ones of `named`, the first ones first. */
static void begin(struct core *core, int index, int n_named) {
    struct layer *layer = &core->layers[index];
    const struct settings *settings = &core->settings;
    layer->n_named = n_named;
    for (int i = 0; i < n_named; i++) {
        int32_t key = index * core->n_expert + layer->named[i];
        if (core->n_under_way >= settings->most_under_way && !settings->steady) return;
        if (core->arrays.resident[key]) continue;
        int n = in_the_way(core, key, core->wanted);
        if (n && !settings->steady) return;
        wait_for(core, core->wanted, n);
        /* Before anything leaves for it: a neighbour must leave it the page that they share. */
        core->arrays.resident[key] = core->held[key] = 1;
        bool fits = make_room(core, layer->entry_bytes);
        if (fits) {
            core->resident_bytes += layer->entry_bytes;
            core->arrays.state[key] = READING;
            prepare_reads(core, key);
            n = jobs_of(core, key, core->wanted);
        } else {
            core->arrays.resident[key] = core->held[key] = 0;
            n = 0;
        }
        n += unpaired_releases(core, core->wanted + n);
        submit(core, core->wanted, n, SPARE);
        if (!fits) return;
        core->under_way[core->n_under_way++] = key;
        core->is_under_way[key] = core->begun[key] = 1;
        core->arrays.read[index]++;
    }
}

/* The present layer. */

static int distinct_by_last_use(struct core *core, int index, const int32_t *experts, int n) {
    int n_keys = 0;
    for (int i = n - 1; i >= 0; i--) {
        int32_t key = index * core->n_expert + experts[i];
        int place = 0;
        while (place < n_keys && core->keys[place] != key) place++;
        if (place == n_keys) core->keys[n_keys++] = key;
    }
    for (int i = 0; i < n_keys / 2; i++) {
        int32_t key = core->keys[i];
        core->keys[i] = core->keys[n_keys - 1 - i];
        core->keys[n_keys - 1 - i] = key;
    }
    return n_keys;
}

static int stage(struct core *core, int index, int n_keys) {
    struct arrays *arrays = &core->arrays;
    int n_missing = 0;
    for (int i = 0; i < n_keys; i++) {
        int32_t key = core->keys[i];
        if (arrays->resident[key]) {
            arrays->hits[key]++;
        } else {
            arrays->resident[key] = 1;
            arrays->misses[key]++;
            core->missing[n_missing++] = key;
        }
        arrays->last_used[key] = core->settings.clock;
    }
    core->counts.hits += n_keys - n_missing;
    core->counts.misses += n_missing;
    core->resident_bytes += core->layers[index].entry_bytes * n_missing;
    if (n_keys) {
        use(core, index, core->keys, n_keys);
        make_room(core, 0);
    }
    return n_missing;
}

static void take_off(struct core *core, int index, int n_missing) {
    int n = 0, n_banks = core->layers[index].n_banks;
    for (int i = 0; i < n_missing; i++) n += in_the_way(core, core->missing[i], core->wanted + n);
    wait_for(core, core->wanted, n);
    for (int i = 0; i < n_missing; i++) {
        core->arrays.state[core->missing[i]] = READING;
        prepare_reads(core, core->missing[i]);
        core->flight[core->n_flight++] = core->missing[i];
    }
    n = 0;
    for (int bank = 0; bank < n_banks; bank++) {
        for (int i = 0; i < n_missing; i++) {
            core->wanted[n++] = job_of(core, core->missing[i], bank);
        }
    }
    n += unpaired_releases(core, core->wanted + n);
    submit(core, core->wanted, n, URGENT);
    if (core->n_flight) {
        core->flight_layer = index;
        core->n_arrived = 0;
    }
}

static int find_failure(struct core *core, int bank) {
    for (int i = 0; i < core->n_flight; i++) {
        struct job *job = job_of(core, core->flight[i], bank);
        if (!job->error) continue;
        core->failed = job;
        core->failed_key = core->flight[i];
        core->failed_bank = bank;
        return FAILED;
    }
    return 0;
}

/* Before a bank's experts are computed: wait for them. Returns 1 if they should be computed apart
 * from what follows, because that must still be waited for; -1 if a read failed (`core_failure`) or
 * this cannot be the node that was learned (then that says nothing). */
EXPORT int core_asked(struct core *core, int index, int bank) {
    if (core->flight_layer < 0) return 0;
    core->failed = NULL;
    if (index != core->flight_layer || bank > core->n_arrived) return FAILED;
    if (bank == core->n_arrived) {
        for (int i = 0; i < core->n_flight; i++) {
            core->wanted[i] = job_of(core, core->flight[i], bank);
        }
        wait_for(core, core->wanted, core->n_flight);
        if (find_failure(core, bank) == FAILED) return FAILED;
        core->n_arrived++;
    }
    if (core->n_arrived == core->layers[index].n_banks) {
        for (int i = 0; i < core->n_flight; i++) {
            core->arrays.state[core->flight[i]] = RESIDENT;
            count_reads(core, core->flight[i]);
        }
        core->flight_layer = -1;
        core->n_flight = 0;
        return 0;
    }
    for (int i = 0; i < core->n_flight; i++) {
        for (int later = core->n_arrived; later < core->layers[index].n_banks; later++) {
            if (is_done(job_of(core, core->flight[i], later))) continue;
            core->counts.apart += core->settings.overlap;
            return 1;
        }
    }
    return 0;
}

/* Bring a routing's experts in, and begin to read what the next layer is guessed to route to.
 *
 * `input`: what the layer's router saw, or NULL not to guess. `n_forced` replace what is named, not
 * the work for it, unless it is negative. Returns 0, or -1 as `core_asked`. */
EXPORT int core_load(struct core *core, int index, const int32_t *experts, int n, void *input,
                     const int32_t *forced, int n_forced) {
    core->failed = NULL;
    if (core->flight_layer >= 0) return FAILED;
    for (int i = 0; i < n; i++) {
        if (experts[i] < 0 || experts[i] >= core->layers[index].n_expert) return FAILED;
    }
    int64_t started = own_time_ns(), spent = 0;
    if (core->settings.poison) poison_gone(core);
    if (core->settings.steady) {
        spent += own_time_ns() - started;
        let_overdue_go(core);
        started = own_time_ns();
    }
    collect(core);
    int n_keys = distinct_by_last_use(core, index, experts, n);
    int n_missing = stage(core, index, n_keys);
    routed(core, index, n_keys);
    take_off(core, index, n_missing);
    if (input && core->settings.prefetch && index + 1 < core->n_layer) {
        struct layer *next = &core->layers[index + 1];
        int n_named = next->router.graph ? guess(core, index + 1, input, next->named) : -1;
        if (n_named >= 0 && n_forced >= 0) {
            memcpy(next->named, forced, sizeof(int32_t) * n_forced);
            n_named = n_forced;
        }
        if (n_named > core->settings.n_sure) n_named = core->settings.n_sure;
        if (n_named >= 0) begin(core, index + 1, n_named);
    }
    core->counts.mgmt_ns += spent + own_time_ns() - started;
    for (int bank = 0; !core->settings.overlap && core->flight_layer >= 0; bank++) {
        if (core_asked(core, index, bank) == FAILED) return FAILED;
    }
    return 0;
}

/* After a decode that was stopped: nothing of a layer's own reads is under way any more, and what
 * was not used counts as absent. */
EXPORT void core_abandon(struct core *core) {
    if (core->flight_layer < 0) return;
    for (int i = 0; i < core->n_flight; i++) {
        wait_for(core, core->wanted, jobs_of(core, core->flight[i], core->wanted));
    }
    for (int i = 0; i < core->n_flight; i++) forget(core, core->flight[i]);
    core->flight_layer = -1;
    core->n_flight = 0;
}

/* Return when nothing at all is under way; then what is there may leave like any other entry. */
EXPORT void core_settle(struct core *core) {
    core_abandon(core);
    int64_t stall_ns = core->counts.stall_ns;
    while (core->n_under_way) {
        wait_for(core, core->wanted, jobs_of(core, core->under_way[0], core->wanted));
        collect(core);
    }
    for (int64_t i = 0; i < (int64_t)core->n_keys * core->most_banks; i++) {
        if (core->movers[i]) wait_for(core, &core->movers[i], 1);
        core->movers[i] = NULL;
    }
    core->counts.stall_ns = stall_ns;
    memset(core->begun, 0, core->n_keys);
    memset(core->held, 0, core->n_keys);
    for (int layer = 0; layer < core->n_layer; layer++) core->layers[layer].n_named = -1;
    core->n_kept = 0;
    apply_uses(core);
    if (core->settings.poison) poison_gone(core);
}

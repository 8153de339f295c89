/* A token's experts: staged, read and guessed without the interpreter.
 *
 * The same decisions as engine/loading.py, residency.py, retention.py and ahead.py, which remain for
 * prompts, for what is observed, and where this could not be compiled. tests/test_token_core.py
 * holds one against the other. Between decodes all that lasts lies in arrays of the Python objects
 * (engine/token_core.py); what is here is what is under way.
 *
 * Words: an entry is one (layer, expert), by key = layer * n_expert + expert; it has a slice in each
 * bank of its layer. One thread at a time calls; lanes touch only jobs, under the mutex.
 */
#ifndef TUIWORK_CORE_H
#define TUIWORK_CORE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { ABSENT, RESIDENT, READING }; /* engine/counters.py */
enum { N_TAUS = 3, BATCH = 16, MOST_LANES = 64, LATENCY_BUCKETS = 32, MOST_STEPS = 8 };
enum { PAGE = 4096 };
enum { NO_QUEUE, URGENT, SPARE, N_QUEUES };
enum { IDLE, WAITING, TAKEN, DONE };
enum { PLAIN, SOFT_MAX, UNARY }; /* what a router applies before its selection bias */

/* Own pages of one shard, of which the core may be moved. */
struct extent {
    int64_t first, last, core_first, core_bytes;
    int32_t shard;
};

/* What a lane does for one slice: take memory over or give it back, and read into it. */
struct job {
    struct job *before, *after; /* in its queue */
    int32_t state, queue, wanted, error, shard, has_move;
    int32_t most_delay_us, refuses_moves;
    int64_t first, last; /* file range; none where they are equal */
    struct extent freed; /* moved to `target` if has_move, else given back */
    int64_t target, nbytes, latency_ns;
    struct job **mover; /* where it is noted as who takes memory away */
};

struct bank {
    int32_t shard;
    int64_t offset, slice_bytes, core_bytes, inside_first, inside_last;
};

struct shard {
    char *base;
    int64_t size;
    int fd; /* for all lanes: positioned reads share nothing */
};

/* A layer's router, to guess what it will choose. Without a graph it cannot be guessed. */
struct router {
    void *graph, *plan;
    void **vector;  /* where the graph's input has the address of its numbers */
    float *product; /* where the graph leaves W @ x */
    float *bias, *selection_bias;
    int32_t n_rows, n_columns, activation;
};

struct layer {
    int32_t n_banks, n_expert;
    int64_t entry_bytes;
    struct bank *banks; /* in order of use */
    struct router router;
    int32_t n_steps, steps[MOST_STEPS]; /* from the routing node to what its router saw */
    int32_t *named, n_named; /* what was guessed; -1: nothing was */
};

/* What a decode may do; set before each. */
struct settings {
    int64_t clock, budget_bytes;
    int32_t overlap, prefetch, steady, top_k, n_sure, most_under_way;
    int32_t keeps_edges, moves_pages, poison;
    int32_t most_delay_us, refuses_moves; /* for tests */
    double least_share;
};

/* What happened so far. */
struct counts {
    int64_t hits, misses, evictions, moved, apart;
    int64_t reads, read_bytes, io_ns, stall_ns, mgmt_ns;
    int64_t routed;
};

/* Memory of Python's arrays. */
struct arrays {
    uint8_t *resident;
    double *parts, *worth, *nearness; /* parts: n_taus rows of a number per key */
    int64_t *last;
    int64_t *state, *hits, *misses, *last_used;
    int64_t *named, *routed, *right, *read, *used, *late; /* guess counters by layer */
    int64_t *routings, *experts_routed;                   /* routing counters by layer */
    int64_t *lane_bytes, *lane_reads, *lane_busy_ns, *lane_latencies;
};

/* What an entry is worth, to be put in order. */
struct ranked {
    double score;
    int64_t last;
    int32_t key;
};

struct core;

struct lane {
    struct core *core;
    int number;
    pthread_t thread;
};

struct lanes {
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    struct { struct job *first, *last; } queues[N_QUEUES];
    int n_threads, n_sleeping, stop, is_waited_for;
    struct lane threads[MOST_LANES];
};

struct core {
    int n_layer, n_expert, n_keys, most_banks, n_shards;
    struct layer *layers;
    struct shard *shards;
    struct settings settings;
    struct counts counts;
    struct arrays arrays;
    struct lanes lanes;

    /* Retention. */
    double decay[N_TAUS], credit[N_TAUS];
    int32_t present_layer;
    int64_t n_uses;
    int32_t *unapplied, n_unapplied, *present, n_present, *order, n_order;
    struct ranked *ranked;
    uint8_t *used_since, *in_use, *held;

    /* The cache. */
    int64_t resident_bytes;
    struct extent *freed;
    int32_t n_freed, *freed_keys, *freed_banks;
    int32_t *gone; /* who left, the last n_keys of them */
    int64_t n_gone, n_poisoned;
    struct job *reads, *releases, **movers; /* by key and bank */

    /* Reading ahead. */
    uint8_t *begun, *is_under_way;
    int32_t *under_way, n_under_way;
    int32_t *kept, *kept_counts, n_kept; /* the last layers' wrong guesses, by layer routed */

    /* The present layer's reads. */
    int32_t flight_layer, n_arrived, *flight, n_flight;
    struct job **wanted, *failed;
    int32_t failed_key, failed_bank;

    /* Scratch of one call. */
    int32_t *keys, *missing;
    int (*compute)(void *graph, void *plan);
};

/* Where a computed node's numbers are. */
struct layout {
    int32_t data, shape, sources, name; /* offsets in struct ggml_tensor */
};

/* The eval callback: what it knows of the present graph. See engine/hook.py. */
struct front {
    int64_t index, since_mark, visited, known, n_expected;
    const uintptr_t *expected; /* the nodes' addresses, in the order of the graph */
    const uint8_t *roles;
    const int32_t *layers, *banks;
    const char *const *names;
    int64_t stopped; /* the next visit is to experts that were waited for: nothing is to be done */
    int64_t routing; /* the layer whose routing is visited next, to be handled here; else -1 */
    int64_t failed;  /* whether handling it failed */
    struct core *core; /* NULL: Python loads */
    bool (*slow)(void *node, bool ask, void *data);
    struct layout layout;
};

/* lanes.c */
int64_t now_ns(void);
void submit(struct core *core, struct job **jobs, int n, int queue);
void wait_for(struct core *core, struct job **jobs, int n);
bool is_done(const struct job *job);
void give_back(struct core *core, int shard, int64_t first, int64_t last);

/* cache.c */
int64_t slice_start(const struct bank *bank, int expert);
void use(struct core *core, int layer, const int32_t *keys, int n);
bool make_room(struct core *core, int64_t n_bytes);
void apply_uses(struct core *core);
void prepare_reads(struct core *core, int32_t key);
int unpaired_releases(struct core *core, struct job **jobs);
int in_the_way(struct core *core, int32_t key, struct job **jobs);
void forget(struct core *core, int32_t key);
void poison_gone(struct core *core);

/* guess.c */
int guess(struct core *core, int index, void *input, int32_t *named);

/* token.c */
int core_asked(struct core *core, int index, int bank);
int core_load(struct core *core, int index, const int32_t *experts, int n, void *input,
              const int32_t *forced, int n_forced);
void core_settle(struct core *core);

#endif

/* The lanes: threads that move bytes from shards to their addresses. See engine/lanes.py. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

bool is_done(const struct job *job) {
    int state = __atomic_load_n(&job->state, __ATOMIC_ACQUIRE);
    return state == DONE || state == IDLE;
}

static void set_state(struct job *job, int state) {
    __atomic_store_n(&job->state, state, __ATOMIC_RELEASE);
}

static void append(struct lanes *lanes, struct job *job, int queue) {
    job->queue = queue;
    job->after = NULL;
    job->before = lanes->queues[queue].last;
    if (job->before) job->before->after = job;
    else lanes->queues[queue].first = job;
    lanes->queues[queue].last = job;
}

static void take_out(struct lanes *lanes, struct job *job) {
    if (job->before) job->before->after = job->after;
    else lanes->queues[job->queue].first = job->after;
    if (job->after) job->after->before = job->before;
    else lanes->queues[job->queue].last = job->before;
    job->queue = NO_QUEUE;
}

static struct job *next_job(struct lanes *lanes) {
    for (int queue = URGENT; queue < N_QUEUES; queue++) {
        struct job *job = lanes->queues[queue].first;
        if (job) {
            take_out(lanes, job);
            set_state(job, TAKEN);
            return job;
        }
    }
    return NULL;
}

void give_back(struct core *core, int shard, int64_t first, int64_t last) {
    if (first < last) madvise(core->shards[shard].base + first, last - first, MADV_DONTNEED);
}

/* Returns 0, or why the target has no memory. */
static int take_over(struct core *core, struct job *job) {
    struct extent *freed = &job->freed;
    char *source = core->shards[freed->shard].base + freed->core_first;
    char *target = core->shards[job->shard].base + job->target;
    int64_t core_last = freed->core_first + freed->core_bytes;
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    int error = 0;
    if (job->refuses_moves ||
        mremap(source, freed->core_bytes, freed->core_bytes, flags, target) != target) {
        give_back(core, freed->shard, freed->first, freed->last);
        /* A refusal may come after the target was unmapped. */
        int own = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        void *at = mmap(target, freed->core_bytes, PROT_READ | PROT_WRITE, own, -1, 0);
        if (at == MAP_FAILED) error = errno;
    }
    give_back(core, freed->shard, freed->first, freed->core_first);
    give_back(core, freed->shard, core_last, freed->last);
    return error;
}

/* As engine/positioned.py: returns 0 or an errno. */
static int read_range(int fd, char *base, int64_t first, int64_t last, int64_t size) {
    int64_t wanted = last < size ? last : size;
    for (int64_t position = first; position < wanted;) {
        ssize_t got = pread(fd, base + position, last - position, position);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (position + got >= wanted) break;
        int64_t resume = (position + got) / PAGE * PAGE;
        struct stat status;
        bool ended = resume == position && !fstat(fd, &status) && status.st_size <= position + got;
        if (got == 0 || ended) return ENODATA;
        if (resume == position) return EIO;
        position = resume;
    }
    return 0;
}

static void count(struct core *core, const struct job *job, int lane) {
    struct arrays *arrays = &core->arrays;
    int bucket = 0;
    for (int64_t us = job->latency_ns / 1000; us; us >>= 1) bucket++;
    if (bucket >= LATENCY_BUCKETS) bucket = LATENCY_BUCKETS - 1;
    arrays->lane_bytes[lane] += job->nbytes;
    arrays->lane_reads[lane]++;
    arrays->lane_busy_ns[lane] += job->latency_ns;
    arrays->lane_latencies[lane * LATENCY_BUCKETS + bucket]++;
}

static void do_job(struct core *core, struct job *job, int lane) {
    int64_t started = now_ns();
    job->error = 0;
    if (job->has_move) job->error = take_over(core, job);
    else give_back(core, job->freed.shard, job->freed.first, job->freed.last);
    if (job->first < job->last) {
        const struct shard *shard = &core->shards[job->shard];
        /* Any order of arrival, for tests. */
        if (job->most_delay_us) usleep((uint64_t)started / 7919 % job->most_delay_us);
        if (!job->error) {
            int64_t first = job->first, last = job->last;
            job->error = read_range(shard->fd, shard->base, first, last, shard->size);
        }
        int64_t last = job->last < shard->size ? job->last : shard->size;
        job->nbytes = job->error ? 0 : last - job->first;
        job->latency_ns = now_ns() - started;
        count(core, job, lane);
    }
    struct lanes *lanes = &core->lanes;
    pthread_mutex_lock(&lanes->mutex);
    /* Once it is done it may be prepared anew. */
    bool is_waited_for = job->wanted && lanes->is_waited_for;
    set_state(job, DONE);
    if (is_waited_for) pthread_cond_signal(&lanes->done);
    pthread_mutex_unlock(&lanes->mutex);
}

/* As engine/scheduling.py: a lane that wakes begins its read at once. */
static void ask_for_short_slices(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes = {.size = sizeof attributes, .runtime = 100000};
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

static void *run_lane(void *argument) {
    struct lane *lane = argument;
    struct lanes *lanes = &lane->core->lanes;
    ask_for_short_slices();
    pthread_mutex_lock(&lanes->mutex);
    while (true) {
        struct job *job = NULL;
        while (!lanes->stop && !(job = next_job(lanes))) {
            lanes->n_sleeping++;
            pthread_cond_wait(&lanes->work, &lanes->mutex);
            lanes->n_sleeping--;
        }
        if (lanes->stop) break;
        pthread_mutex_unlock(&lanes->mutex);
        do_job(lane->core, job, lane->number);
        pthread_mutex_lock(&lanes->mutex);
    }
    pthread_mutex_unlock(&lanes->mutex);
    return NULL;
}

void submit(struct core *core, struct job **jobs, int n, int queue) {
    struct lanes *lanes = &core->lanes;
    if (!n) return;
    pthread_mutex_lock(&lanes->mutex);
    for (int i = 0; i < n; i++) {
        set_state(jobs[i], WAITING);
        jobs[i]->wanted = false;
        append(lanes, jobs[i], queue);
    }
    int n_wakes = n < lanes->n_sleeping ? n : lanes->n_sleeping;
    pthread_mutex_unlock(&lanes->mutex);
    while (n_wakes--) pthread_cond_signal(&lanes->work);
}

/* Whether the caller, lane 0, should do the next job: one that is waited for, or nobody else will. */
static bool should_help(const struct lanes *lanes) {
    const struct job *job = lanes->queues[URGENT].first;
    return lanes->n_threads == 0 || (job && job->wanted);
}

void wait_for(struct core *core, struct job **jobs, int n) {
    struct lanes *lanes = &core->lanes;
    int left = 0;
    for (int i = 0; i < n; i++) left += !is_done(jobs[i]);
    if (!left) return;
    int64_t started = now_ns();
    pthread_mutex_lock(&lanes->mutex);
    for (int i = 0; i < n; i++) {
        jobs[i]->wanted = true;
        if (jobs[i]->queue == SPARE) {
            /* What is waited for now is no longer spare. */
            take_out(lanes, jobs[i]);
            append(lanes, jobs[i], URGENT);
        }
    }
    lanes->is_waited_for = true;
    for (int i = 0; i < n; i++) {
        while (!is_done(jobs[i])) {
            struct job *job = should_help(lanes) ? next_job(lanes) : NULL;
            if (!job) {
                pthread_cond_wait(&lanes->done, &lanes->mutex);
                continue;
            }
            pthread_mutex_unlock(&lanes->mutex);
            do_job(core, job, 0);
            pthread_mutex_lock(&lanes->mutex);
        }
    }
    lanes->is_waited_for = false;
    pthread_mutex_unlock(&lanes->mutex);
    core->counts.stall_ns += now_ns() - started;
}

/* Returns 0 or an errno. */
EXPORT int core_start_lane(struct core *core) {
    struct lanes *lanes = &core->lanes;
    if (lanes->n_threads + 1 >= MOST_LANES) return EAGAIN;
    struct lane *lane = &lanes->threads[lanes->n_threads];
    lane->core = core;
    lane->number = lanes->n_threads + 1;
    int error = pthread_create(&lane->thread, NULL, run_lane, lane);
    if (!error) lanes->n_threads++;
    return error;
}

/* Nothing may be under way. */
EXPORT void core_stop_lanes(struct core *core) {
    struct lanes *lanes = &core->lanes;
    pthread_mutex_lock(&lanes->mutex);
    lanes->stop = true;
    pthread_cond_broadcast(&lanes->work);
    pthread_mutex_unlock(&lanes->mutex);
    for (int i = 0; i < lanes->n_threads; i++) pthread_join(lanes->threads[i].thread, NULL);
    lanes->n_threads = 0;
    lanes->stop = false;
}

/* OpenMP's functions for a machine of up to 64 processors that is not there, as GCC calls them.
 *
 * Threads of a team run one at a time. Each has a clock, which goes on by the processor time that it takes itself;
 * whenever it calls OpenMP (for the next part of a loop, at a barrier, at the end), the thread with the earliest clock
 * goes on. So a loop's parts go to threads in the order in which they would on as many processors as there are threads,
 * each as fast as the one here. Nothing is said of what threads share: bandwidth, caches, power.
 *
 * Preloaded (`LD_PRELOAD`), it stands in front of libgomp. While nothing is recorded, a team has one thread.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define MOST 64
#define MOST_LOOPS 64 /* in one parallel region */

/* What one thread did between two calls of OpenMP. */
typedef struct {
    int32_t phase;     /* one more after each barrier, and at both ends of a parallel region */
    int32_t team;      /* 1: serial */
    int32_t rank, loop; /* loop: how many dynamic loops of the region the thread had entered */
    int64_t first;     /* iteration of a dynamic loop; -1: none */
    int64_t ns;
} stretch;

typedef enum { READY, WAITING, DONE } state;

static struct {
    int threads; /* 0: nothing is recorded */
    int team;    /* of the region that is under way; 0: none */
    int phase;
    void (*body)(void *);
    void *data;
    struct {
        int64_t clock, since;
        state state;
        int loops;     /* entered */
        int64_t first; /* of the part in hand; -1: none */
        sem_t turn;
    } of[MOST];
    struct {
        long next, end, incr, chunk;
    } loops[MOST_LOOPS];
    int loops_met, started; /* threads that exist, rank 0 included */
    stretch *log;
    int64_t logged, room;
} run = {.started = 1};

static __thread int rank;
static __thread bool member; /* of the team */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void note(int64_t ns) {
    if (run.logged == run.room) return; /* the caller sees that it is full */
    run.log[run.logged++] =
        (stretch){run.phase, run.team ? run.team : 1, rank, run.of[rank].loops, run.of[rank].first, ns};
}

static void stop(void) {
    int64_t ns = now() - run.of[rank].since;
    run.of[rank].clock += ns;
    note(ns);
    run.of[rank].first = -1;
}

static void go_on(void) { run.of[rank].since = now(); }

/* Gives the processor to the thread whose clock is earliest, and comes back when it is this one's turn. */
static void yield(void) {
    int next = -1;
    for (int i = 0; i < run.team; i++)
        if (run.of[i].state == READY && (next < 0 || run.of[i].clock < run.of[next].clock)) next = i;
    if (next < 0) { /* all have arrived at the barrier, or at the end */
        int64_t latest = 0;
        for (int i = 0; i < run.team; i++)
            if (run.of[i].clock > latest) latest = run.of[i].clock;
        run.phase++;
        for (int i = 0; i < run.team; i++) {
            run.of[i].clock = latest;
            if (run.of[i].state == WAITING) run.of[i].state = READY;
        }
        next = 0; /* at the end: the caller of the region */
    }
    if (next == rank) return;
    bool ended = run.of[rank].state == DONE && rank > 0; /* asked before another thread begins the next region */
    sem_post(&run.of[next].turn);
    if (!ended) sem_wait(&run.of[rank].turn);
}

static void take_part(void) {
    member = true;
    go_on();
    run.body(run.data);
    stop();
    member = false;
    run.of[rank].state = DONE;
    yield();
}

static void *worker(void *argument) {
    rank = (int)(intptr_t)argument;
    for (;;) {
        sem_wait(&run.of[rank].turn);
        take_part();
    }
    return NULL;
}

int omp_get_thread_num(void) { return member ? rank : 0; }
int omp_get_num_threads(void) { return member ? run.team : 1; }

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    if (threads == 0 || threads > MOST) threads = run.threads;
    if (run.threads == 0 || run.team > 0 || threads <= 1) { /* nothing is recorded, or nested */
        bool was = member;
        member = false;
        body(data);
        member = was;
        return;
    }
    stop();
    int64_t clock = run.of[0].clock;
    while (run.started < (int)threads) {
        pthread_t thread;
        sem_init(&run.of[run.started].turn, 0, 0);
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)run.started) != 0) abort();
        run.started++;
    }
    run.team = (int)threads;
    run.body = body;
    run.data = data;
    run.loops_met = 0;
    run.phase++;
    for (int i = 0; i < run.team; i++) {
        run.of[i].clock = clock;
        run.of[i].state = READY;
        run.of[i].loops = 0;
        run.of[i].first = -1;
    }
    take_part();
    run.team = 0;
    run.of[0].loops = 0;
    go_on();
}

void GOMP_barrier(void) {
    if (!member) return;
    stop();
    run.of[rank].state = WAITING;
    yield();
    go_on();
}

static bool part(int loop, long *first, long *last) {
    yield(); /* who is earliest takes it */
    long left = run.loops[loop].end - run.loops[loop].next, step = run.loops[loop].incr * run.loops[loop].chunk;
    bool some = step > 0 ? left > 0 : left < 0;
    if (some) {
        *first = run.of[rank].first = run.loops[loop].next;
        *last = (step > 0 ? step < left : step > left) ? *first + step : run.loops[loop].end;
        run.loops[loop].next = *last;
    }
    go_on();
    return some;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long incr, long chunk, long *first, long *last) {
    if (!member) {
        *first = start;
        *last = end;
        return incr > 0 ? start < end : start > end;
    }
    stop();
    int loop = run.of[rank].loops++;
    if (loop >= MOST_LOOPS) abort();
    if (loop == run.loops_met) {
        run.loops_met++;
        run.loops[loop].next = start;
        run.loops[loop].end = end;
        run.loops[loop].incr = incr;
        run.loops[loop].chunk = chunk;
    }
    return part(loop, first, last);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *last) {
    if (!member) return false;
    stop();
    return part(run.of[rank].loops - 1, first, last);
}

void GOMP_loop_end(void) { GOMP_barrier(); }
void GOMP_loop_end_nowait(void) {}

/* From now on parallel regions have up to `threads` threads, and what they do is written to `log`. Of the calling thread,
 * which has to be the same every time. */
void virtual_begin(int threads, stretch *log, int64_t room) {
    run.threads = threads;
    run.phase = 0;
    run.log = log;
    run.room = room;
    run.logged = 0;
    run.of[0].clock = 0;
    run.of[0].loops = 0;
    run.of[0].first = -1;
    if (run.of[0].since == 0) sem_init(&run.of[0].turn, 0, 0);
    go_on();
}

/* How many stretches there were. */
int64_t virtual_end(void) {
    stop();
    run.threads = 0;
    return run.logged;
}

/* Both around a call of a function of up to 8 integers and pointers, so that nothing of the caller's is counted. */
int64_t virtual_call(int threads, stretch *log, int64_t room, void *function, const int64_t *a, int32_t *status) {
    int32_t (*call)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) =
        (int32_t(*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t))function;
    virtual_begin(threads, log, room);
    *status = call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    return virtual_end();
}

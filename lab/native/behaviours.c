/* behaviours: what RMM documents of its resources and holds in its tests, through cistern.h on a GPU, for the default pool
 * and for a pool over every upstream that the device can have. 0 bytes and 1 PiB; alignment; two live blocks of 8 bytes
 * differ; one thread writes memory on a stream, another reads it on its own stream and gives it back while the copy is
 * still under way; a stream is destroyed right after memory was given back on it. What is written is compared.
 *
 * The driver library is libcuda.so.1, or what the variable CUDA_LIBRARY names. It needs no CUDA toolkit:
 *
 *     cc -O2 -pthread -I include behaviours.c -L lib -lcistern -ldl && ./a.out [BLOCKS]
 *
 * BLOCKS is how many blocks of 4 MiB pass from thread to thread (400), a quarter as many for each upstream. */
#define _GNU_SOURCE
#include <cistern.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

/* ---- the driver ---- */

typedef void *Context, *Stream, *Event;

static int (*cuInit)(unsigned);
static int (*cuDeviceGet)(int *, int);
static int (*cuDevicePrimaryCtxRetain)(Context *, int);
static int (*cuCtxPushCurrent)(Context);
static int (*cuCtxSynchronize)(void);
static int (*cuStreamCreate)(Stream *, unsigned);
static int (*cuStreamDestroy)(Stream);
static int (*cuStreamSynchronize)(Stream);
static int (*cuStreamWaitEvent)(Stream, Event, unsigned);
static int (*cuEventCreate)(Event *, unsigned);
static int (*cuEventRecord)(Event, Stream);
static int (*cuEventDestroy)(Event);
static int (*cuMemHostAlloc)(void **, size_t, unsigned);
static int (*cuMemFreeHost)(void *);
static int (*cuMemcpyAsync)(uint64_t, uint64_t, size_t, Stream);
static int (*cuLaunchHostFunc)(Stream, void (*)(void *), void *); /* NULL where the driver has none */

static void *driver;
static Context context;

static void *call(const char *name, int needed) {
  void *f = dlsym(driver, name);
  if (f == NULL && needed) {
    fprintf(stderr, "behaviours: the driver has no %s\n", name);
    exit(2);
  }
  return f;
}

static const char *what = "default pool"; /* what is being tried, for messages */

static _Noreturn void failed(int line, const char *words, int code) {
  char why[2048];
  int last = cistern_last_error(why, sizeof why);
  fprintf(stderr, "behaviours: %s: line %d: %s gave %d; last error %d: %s\n", what, line, words, code, last, why);
  _exit(1);
}

#define CHECK(cond) ((cond) ? (void)0 : failed(__LINE__, #cond, 0))
#define OK(c)                        \
  do {                               \
    int code_ = (c);                 \
    if (code_ != 0)                  \
      failed(__LINE__, #c, code_);   \
  } while (0)

static void open_driver(void) {
  const char *path = getenv("CUDA_LIBRARY");
  driver = dlopen(path != NULL && *path != 0 ? path : "libcuda.so.1", RTLD_NOW);
  if (driver == NULL) {
    fprintf(stderr, "behaviours: %s\n", dlerror());
    exit(2);
  }
#define FIND(f, name) *(void **)&f = call(name, 1)
  FIND(cuInit, "cuInit");
  FIND(cuDeviceGet, "cuDeviceGet");
  FIND(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  FIND(cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  FIND(cuCtxSynchronize, "cuCtxSynchronize");
  FIND(cuStreamCreate, "cuStreamCreate");
  FIND(cuStreamDestroy, "cuStreamDestroy_v2");
  FIND(cuStreamSynchronize, "cuStreamSynchronize");
  FIND(cuStreamWaitEvent, "cuStreamWaitEvent");
  FIND(cuEventCreate, "cuEventCreate");
  FIND(cuEventRecord, "cuEventRecord");
  FIND(cuEventDestroy, "cuEventDestroy_v2");
  FIND(cuMemHostAlloc, "cuMemHostAlloc");
  FIND(cuMemFreeHost, "cuMemFreeHost");
  FIND(cuMemcpyAsync, "cuMemcpyAsync");
  *(void **)&cuLaunchHostFunc = call("cuLaunchHostFunc", 0);
  int device;
  OK(cuInit(0));
  OK(cuDeviceGet(&device, 0));
  OK(cuDevicePrimaryCtxRetain(&context, device));
  OK(cuCtxPushCurrent(context));
}

static void nap(void *nothing) {
  (void)nothing;
  nanosleep(&(struct timespec){0, 2000000}, NULL);
}

/* Holds a stream up for 2 ms, so that what is given back on it is still in use. */
static void delay(Stream s) {
  if (cuLaunchHostFunc != NULL)
    OK(cuLaunchHostFunc(s, nap, NULL));
}

/* ---- memory of the pool under test ---- */

static const uint64_t *pool; /* NULL: the default pool */
static uint32_t library;

static int get(void **p, size_t size, Stream s) {
  cistern_alloc_options o = {.size = sizeof o, .library = library};
  if (pool != NULL)
    memcpy(o.pool, pool, sizeof o.pool);
  return cistern_alloc_with(p, size, 0, s, &o);
}

/* RMM's order: memory is given back on a stream, which need not be the one that it was asked for on. */
static void give(void *p, Stream s) {
  OK(cistern_record_stream(p, s));
  OK(cistern_release(p));
}

static uint64_t word(uint64_t seed, uint64_t i) {
  uint64_t z = seed * 0x9E3779B97F4A7C15u + i;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  return z ^ z >> 27;
}

static void fill(uint64_t *p, size_t words, uint64_t seed) {
  for (size_t i = 0; i < words; i++)
    p[i] = word(seed, i);
}

static void compare(const uint64_t *p, size_t words, uint64_t seed) {
  size_t wrong = 0;
  for (size_t i = 0; i < words; i++)
    wrong += p[i] != word(seed, i);
  if (wrong != 0)
    failed(__LINE__, "words that are wrong", (int)wrong);
}

/* ---- the behaviours ---- */

static void nothing_and_too_much(Stream s) {
  for (int i = 0; i < 20; i++) {
    void *p = &p;
    OK(get(&p, 0, s));
    CHECK(p == NULL);
    OK(cistern_release(NULL));
    size_t much[] = {(size_t)1 << 50, SIZE_MAX / 2, SIZE_MAX - 4096, SIZE_MAX};
    for (size_t k = 0; k < sizeof much / sizeof *much; k++) {
      int code = get(&p, much[k], s);
      CHECK(code == CISTERN_OUT_OF_MEMORY || (k > 0 && code == CISTERN_INVALID));
      CHECK(p == NULL);
    }
    OK(get(&p, 3 * MIB, s)); /* what fits is had at once */
    CHECK(p != NULL);
    give(p, s);
  }
}

static void aligned_and_apart(Stream s) {
  enum { MOST = 200 };
  void *all[MOST];
  size_t sizes[MOST];
  for (int i = 0; i < MOST; i++) {
    sizes[i] = i < 20 ? 8 : 1 + (size_t)(word(7, (uint64_t)i) % (i % 10 == 0 ? 5 * MIB : 70000));
    OK(get(&all[i], sizes[i], s));
    CHECK((uintptr_t)all[i] % 512 == 0);
    for (int k = 0; k < i; k++) {
      uintptr_t a = (uintptr_t)all[i], b = (uintptr_t)all[k];
      CHECK(a >= b + sizes[k] || b >= a + sizes[i]);
    }
  }
  for (int i = 0; i < MOST; i++)
    give(all[i * 7 % MOST], s);
}

enum { BYTES = 4 << 20, WORDS = BYTES / 8, SLOTS = 16, SOURCES = 4 };

struct line { /* from the producer to the consumer */
  pthread_mutex_t mu;
  pthread_cond_t changed;
  void *block[SLOTS];
  Event written[SLOTS];
  int made, taken, compared;
  int rounds;
  Stream a, b;
  uint64_t *source, *sink;
};

static void *produce(void *arg) {
  struct line *l = arg;
  OK(cuCtxPushCurrent(context));
  for (int i = 0; i < l->rounds; i++) {
    pthread_mutex_lock(&l->mu);
    while (i - l->compared >= SLOTS)
      pthread_cond_wait(&l->changed, &l->mu);
    pthread_mutex_unlock(&l->mu);
    void *p;
    Event e;
    OK(get(&p, BYTES, l->a));
    OK(cuMemcpyAsync((uint64_t)(uintptr_t)p, (uint64_t)(uintptr_t)(l->source + (size_t)WORDS * (size_t)(i % SOURCES)), BYTES, l->a));
    OK(cuEventCreate(&e, 2));
    OK(cuEventRecord(e, l->a));
    pthread_mutex_lock(&l->mu);
    l->block[i % SLOTS] = p;
    l->written[i % SLOTS] = e;
    l->made = i + 1;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mu);
  }
  return NULL;
}

static void *consume(void *arg) {
  struct line *l = arg;
  OK(cuCtxPushCurrent(context));
  for (int i = 0; i < l->rounds; i++) {
    pthread_mutex_lock(&l->mu);
    while (l->made <= i)
      pthread_cond_wait(&l->changed, &l->mu);
    void *p = l->block[i % SLOTS];
    Event e = l->written[i % SLOTS];
    l->taken = i + 1;
    pthread_mutex_unlock(&l->mu);
    OK(cuStreamWaitEvent(l->b, e, 0));
    if (i % 4 == 0)
      delay(l->b);
    OK(cuMemcpyAsync((uint64_t)(uintptr_t)(l->sink + (size_t)WORDS * (size_t)(i % SLOTS)), (uint64_t)(uintptr_t)p, BYTES, l->b));
    give(p, l->b); /* the copy has most likely not begun */
    OK(cuEventDestroy(e));
    if ((i + 1) % SLOTS != 0 && i + 1 != l->rounds)
      continue;
    OK(cuStreamSynchronize(l->b));
    for (int k = i - i % SLOTS; k <= i; k++)
      compare(l->sink + (size_t)WORDS * (size_t)(k % SLOTS), WORDS, 100 + (uint64_t)(k % SOURCES));
    pthread_mutex_lock(&l->mu);
    l->compared = i + 1;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mu);
  }
  return NULL;
}

static void producer_and_consumer(int rounds) {
  struct line l = {.mu = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .rounds = rounds};
  OK(cuMemHostAlloc((void **)&l.source, (size_t)SOURCES * BYTES, 0));
  OK(cuMemHostAlloc((void **)&l.sink, (size_t)SLOTS * BYTES, 0));
  for (int i = 0; i < SOURCES; i++)
    fill(l.source + (size_t)WORDS * (size_t)i, WORDS, 100 + (uint64_t)i);
  OK(cuStreamCreate(&l.a, 1));
  OK(cuStreamCreate(&l.b, 1));
  pthread_t producer, consumer;
  OK(pthread_create(&producer, NULL, produce, &l));
  OK(pthread_create(&consumer, NULL, consume, &l));
  OK(pthread_join(producer, NULL));
  OK(pthread_join(consumer, NULL));
  OK(cuCtxSynchronize());
  OK(cuStreamDestroy(l.a));
  OK(cuStreamDestroy(l.b));
  OK(cuMemFreeHost(l.source));
  OK(cuMemFreeHost(l.sink));
}

/* A stream goes right after memory was given back on it, with its work still queued; what comes next on another stream
 * may be the same memory, and is not touched by that work. */
static void stream_destroyed_after_free(int rounds) {
  uint64_t *host, *back;
  OK(cuMemHostAlloc((void **)&host, 2 * (size_t)BYTES, 0));
  OK(cuMemHostAlloc((void **)&back, BYTES, 0));
  fill(host, WORDS, 1);
  fill(host + WORDS, WORDS, 2);
  Stream steady;
  OK(cuStreamCreate(&steady, 1));
  for (int i = 0; i < rounds; i++) {
    Stream s;
    void *p, *q;
    OK(cuStreamCreate(&s, 1));
    OK(get(&p, BYTES, s));
    if (i % 8 == 0)
      delay(s);
    OK(cuMemcpyAsync((uint64_t)(uintptr_t)p, (uint64_t)(uintptr_t)host, BYTES, s));
    give(p, s);
    OK(cuStreamDestroy(s));
    OK(get(&q, BYTES, steady));
    OK(cuMemcpyAsync((uint64_t)(uintptr_t)q, (uint64_t)(uintptr_t)(host + WORDS), BYTES, steady));
    OK(cuMemcpyAsync((uint64_t)(uintptr_t)back, (uint64_t)(uintptr_t)q, BYTES, steady));
    give(q, steady);
    OK(cuStreamSynchronize(steady));
    compare(back, WORDS, 2);
    memset(back, 0, BYTES);
  }
  OK(cuCtxSynchronize());
  OK(cuStreamDestroy(steady));
  OK(cuMemFreeHost(host));
  OK(cuMemFreeHost(back));
}

static int64_t blocks_of_library(void) {
  cistern_library_use use[64];
  size_t n;
  OK(cistern_library_usage(0, use, 64, &n));
  for (size_t i = 0; i < n && i < 64; i++)
    if (use[i].library == library)
      return use[i].blocks;
  return 0;
}

static void behave(int rounds) {
  Stream s;
  OK(cuStreamCreate(&s, 1));
  nothing_and_too_much(s);
  aligned_and_apart(s);
  producer_and_consumer(rounds);
  stream_destroyed_after_free(rounds / 2);
  CHECK(blocks_of_library() == 0);
  OK(cuStreamSynchronize(s));
  OK(cuStreamDestroy(s));
  printf("ok: %s\n", what);
  fflush(stdout);
}

int main(int argc, char **argv) {
  static const char *const upstreams[] = {"device", "virtual", "async", "async:threshold=unlimited", "managed", "pinned", "host_numa", "nccl",
                                          "statistics|limiting:bytes=2GiB|device", "tracking|alignment:bytes=4096|async"};
  open_driver();
  library = cistern_library("behaviours");
  CHECK(library != 0);
  int rounds = argc > 1 ? atoi(argv[1]) : 400;
  CHECK(rounds >= 8);
  behave(rounds);
  for (size_t i = 0; i < sizeof upstreams / sizeof *upstreams; i++) {
    what = upstreams[i];
    if (cistern_upstream_check(0, what) != CISTERN_OK) {
      char why[1024];
      cistern_last_error(why, sizeof why);
      printf("note: %s: %s\n", what, why);
      continue;
    }
    uint64_t id[2] = {0x6e61, i + 1};
    cistern_pool_options o = {.size = sizeof o, .upstream = what};
    OK(cistern_pool_create(0, id, &o));
    pool = id;
    behave(rounds / 4);
    OK(cistern_pool_trim(0, id));
    cistern_pool_stats st = {.size = sizeof st};
    OK(cistern_pool_get_stats(0, id, &st));
    CHECK(st.blocks == 0 && st.allocated == 0 && st.reserved == 0);
    OK(cistern_pool_release(0, id));
    pool = NULL;
  }
  what = "the end";
  OK(cistern_trim(0));
  cistern_stats all = {.size = sizeof all};
  OK(cistern_get_stats(0, &all));
  CHECK(all.reserved.all.current == 0 && all.allocations.all.current == 0);
  printf("ok: all given back\n");
  return 0;
}

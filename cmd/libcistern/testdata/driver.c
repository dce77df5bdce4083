/* Over the binding of NVIDIA's driver, with a library in libcuda's place whose memory the host can touch: contents, streams
 * that come and go, contexts, driver calls, errors by CUDA's name. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>

typedef int CUresult;
static CUresult (*get_current)(void **), (*push)(void *), (*pop)(void **), (*retain)(void **, int);
static CUresult (*create)(void **, unsigned), (*destroy)(void *);
static void *context;

static void *symbol(void *lib, const char *name) {
  void *f = dlsym(lib, name);
  CHECK(f != NULL);
  return f;
}

static void *new_stream(void) {
  void *s = NULL;
  CHECK(push(context) == 0 && create(&s, 1) == 0 && pop(&context) == 0 && s != NULL);
  return s;
}

static void end(void *stream) { CHECK(push(context) == 0 && destroy(stream) == 0 && pop(&context) == 0); }

static void no_context(void) {
  void *now = &now;
  CHECK(get_current(&now) == 0 && now == NULL);
}

/* How many driver calls there have been, of those whose line has the words. */
static long calls(const char *words) {
  FILE *f = fopen(getenv("STANDIN_LOG"), "r");
  CHECK(f != NULL);
  long n = 0;
  for (char line[4096]; fgets(line, sizeof line, f) != NULL;)
    n += strstr(line, words) != NULL;
  fclose(f);
  return n;
}

enum { BLOCKS = 60, ROUNDS = 3000 };

static void *work(void *arg) {
  unsigned seed = (unsigned)(uintptr_t)arg;
  void *stream[3] = {new_stream(), new_stream(), (void *)2};
  OK(cistern_stream_durable(0, stream[0]));
  unsigned char *block[BLOCKS] = {0};
  size_t size[BLOCKS];
  for (int i = 0; i < ROUNDS; i++) {
    int k = rand_r(&seed) % BLOCKS;
    if (block[k] == NULL) {
      size[k] = 1 + rand_r(&seed) % (1 << rand_r(&seed) % 19);
      block[k] = cistern_malloc((ssize_t)size[k], 0, stream[rand_r(&seed) % 3]);
      CHECK(block[k] != NULL);
      memset(block[k], (int)seed & 255, size[k]);
      block[k][0] = (unsigned char)k;
    } else {
      CHECK(block[k][0] == k);
      for (size_t j = 2; j < size[k]; j++)
        CHECK(block[k][j] == block[k][1]);
      if (rand_r(&seed) % 3 == 0)
        OK(cistern_record_stream(block[k], stream[rand_r(&seed) % 2]));
      OK(cistern_release(block[k]));
      block[k] = NULL;
    }
    if (i % 100 == 0) { /* streams come and go */
      for (int j = 0; j < BLOCKS; j++) {
        OK(cistern_release(block[j]));
        block[j] = NULL;
      }
      void *left[3] = {cistern_malloc(300000, 0, stream[1]), cistern_malloc(3 * MIB, 0, stream[1]), cistern_malloc(700, 0, stream[1])};
      end(stream[1]);
      for (int j = 0; j < 3; j++) {
        CHECK(left[j] != NULL);
        OK(cistern_release_on(left[j], stream[j] == stream[1] ? NULL : stream[j]));
      }
      stream[1] = new_stream();
    }
  }
  for (int j = 0; j < BLOCKS; j++)
    OK(cistern_release(block[j]));
  no_context();
  return NULL;
}

/* Captures of streams that were not promised to last, which cannot be asked what they are while they are captured. */
static void captures(CUresult (*begin)(void *, int), CUresult (*end)(void *, void **)) {
  const uint64_t pool[2] = {0, 9};
  OK(cistern_pool_create(0, pool, NULL));
  for (int how = 0; how < 8; how++) {
    void *s = new_stream(), *joined = new_stream(), *graph, *p[3], *old = NULL;
    if (how & 1)
      CHECK((old = cistern_malloc(MIB, 0, s)) != NULL);
    if (how & 2) /* announced before, else late */
      OK(cistern_capture_begin(0, pool, s));
    CHECK(push(context) == 0 && begin(s, 0) == 0 && begin(joined, 0) == 0 && pop(&context) == 0);
    if (!(how & 2))
      OK(cistern_capture_begin(0, pool, s));
    OK(cistern_capture_begin(0, pool, joined));
    FAILS(CISTERN_INVALID, "captured already", cistern_capture_begin(0, pool, s));
    if (how & 4) /* promised while it is captured, as PyTorch's are at their first request */
      OK(cistern_stream_durable(0, s));
    for (int i = 0; i < 3; i++)
      OK(cistern_alloc(&p[i], (size_t)(i + 1) * MIB, 0, i == 1 ? joined : s, pool));
    OK(cistern_record_stream(p[0], joined));
    OK(cistern_release(p[0]));
    OK(cistern_release(p[1]));
    if (old != NULL)
      OK(cistern_release(old));
    CHECK((old = cistern_malloc(MIB, 0, NULL)) != NULL);
    CHECK(push(context) == 0);
    CHECK(end(s, &graph) == 0 && end(joined, &graph) == 0);
    CHECK(pop(&context) == 0);
    OK(cistern_capture_end(0, s));
    OK(cistern_capture_end(0, joined));
    FAILS(CISTERN_INVALID, "no capture was announced", cistern_capture_end(0, s));
    OK(cistern_release(p[2]));
    OK(cistern_release(old));
    CHECK((old = cistern_malloc(MIB, 0, s)) != NULL);
    OK(cistern_release(old));
    OK(cistern_trim(-1));
  }
  OK(cistern_pool_release(0, pool));
}

/* A capture that forks and joins has the memory that both its streams used again, if asked to, once it has joined. */
static void reuse(void *lib) {
  CUresult (*begin)(void *, int), (*end)(void *, void **), (*event)(void **, unsigned), (*record)(void *, void *);
  CUresult (*wait)(void *, void *, unsigned), (*fill)(uint64_t, unsigned char, size_t, void *);
  *(void **)&begin = symbol(lib, "cuStreamBeginCapture_v2");
  *(void **)&end = symbol(lib, "cuStreamEndCapture");
  *(void **)&event = symbol(lib, "cuEventCreate");
  *(void **)&record = symbol(lib, "cuEventRecord");
  *(void **)&wait = symbol(lib, "cuStreamWaitEvent");
  *(void **)&fill = symbol(lib, "cuMemsetD8Async");
  for (int on = 0; on < 2; on++) {
    const uint64_t pool[2] = {0, 10 + (uint64_t)on};
    void *s = new_stream(), *side = new_stream(), *graph, *e, *p, *q, *r;
    OK(cistern_pool_create(0, pool, NULL));
    OK(cistern_capture_reuse(0, on));
    OK(cistern_capture_begin(0, pool, s));
    CHECK(push(context) == 0 && event(&e, 2) == 0 && begin(s, 0) == 0);
    OK(cistern_alloc(&p, 30 * MIB, 0, s, pool));
    CHECK(fill((uintptr_t)p, 1, 512, s) == 0 && record(e, s) == 0 && wait(side, e, 0) == 0 && fill((uintptr_t)p, 2, 512, side) == 0);
    OK(cistern_record_stream(p, side));
    OK(cistern_release(p));
    OK(cistern_alloc(&q, 30 * MIB, 0, s, pool));
    CHECK(q != p && record(e, side) == 0 && wait(s, e, 0) == 0);
    OK(cistern_alloc(&r, 30 * MIB, 0, s, pool));
    CHECK((r == p) == on);
    CHECK(end(s, &graph) == 0 && pop(&context) == 0);
    OK(cistern_capture_end(0, s));
    OK(cistern_release(q));
    OK(cistern_release(r));
    OK(cistern_pool_release(0, pool));
    OK(cistern_trim(-1));
  }
  OK(cistern_capture_reuse(0, 0));
}

/* Memory is given back on a stream that there is; the one that it was allocated on may be gone. */
static void without_stream(void) {
  for (int i = 0; i < 20; i++) {
    void *own = new_stream(), *other = new_stream(), *p[4];
    for (int k = 0; k < 4; k++)
      CHECK((p[k] = cistern_malloc((k + 1) * 3 * MIB / 2, 0, own)) != NULL);
    OK(cistern_release(p[0]));
    end(own);
    OK(cistern_release_on(p[1], other));
    OK(cistern_release_on(p[2], NULL));
    OK(cistern_release_on(p[3], (void *)2));
    end(other);
    void *q = cistern_malloc((10 + i) * MIB, 0, NULL); /* which wants what they left */
    CHECK(q != NULL);
    OK(cistern_release_on(q, (void *)1));
    if (i % 5 == 4)
      OK(cistern_trim(-1));
  }
  cistern_stats s = stats_of(0);
  CHECK(s.active.all.current == s.allocations.all.current);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  void *lib = dlopen(argv[1], RTLD_NOW);
  CHECK(lib != NULL);
  *(void **)&get_current = symbol(lib, "cuCtxGetCurrent");
  *(void **)&push = symbol(lib, "cuCtxPushCurrent_v2");
  *(void **)&pop = symbol(lib, "cuCtxPopCurrent_v2");
  *(void **)&retain = symbol(lib, "cuDevicePrimaryCtxRetain");
  *(void **)&create = symbol(lib, "cuStreamCreate");
  *(void **)&destroy = symbol(lib, "cuStreamDestroy_v2");

  /* Asking makes no context; allocating needs one, and leaves the thread without. */
  CHECK(cistern_device_count() == 1);
  CHECK(stats_of(0).reserved.all.current == 0);
  OK(cistern_trim(-1));
  unsigned char *p = cistern_malloc(MIB, 0, NULL);
  CHECK(p != NULL);
  no_context();
  memset(p, 7, MIB);
  CHECK(retain(&context, 0) == 0);
  /* A context that the thread has current stays current. */
  CHECK(push(context) == 0);
  unsigned char *q = cistern_malloc(40 * MIB, 0, (void *)2);
  CHECK(q != NULL);
  void *now;
  CHECK(get_current(&now) == 0 && now == context && pop(&now) == 0);
  OK(cistern_release(q));

  pthread_t t[4];
  for (uintptr_t i = 0; i < 4; i++)
    pthread_create(&t[i], NULL, work, (void *)(i + 1));
  for (int i = 0; i < 4; i++)
    pthread_join(t[i], NULL);
  for (size_t i = 0; i < MIB; i++)
    CHECK(p[i] == 7);

  /* Steady state on a lasting stream: no driver call but the events that other streams need, one for 32 MiB. */
  void *s = new_stream(), *brief = new_stream();
  OK(cistern_stream_durable(0, s));
  for (int round = 0; round < 3; round++) {
    long memory = calls("cuMem"), streams = calls("cuStreamGetId"), events = calls("cuEventRecord"), waits = calls("Synchronize");
    for (int i = 0; i < 1000; i++) {
      void *a = cistern_malloc(5000, 0, s), *b = cistern_malloc(MIB, 0, s);
      CHECK(a != NULL && b != NULL);
      OK(cistern_release_on(a, s));
      OK(cistern_release(b));
    }
    if (round == 2) {
      CHECK(calls("cuMem") == memory && calls("cuStreamGetId") == streams && calls("Synchronize") == waits);
      CHECK(calls("cuEventRecord") - events <= 1000 / 32 + 2);
    }
  }
  cistern_stats old = stats_of(0);
  for (int i = 0; i < 100; i++)
    OK(cistern_release(cistern_malloc(5000, 0, brief)));
  CHECK(stats_of(0).device_allocs - old.device_allocs <= 1);

  without_stream();
  captures((CUresult(*)(void *, int))symbol(lib, "cuStreamBeginCapture_v2"), (CUresult(*)(void *, void **))symbol(lib, "cuStreamEndCapture"));
  reuse(lib);

  /* Errors of the driver. */
  setenv("STANDIN_FAIL", "cuMemCreate=2,cuMemAlloc=2", 1);
  CHECK(cistern_malloc(900 * MIB, 0, s) == NULL);
  CHECK_WORDS(CISTERN_OUT_OF_MEMORY, "tried to allocate 900.00 MiB");
  setenv("STANDIN_FAIL", "cuMemCreate=999,cuMemAlloc=999", 1);
  void *none;
  FAILS(CISTERN_DRIVER, "cuMem", cistern_alloc(&none, 900 * MIB, 0, s, NULL));
  CHECK_WORDS(CISTERN_DRIVER, "CUDA_ERROR_UNKNOWN");
  setenv("STANDIN_FAIL", "", 1);
  CHECK((q = cistern_malloc(90 * MIB, 0, s)) != NULL);
  /* One that breaks the context: requests fail by its name, frees are bookkeeping. */
  setenv("STANDIN_FAIL", "cuMemCreate=700,cuMemAlloc=700", 1);
  FAILS(CISTERN_DRIVER, "CUDA_ERROR_ILLEGAL_ADDRESS", cistern_alloc(&none, 900 * MIB, 0, s, NULL));
  setenv("STANDIN_FAIL", "", 1);
  FAILS(CISTERN_DRIVER, "CUDA_ERROR_ILLEGAL_ADDRESS", cistern_alloc(&none, 5000, 0, s, NULL));
  OK(cistern_release(q));
  OK(cistern_release(p));
  CHECK(stats_of(0).allocations.all.current == 0);
  no_context();
  puts("ok");
  return 0;
}

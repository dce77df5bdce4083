/* Caching over the functions of a user's library (lab/torch/allocator.c), for all memory of the program. The first
 * argument is the library; what CISTERN_CONF names, or cistern_upstream_set with "functions" as the second. */
#include "check.h"

#include <dlfcn.h>
#include <pthread.h>

/* As in allocator.c. */
struct allocator {
  uint64_t allocs, frees, out, wrong, capacity, fail_after;
  int device;
  void *stream;
};
static struct allocator *user;

#define KIB ((size_t)1 << 10)
#define GIB ((size_t)1 << 30)

/* Over the simulated device any handle is a stream; else there is one, and no memory for GiB. */
static size_t large = GIB;
static void *on(uintptr_t n) { return large == GIB ? STREAM(n) : NULL; }

static void *(*bare_alloc)(ssize_t, int, void *);
static void (*bare_free)(void *, ssize_t, int, void *);

static void *with_ctx_alloc(void *ctx, size_t size, int device, void *stream) {
  CHECK(ctx == &user);
  return bare_alloc((ssize_t)size, device, stream);
}

static void with_ctx_free(void *ctx, void *p, size_t size, int device, void *stream) {
  CHECK(ctx == &user);
  bare_free(p, (ssize_t)size, device, stream);
}

static void agree(void) {
  cistern_stats s = stats_of(0);
  CHECK(s.reserved.all.current == (int64_t)user->out && user->wrong == 0);
}

/* Sizes of 60 and 70 units in turns: the calls of the user's function and what is reserved afterwards. */
static void turns(size_t unit, void *stream, uint64_t allocs, uint64_t frees, uint64_t reserved) {
  struct allocator before = *user;
  for (int turn = 0; turn < 5; turn++)
    for (int n = 60; n <= 70; n += 10) {
      void *p = cistern_malloc((ssize_t)(n * unit), 0, stream);
      CHECK(p != NULL);
      agree();
      cistern_free(p, (ssize_t)(n * unit), 0, stream);
      agree();
    }
  CHECK(user->allocs - before.allocs == allocs && user->frees - before.frees == frees);
  CHECK(user->out == reserved);
}

static void script(void *stream) {
  OK(cistern_trim(0));
  CHECK(user->out == 0);
  user->capacity = 80 * large;
  turns(KIB, stream, 1, 0, 2 * MIB);
  turns(MIB, stream, 2, 0, (2 + 60 + 70) * MIB);
  CHECK(user->stream == stream && user->device == 0);
  cistern_stats s = stats_of(0);
  /* 60 units fit. For 70 the function has no memory until all that is cached is back; then one segment serves both. */
  turns(large, stream, 3, 4, 70 * large);
  cistern_stats after = stats_of(0);
  CHECK(after.retries == s.retries + 1 && after.ooms == s.ooms);
  CHECK(after.reserved.all.peak >= (int64_t)(70 * large) && after.allocated.all.current == 0);
  /* More than there is. */
  uint64_t out = user->out;
  void *p;
  FAILS(CISTERN_OUT_OF_MEMORY, "of external memory", cistern_alloc(&p, 90 * large, 0, stream, NULL));
  CHECK(stats_of(0).ooms == s.ooms + 1 && user->out <= out);
  user->capacity = 0;
  OK(cistern_trim(0));
  CHECK(user->out == 0 && stats_of(0).reserved.all.current == 0 && user->allocs >= user->frees);
  agree();
}

/* Pools that name no memory have the functions' too; those that do, theirs. */
static void pools(void) {
  static const uint64_t plain[2] = {0, 5}, whole[2] = {0, 6}, other[2] = {0, 7};
  OK(cistern_pool_create(0, plain, NULL));
  cistern_pool_options o = {.size = sizeof o, .flags = CISTERN_POOL_NO_SPLIT};
  OK(cistern_pool_create(0, whole, &o));
  cistern_pool_options managed = {.size = sizeof managed, .upstream = "managed"};
  OK(cistern_pool_create(0, other, &managed));
  void *p, *q, *r;
  uint64_t allocs = user->allocs, out = user->out;
  OK(cistern_alloc(&p, 3 * MIB, 0, on(1), plain));
  CHECK(user->allocs == allocs + 1 && user->out == out + 20 * MIB);
  OK(cistern_alloc(&q, 3 * MIB, 0, on(1), whole));
  CHECK(user->allocs == allocs + 2 && user->out == out + 24 * MIB);
  OK(cistern_alloc(&r, 3 * MIB, 0, on(1), other));
  CHECK(user->allocs == allocs + 2);
  char *json = cistern_stats_json();
  CHECK(json != NULL && strstr(json, "\"upstream\":\"managed\"") != NULL && strstr(json, "\"pool\":[0,5],\"upstream\":\"external") != NULL &&
        strstr(json, "\"pool\":[0,0],\"upstream\":\"external") != NULL);
  cistern_string_free(json);
  OK(cistern_release(p));
  OK(cistern_release(q));
  OK(cistern_release(r));
  OK(cistern_pool_release(0, plain)); /* which gives its memory back at once */
  CHECK(user->out == out + 4 * MIB);
  OK(cistern_pool_release(0, whole));
  OK(cistern_pool_release(0, other));
  CHECK(user->out == out);
  OK(cistern_trim(0));
}

static void pauses(void) {
  void *p = cistern_malloc(4 * MIB, 0, on(1));
  CHECK(p != NULL);
  FAILS(CISTERN_UNSUPPORTED, "pool {0, 0} has memory of \"external\", which cannot go and leave its addresses", cistern_pause(0, NULL, NULL));
  cistern_free(p, 4 * MIB, 0, on(1));
  OK(cistern_trim(0));
}

/* The function fails at each call in turn: the request is met after all, as memory is cached, or is out of memory; nothing is lost. */
static void failures(void) {
  uint64_t reached = 0;
  for (uint64_t at = 1; reached == at - 1; at++) {
    void *live[30];
    size_t sizes[30];
    user->fail_after = at;
    uint64_t seed = 1; /* the same sequence each time */
    int64_t requested = 0;
    memset(live, 0, sizeof live);
    for (int step = 0; step < 400; step++) {
      if (step % 100 == 99)
        OK(cistern_trim(0));
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      int i = (int)(seed >> 33) % 30;
      if (live[i] != NULL) {
        cistern_free(live[i], (ssize_t)sizes[i], 0, on(1));
        requested -= (int64_t)sizes[i];
        live[i] = NULL;
        continue;
      }
      sizes[i] = (size_t)(seed >> 40) % (step % 3 == 0 ? 40 * MIB : 200 * KIB) + 1;
      if ((live[i] = cistern_malloc((ssize_t)sizes[i], 0, on(1 + i % 2))) != NULL)
        requested += (int64_t)sizes[i];
      else
        CHECK(cistern_last_error(NULL, 0) == CISTERN_OUT_OF_MEMORY);
      for (int k = 0; k < 30; k++)
        CHECK(k == i || live[k] == NULL || live[i] == NULL || (char *)live[k] + sizes[k] <= (char *)live[i] ||
              (char *)live[i] + sizes[i] <= (char *)live[k]);
      agree();
      CHECK(stats_of(0).requested.all.current == requested);
    }
    if (user->fail_after == 0)
      reached = at;
    user->fail_after = 0;
    for (int i = 0; i < 30; i++)
      if (live[i] != NULL)
        cistern_free(live[i], (ssize_t)sizes[i], 0, on(1 + i % 2));
    OK(cistern_trim(0));
    CHECK(user->out == 0 && user->wrong == 0);
  }
  CHECK(reached >= 8);
}

/* Several threads are in the functions at once. */
static void *busy(void *arg) {
  uintptr_t me = (uintptr_t)arg;
  for (int i = 0; i < 200; i++) {
    size_t size = (size_t)(1 + (i * 7 + (int)me) % 50) * 300 * KIB;
    void *p = cistern_malloc((ssize_t)size, 0, on(10 + me));
    CHECK(p != NULL);
    cistern_free(p, (ssize_t)size, 0, on(10 + me));
    if (i % 20 == (int)me)
      OK(cistern_trim(0));
  }
  return NULL;
}

static void threads(void) {
  pthread_t t[4];
  for (uintptr_t i = 0; i < 4; i++)
    CHECK(pthread_create(&t[i], NULL, busy, (void *)i) == 0);
  for (int i = 0; i < 4; i++)
    CHECK(pthread_join(t[i], NULL) == 0);
  OK(cistern_trim(0));
  CHECK(user->out == 0 && user->wrong == 0 && stats_of(0).reserved.all.current == 0);
}

int main(int argc, char **argv) {
  CHECK(argc > 1);
  void *handle = dlopen(argv[1], RTLD_NOW);
  CHECK(handle != NULL && (user = dlsym(handle, "allocator_state")) != NULL);
  bare_alloc = (void *(*)(ssize_t, int, void *))dlsym(handle, "my_alloc");
  bare_free = (void (*)(void *, ssize_t, int, void *))dlsym(handle, "my_free");
  if (argc > 3)
    large = (size_t)atoi(argv[3]) * MIB;
  if (argc > 2 && strcmp(argv[2], "functions") == 0) {
    FAILS(CISTERN_INVALID, "alloc is NULL", cistern_upstream_set(NULL, with_ctx_free, NULL));
    OK(cistern_upstream_set(with_ctx_alloc, with_ctx_free, &user));
    FAILS(CISTERN_INVALID, "upstream already", cistern_upstream_set(with_ctx_alloc, with_ctx_free, &user));
  } else
    FAILS(CISTERN_INVALID, "upstream already: external:library=", cistern_upstream_set(with_ctx_alloc, with_ctx_free, &user));
  script(on(1));
  script(NULL);
  pools();
  pauses();
  failures();
  threads();
  puts("ok");
  return 0;
}

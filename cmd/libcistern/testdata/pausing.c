/* Memory whose physical part goes and comes back while its addresses stay. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

static uint64_t driver_free(void) {
  uint64_t f, t;
  OK(cistern_mem_info(0, &f, &t));
  return f;
}

static cistern_pause_options options(uint32_t keep) {
  return (cistern_pause_options){.size = sizeof(cistern_pause_options), .keep = keep};
}

/* The whole device, kept in each way. */
static void everything(void) {
  cistern_pause_report r;
  static const uint32_t keeps[] = {CISTERN_KEEP_HOST, CISTERN_KEEP_DISK, CISTERN_KEEP_NONE};
  for (size_t i = 0; i < 3; i++) {
    uint64_t before = driver_free();
    void *p = cistern_malloc(100 * MIB, 0, NULL), *q = cistern_malloc(3000, 0, STREAM(1));
    CHECK(p != NULL && q != NULL);
    int64_t reserved = stats_of(0).reserved.all.current;
    cistern_pause_options o = options(keeps[i]);
    OK(cistern_pause(0, &o, &r));
    CHECK(r.blocks == 2 && r.bytes >= 100 * MIB + 3000 && r.physical >= 100 * MIB && r.shared == 0);
    CHECK((r.kept > 0) == (keeps[i] != CISTERN_KEEP_NONE));
    CHECK(driver_free() >= before);
    cistern_stats s = stats_of(0);
    CHECK(s.reserved.all.current == 0 && s.allocations.all.current == 2 && s.allocated.all.current >= (int64_t)(100 * MIB));
    CHECK(s.paused.current >= (int64_t)(100 * MIB));
    CHECK(s.reserved.all.current + s.paused.current == s.active_bytes.all.current + s.inactive_bytes.all.current);
    OK(cistern_pause(0, &o, &r)); /* again: nothing is left to do */
    CHECK(r.blocks == 0 && r.physical == 0);
    size_t size;
    CHECK(cistern_base(p, &size) == p && size == 100 * MIB);
    OK(cistern_resume(0, NULL, &r));
    CHECK(r.blocks == 2 && r.physical >= 100 * MIB);
    s = stats_of(0);
    CHECK(s.reserved.all.current >= (int64_t)(100 * MIB) && s.paused.current == 0 && reserved > 0);
    OK(cistern_resume(0, &o, &r));
    CHECK(r.blocks == 0 && r.physical == 0 && r.kept == 0);
    OK(cistern_release(p));
    OK(cistern_release(q));
    OK(cistern_trim(0));
    CHECK(stats_of(0).reserved.all.current == 0);
  }
}

/* What is paused can be freed, also where C takes frees back by itself; it is never handed out again as it is. */
static void freed(void) {
  for (int round = 0; round < 20; round++) {
    void *p[8];
    for (int i = 0; i < 8; i++)
      CHECK((p[i] = cistern_malloc(MIB, 0, NULL)) != NULL);
    OK(cistern_release(p[7])); /* a free block beside them, in a magazine */
    OK(cistern_pause(0, NULL, NULL));
    for (int i = 0; i < 4; i++)
      OK(cistern_release(p[i]));
    void *q[4];
    for (int i = 0; i < 4; i++) {
      CHECK((q[i] = cistern_malloc(MIB, 0, NULL)) != NULL);
      for (int k = 4; k < 7; k++)
        CHECK(q[i] != p[k]);
    }
    cistern_stats s = stats_of(0);
    CHECK(s.reserved.all.current >= (int64_t)(4 * MIB)); /* what was got has memory */
    CHECK(s.reserved.all.current + s.paused.current == s.active_bytes.all.current + s.inactive_bytes.all.current);
    OK(cistern_resume(0, NULL, NULL));
    for (int i = 4; i < 7; i++)
      OK(cistern_release(p[i]));
    for (int i = 0; i < 4; i++)
      OK(cistern_release(q[i]));
    CHECK(stats_of(0).allocations.all.current == 0 && stats_of(0).paused.current == 0);
  }
  OK(cistern_trim(0));
}

static void by_tag(void) {
  cistern_pause_report r;
  OK(cistern_tag_push("weights"));
  void *w = cistern_malloc(64 * MIB, 0, NULL);
  OK(cistern_tag_pop());
  void *a = cistern_malloc(64 * MIB, 0, NULL);
  CHECK(w != NULL && a != NULL);
  cistern_pause_options o = options(CISTERN_KEEP_HOST);
  o.tag = "no such tag";
  OK(cistern_pause(0, &o, &r));
  CHECK(r.blocks == 0 && r.bytes == 0);
  CHECK(stats_of(0).paused.current == 0);
  o.tag = "weights";
  OK(cistern_pause(0, &o, &r));
  CHECK(r.blocks == 1 && r.bytes == 64 * MIB && r.physical + r.shared >= 64 * MIB);
  OK(cistern_resume(0, &o, &r));
  CHECK(r.blocks == 1);
  OK(cistern_release(w));
  OK(cistern_release(a));
  OK(cistern_trim(0));
}

static void by_pool(void) {
  const uint64_t pool[2] = {6, 1}, none[2] = {6, 2};
  cistern_pause_report r;
  static const char *const upstreams[] = {NULL, "virtual", "host_numa"};
  for (size_t i = 0; i < 3; i++) {
    cistern_pool_options po = {.size = sizeof po, .upstream = upstreams[i]};
    OK(cistern_pool_create(0, pool, &po));
    void *p, *other = cistern_malloc(8 * MIB, 0, NULL);
    OK(cistern_alloc(&p, 32 * MIB, 0, NULL, pool));
    cistern_pause_options o = options(CISTERN_KEEP_HOST);
    o.pool = none;
    FAILS(CISTERN_INVALID, "no pool {6, 2}", cistern_pause(0, &o, &r));
    FAILS(CISTERN_INVALID, "no pool {6, 2}", cistern_resume(0, &o, &r));
    o.pool = pool;
    OK(cistern_pause(0, &o, &r));
    CHECK(r.blocks == 1 && r.bytes == 32 * MIB);
    cistern_pool_stats s = {.size = sizeof s};
    OK(cistern_pool_get_stats(0, pool, &s));
    CHECK(s.paused == 32 * MIB && s.allocated == 32 * MIB && s.reserved == 0 && s.blocks == 1);
    char *json = cistern_stats_json();
    CHECK(json != NULL && strstr(json, "\"paused\":33554432") != NULL);
    cistern_string_free(json);
    OK(cistern_release(other));
    OK(cistern_resume(0, &o, &r));
    CHECK(r.blocks == 1 && r.physical >= 32 * MIB);
    OK(cistern_release(p));
    OK(cistern_pool_release(0, pool));
    OK(cistern_trim(0));
    CHECK(stats_of(0).reserved.all.current == 0);
  }
}

/* What cannot be paused is named, and nothing is. */
static void refused(void) {
  const uint64_t pool[2] = {6, 3};
  cistern_pool_options po = {.size = sizeof po, .upstream = "pinned"};
  OK(cistern_pool_create(0, pool, &po));
  void *p, *q = cistern_malloc(32 * MIB, 0, NULL);
  OK(cistern_alloc(&p, 32 * MIB, 0, NULL, pool));
  int64_t reserved = stats_of(0).reserved.all.current;
  FAILS(CISTERN_UNSUPPORTED, "pinned", cistern_pause(0, NULL, NULL));
  CHECK(stats_of(0).reserved.all.current == reserved && stats_of(0).paused.current == 0);
  OK(cistern_release(p));
  OK(cistern_pool_release(0, pool));
  OK(cistern_trim(0));
  OK(cistern_pause(0, NULL, NULL));
  OK(cistern_release(q));
  OK(cistern_resume(0, NULL, NULL));

  /* A capture's memory, but with leave. */
  const uint64_t graph[2] = {6, 4};
  OK(cistern_pool_create(0, graph, NULL));
  OK(cistern_capture_begin(0, graph, STREAM(3)));
  CHECK((p = cistern_malloc(10 * MIB, 0, STREAM(3))) != NULL);
  OK(cistern_capture_end(0, STREAM(3)));
  cistern_pause_options o = options(CISTERN_KEEP_NONE);
  CHECK(cistern_pause(0, &o, NULL) == CISTERN_UNSUPPORTED);
  CHECK_WORDS(CISTERN_UNSUPPORTED, "captured");
  o.flags = CISTERN_PAUSE_CAPTURED;
  OK(cistern_pause(0, &o, NULL));
  CHECK(stats_of(0).reserved.all.current == 0);
  OK(cistern_resume(0, NULL, NULL));
  OK(cistern_release(p));
  OK(cistern_pool_release(0, graph));
  OK(cistern_trim(0));
}

/* A resume that finds no memory leaves all as it was, and says what it lacks. */
static void no_memory(void) {
  void *p = cistern_malloc(256 * MIB, 0, NULL);
  CHECK(p != NULL);
  cistern_pause_options o = options(CISTERN_KEEP_NONE);
  OK(cistern_pause(0, &o, NULL));
  OK(cistern_set_limit(0, 300 * MIB));
  void *q = cistern_malloc(200 * MIB, 0, STREAM(2));
  CHECK(q != NULL);
  FAILS(CISTERN_OUT_OF_MEMORY, "", cistern_resume(0, NULL, NULL));
  cistern_oom oom;
  OK(cistern_last_oom(&oom));
  CHECK(oom.limit == 300 * MIB);
  CHECK(stats_of(0).paused.current >= (int64_t)(256 * MIB));
  OK(cistern_release(q));
  OK(cistern_resume(0, NULL, NULL)); /* what is cached makes room */
  CHECK(stats_of(0).paused.current == 0);
  OK(cistern_set_limit(0, 0));
  OK(cistern_release(p));
  OK(cistern_trim(0));
}

static void bad(void) {
  cistern_pause_options o = options(3);
  FAILS(CISTERN_INVALID, "options.keep", cistern_pause(0, &o, NULL));
  o = options(0);
  o.flags = 2;
  FAILS(CISTERN_INVALID, "options.flags", cistern_pause(0, &o, NULL));
  o = options(0);
  o.size = 8;
  FAILS(CISTERN_INVALID, "too small", cistern_pause(0, &o, NULL));
  FAILS(CISTERN_INVALID, "too small", cistern_resume(0, &o, NULL));
  o.size = sizeof o + 8;
  FAILS(CISTERN_INVALID, "newer", cistern_pause(0, &o, NULL));
  void *p = cistern_malloc(MIB, 0, NULL);
  CHECK(p != NULL);
  o = options(CISTERN_KEEP_DISK);
  o.dir = "/no/such/folder";
  FAILS(CISTERN_INVALID, "/no/such/folder", cistern_pause(0, &o, NULL));
  CHECK(stats_of(0).paused.current == 0);
  OK(cistern_release(p));
  OK(cistern_pause(1, NULL, NULL)); /* of an unused device: nothing */
  OK(cistern_resume(1, NULL, NULL));
  OK(cistern_pause_buffers(0, 64 * MIB));
  OK(cistern_pause_buffers(0, 0));
}

/* Threads that allocate and free while another pauses and resumes: what they get has memory, and the books are right. */
static atomic_int stop;

static void *churn(void *arg) {
  void *held[16] = {0};
  for (unsigned i = (unsigned)(uintptr_t)arg; !stop; i = i * 1103515245 + 12345) {
    void **h = &held[i >> 8 & 15];
    if (*h != NULL)
      OK(cistern_release(*h));
    CHECK((*h = cistern_malloc((ssize_t)((1 + (i >> 16 & 3)) << 18), 0, NULL)) != NULL);
  }
  for (int i = 0; i < 16; i++)
    OK(cistern_release(held[i]));
  return NULL;
}

static void while_busy(int rounds) {
  pthread_t t[3];
  for (uintptr_t i = 0; i < 3; i++)
    pthread_create(&t[i], NULL, churn, (void *)(i + 1));
  cistern_pause_options o = options(CISTERN_KEEP_NONE);
  for (int i = 0; i < rounds; i++) {
    OK(cistern_pause(0, &o, NULL));
    OK(cistern_resume(0, &o, NULL));
  }
  stop = 1;
  for (int i = 0; i < 3; i++)
    pthread_join(t[i], NULL);
  cistern_stats s = stats_of(0);
  CHECK(s.allocations.all.current == 0 && s.paused.current == 0);
  CHECK(s.reserved.all.current == s.active_bytes.all.current + s.inactive_bytes.all.current);
  OK(cistern_trim(0));
  CHECK(stats_of(0).reserved.all.current == 0);
}

int main(int argc, char **argv) {
  bad();
  everything();
  freed();
  by_tag();
  by_pool();
  refused();
  no_memory();
  while_busy(argc > 1 ? atoi(argv[1]) : 200);
  puts("ok");
  return 0;
}

/* Labels of requests, and requests for memory that the GPU is done with. */
#include "check.h"

static cistern_alloc_options with(uint32_t library, uint32_t flags) {
  return (cistern_alloc_options){.size = sizeof(cistern_alloc_options), .library = library, .flags = flags};
}

/* What the live allocations of a library add up to, all 0 where it has none. */
static cistern_library_use use_of(int device, const char *name) {
  cistern_library_use use[256];
  size_t n;
  OK(cistern_library_usage(device, use, 256, &n));
  CHECK(n <= 256);
  for (size_t i = 1; i < n; i++)
    CHECK(use[i - 1].allocated >= use[i].allocated);
  for (size_t i = 0; i < n; i++)
    if (strcmp(cistern_library_name(use[i].library), name) == 0)
      return use[i];
  return (cistern_library_use){0};
}

static void holds(int device, const char *name, int64_t blocks, uint64_t requested, uint64_t allocated) {
  cistern_library_use u = use_of(device, name);
  CHECK(u.blocks == blocks && u.requested == requested && u.allocated == allocated);
}

static void names(void) {
  size_t n = 5;
  OK(cistern_library_usage(1, NULL, 0, &n)); /* an unused device */
  CHECK(n == 0);
  uint32_t cupy = cistern_library("cupy"), numba = cistern_library("numba");
  CHECK(cupy >= 1 && cupy <= 255 && numba >= 1 && numba <= 255 && cupy != numba);
  CHECK(cistern_library("cupy") == cupy);
  CHECK(strcmp(cistern_library_name(cupy), "cupy") == 0);
  CHECK(strcmp(cistern_library_name(0), "c") == 0);
  CHECK(cistern_library_name(200) == NULL);
  CHECK_WORDS(CISTERN_INVALID, "no library 200");
  CHECK(cistern_library_name(UINT32_MAX) == NULL);
  static const char *const bad[] = {"", "a\nb", "\x80", "tab\t",
                                    "a name of more than sixty-four bytes is longer than any row of a table"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK(cistern_library(bad[i]) == 0);
    CHECK_WORDS(CISTERN_INVALID, "library");
    FAILS(CISTERN_INVALID, "library", cistern_library_default(bad[i]));
  }
}

static void counted(void) {
  uint32_t cupy = cistern_library("cupy"), numba = cistern_library("numba");
  void *a, *b, *c, *d, *e;
  cistern_alloc_options o = with(cupy, 0);
  OK(cistern_alloc_with(&a, 800, 0, NULL, &o));
  holds(0, "cupy", 1, 800, 1024);
  OK(cistern_alloc_with(&b, 3 * MIB, 0, STREAM(1), &o));
  holds(0, "cupy", 2, 3 * MIB + 800, 3 * MIB + 1024);
  o = with(numba, 0);
  OK(cistern_alloc_with(&c, MIB, 0, STREAM(1), &o));
  CHECK((d = cistern_malloc(400, 0, NULL)) != NULL);
  OK(cistern_alloc_with(&e, 100, 0, NULL, NULL));
  holds(0, "numba", 1, MIB, MIB);
  holds(0, "c", 2, 500, 1024);
  size_t n;
  cistern_library_use use[3];
  memset(use, 0xee, sizeof use);
  OK(cistern_library_usage(0, use, 2, &n));
  CHECK(n == 3 && use[0].library == cupy && use[1].library == numba && use[2].library == 0xeeeeeeee && use[0].reserved == 0);
  cistern_stats s = stats_of(0);
  CHECK(s.allocations.all.current == 5 && s.requested.all.current == (int64_t)(4 * MIB + 800 + 500));

  /* Callers that name no library get another default; a caller that names the same one counts with them. */
  OK(cistern_library_default("torch"));
  CHECK(strcmp(cistern_library_name(0), "torch") == 0);
  holds(0, "torch", 2, 500, 1024);
  holds(0, "c", 0, 0, 0);
  o = with(cistern_library("torch"), 0);
  OK(cistern_release(e));
  OK(cistern_alloc_with(&e, 600, 0, NULL, &o));
  holds(0, "torch", 2, 1000, 1536);
  OK(cistern_library_default("c"));
  holds(0, "torch", 1, 600, 1024);
  holds(0, "c", 1, 400, 512);

  /* The error of a failed request names the top allocations. */
  OK(cistern_set_limit(0, 8 * MIB));
  void *none;
  FAILS(CISTERN_OUT_OF_MEMORY, "by library 3.00 MiB cupy, 1.00 MiB numba, 1.00 KiB torch, ", cistern_alloc(&none, 1024 * MIB, 0, NULL, NULL));
  OK(cistern_set_limit(0, 0));

  /* What one library gives back another is given. */
  OK(cistern_release(b));
  int64_t got = stats_of(0).device_allocs;
  o = with(numba, 0);
  OK(cistern_alloc_with(&b, 3 * MIB, 0, STREAM(1), &o));
  CHECK(stats_of(0).device_allocs == got);
  holds(0, "cupy", 1, 800, 1024);
  holds(0, "numba", 2, 4 * MIB, 4 * MIB);

  /* With a tag, and from a pool. */
  const uint64_t pool[2] = {9, 9};
  OK(cistern_pool_create(0, pool, NULL));
  OK(cistern_tag_push("step"));
  o = with(cupy, 0);
  o.pool[0] = o.pool[1] = 9;
  void *f;
  OK(cistern_alloc_with(&f, 2 * MIB, 0, STREAM(2), &o));
  OK(cistern_tag_pop());
  cistern_block x;
  OK(cistern_find(f, &x));
  CHECK(x.pool[0] == 9 && x.pool[1] == 9 && strcmp(cistern_tag_name(x.tag), "step") == 0);
  CHECK(x.library == cupy);
  holds(0, "cupy", 2, 2 * MIB + 800, 2 * MIB + 1024);
  OK(cistern_find(d, &x));
  CHECK(x.library == 0);
  char *json = cistern_stats_json();
  CHECK(json != NULL && strstr(json, "\"libraries\":[{\"library\":\"numba\",\"blocks\":2,") != NULL);
  cistern_string_free(json);
  void *all[] = {a, b, c, d, e, f};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    OK(cistern_release(all[i]));
  OK(cistern_pool_release(0, pool));
  OK(cistern_library_usage(0, NULL, 0, &n));
  CHECK(n == 0);
}

/* A request as one pointer. */
static void sources(void) {
  cistern_source s = {STREAM(5), with(cistern_library("cupy"), 0)};
  void *p = cistern_source_malloc(&s, 5000, 0);
  CHECK(p != NULL);
  holds(0, "cupy", 1, 5000, 5120);
  cistern_block x;
  OK(cistern_find(p, &x));
  CHECK(x.stream == STREAM(5));
  cistern_source_free(NULL, p, 7);
  holds(0, "cupy", 0, 0, 0);
  CHECK(cistern_source_malloc(&s, 5000, 0) == p); /* in its stream's order */
  cistern_source_free(&s, p, 0);
  CHECK(cistern_source_malloc(&s, 0, 0) == NULL);
  cistern_source_free(&s, NULL, 0);
  CHECK(cistern_source_malloc(&s, (size_t)1 << 50, 0) == NULL);
  CHECK_WORDS(CISTERN_OUT_OF_MEMORY, "tried to allocate");
  s.options.size = 4;
  CHECK(cistern_source_malloc(&s, 512, 0) == NULL);
  CHECK_WORDS(CISTERN_INVALID, "too small");
  CHECK(cistern_source_malloc(NULL, 512, 0) == NULL);
  CHECK_WORDS(CISTERN_INVALID, "source is NULL");
}

/* What is cached, or nothing. */
static void cached(void) {
  cistern_alloc_options o = with(cistern_library("cupy"), CISTERN_ALLOC_CACHED), both = with(0, 3);
  void *p, *q;
  CHECK(cistern_alloc_with(&p, 512, 1, NULL, &o) == CISTERN_OUT_OF_MEMORY && p == NULL); /* the device is not in use, and stays so */
  cistern_stats s = stats_of(0);
  CHECK(cistern_alloc_with(&p, 9 * MIB, 0, STREAM(7), &o) == CISTERN_OUT_OF_MEMORY && p == NULL);
  cistern_stats t = stats_of(0);
  CHECK(memcmp(&s, &t, sizeof s) == 0); /* nothing has happened */
  CHECK((q = cistern_malloc(9 * MIB, 0, STREAM(7))) != NULL);
  CHECK(cistern_alloc_with(&p, 9 * MIB, 0, STREAM(7), &o) == CISTERN_OUT_OF_MEMORY);
  OK(cistern_release(q));
  OK(cistern_alloc_with(&p, 9 * MIB, 0, STREAM(7), &o));
  CHECK(p == q);
  holds(0, "cupy", 1, 9 * MIB, 9 * MIB);
  CHECK(cistern_alloc_with(&q, 9 * MIB, 0, STREAM(8), &o) == CISTERN_OUT_OF_MEMORY); /* another stream's order */
  OK(cistern_alloc_with(&q, 0, 0, STREAM(7), &o));
  CHECK(q == NULL);
  OK(cistern_release(p));
  FAILS(CISTERN_INVALID, "host-ordered", cistern_alloc_with(&p, 512, 0, NULL, &both));
}

static void bad_options(void) {
  void *p;
  cistern_alloc_options o = with(0, 0);
  o.size = 4;
  FAILS(CISTERN_INVALID, "too small", cistern_alloc_with(&p, 512, 0, NULL, &o));
  o.size = sizeof o + 8;
  FAILS(CISTERN_INVALID, "newer cistern.h", cistern_alloc_with(&p, 512, 0, NULL, &o));
  o.size = sizeof o - 4;
  FAILS(CISTERN_INVALID, "within a field", cistern_alloc_with(&p, 512, 0, NULL, &o));
  o = with(201, 0);
  FAILS(CISTERN_INVALID, "no library 201", cistern_alloc_with(&p, 512, 0, NULL, &o));
  o = with(256 + cistern_library("cupy"), 0);
  FAILS(CISTERN_INVALID, "no library", cistern_alloc_with(&p, 512, 0, NULL, &o));
  o = with(0, 1u << 31);
  FAILS(CISTERN_INVALID, "options.flags", cistern_alloc_with(&p, 512, 0, NULL, &o));
  o = with(0, 0);
  o.reserved = 1;
  FAILS(CISTERN_INVALID, "options.reserved", cistern_alloc_with(&p, 512, 0, NULL, &o));
  o.reserved = 0;
  o.pool[0] = 77;
  FAILS(CISTERN_INVALID, "no pool {77, 0}", cistern_alloc_with(&p, 512, 0, NULL, &o));
  o = with(0, CISTERN_ALLOC_HOST_ORDER);
  OK(cistern_alloc_with(&p, 0, 0, NULL, &o));
  CHECK(p == NULL);
  FAILS(CISTERN_OUT_OF_MEMORY, "", cistern_alloc_with(&p, SIZE_MAX, 0, NULL, &o));
}

/* Memory that another stream still works on is waited for, or left alone. */
static void host_order(void) {
  OK(cistern_trim(0));
  OK(cistern_set_limit(0, 64 * MIB));
  cistern_alloc_options o = with(cistern_library("numba"), CISTERN_ALLOC_HOST_ORDER);
  void *p, *q;
  for (int i = 0; i < 5; i++) {
    CHECK((p = cistern_malloc(64 * MIB, 0, STREAM(1))) != NULL);
    OK(cistern_release(p));
    OK(cistern_alloc_with(&q, 64 * MIB, 0, i % 2 ? STREAM(1) : NULL, &o)); /* all that may be held */
    holds(0, "numba", 1, 64 * MIB, 64 * MIB);
    OK(cistern_release(q));
  }
  OK(cistern_set_limit(0, 0));
  CHECK(stats_of(0).allocations.all.current == 0);
}

static void all_names(void) {
  char name[32];
  uint32_t last = 0;
  for (int i = 0; i < 300; i++) {
    snprintf(name, sizeof name, "library %d", i);
    uint32_t n = cistern_library(name);
    if (n == 0)
      break;
    CHECK(n <= 255);
    last = n;
  }
  CHECK(last == 255);
  CHECK_WORDS(CISTERN_INVALID, "names are in use");
  cistern_alloc_options o = with(last, 0);
  void *p;
  OK(cistern_alloc_with(&p, MIB, 0, NULL, &o));
  CHECK(use_of(0, cistern_library_name(last)).requested == MIB);
  OK(cistern_release(p));
  CHECK(cistern_library("cupy") != 0); /* those that there are stay */
}

int main(void) {
  names();
  counted();
  sources();
  cached();
  bad_options();
  host_order();
  all_names();
  puts("ok");
  return 0;
}

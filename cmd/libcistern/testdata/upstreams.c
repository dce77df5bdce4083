/* Pools of special memory: what they are made of by name, what they may hold, and the function that is asked when they are out of it. */
#include "check.h"

static const uint64_t pool[2] = {3, 1};

static cistern_pool_stats pool_stats(const uint64_t id[2]) {
  cistern_pool_stats s = {.size = sizeof s};
  OK(cistern_pool_get_stats(0, id, &s));
  return s;
}

static void *from(const uint64_t id[2], size_t size) {
  void *p;
  OK(cistern_alloc(&p, size, 0, STREAM(1), id));
  return p;
}

/* Every upstream, and that host memory is host memory. */
static void kinds(void) {
  static const struct {
    const char *words;
    int host;
  } list[] = {{"device", 0}, {"virtual", 0}, {"async", 0}, {"managed", 1}, {"pinned", 1}, {"host_numa", 0}, {"nccl", 0},
              {"async:threshold=64MiB,initial=32MiB", 0}, {"managed:prefetch=true", 1}, {"statistics|pinned", 1},
              {"limiting:bytes=1GiB|alignment:bytes=4KiB|device", 0}, {"tracking|host_numa:node=0", 0}};
  for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
    OK(cistern_upstream_check(0, list[i].words));
    cistern_pool_options o = {.size = sizeof o, .upstream = list[i].words};
    OK(cistern_pool_create(0, pool, &o));
    char *p = from(pool, 5 * MIB), *q = from(pool, 700);
    cistern_pool_stats s = pool_stats(pool);
    CHECK(s.blocks == 2 && s.requested == 5 * MIB + 700 && s.allocated == 5 * MIB + 1024 && s.reserved >= s.allocated);
    CHECK(s.reserved == s.allocated + s.cached && s.peak_reserved == s.reserved && s.limit == 0 && s.paused == 0 && s.spilled == 0);
    CHECK(stats_of(0).reserved.all.current == (int64_t)s.reserved);
    if (list[i].host) {
      memset(p, 0x5a, 5 * MIB);
      memcpy(q, "a word", 7);
      CHECK(p[5 * MIB - 1] == 0x5a && strcmp(q, "a word") == 0);
    }
    char *json = cistern_stats_json(), want[200];
    snprintf(want, sizeof want, "{\"pool\":[3,1],\"upstream\":\"%s\",\"reserved\":%llu,", list[i].words, (unsigned long long)s.reserved);
    CHECK(json != NULL && strstr(json, want) != NULL);
    cistern_string_free(json);
    OK(cistern_release(p));
    p = from(pool, 5 * MIB); /* cached */
    CHECK(pool_stats(pool).reserved == s.reserved);
    OK(cistern_pool_release(0, pool));
    OK(cistern_release(q)); /* outlives the pool's name */
    OK(cistern_release(p));
    OK(cistern_trim(0));
    CHECK(stats_of(0).reserved.all.current == 0);
  }
}

static void wrong(void) {
  static const char *const words[] = {"", "teapot", "async:colour=red", "async:threshold=lots", "managed|device", "limiting|",
                                      "statistics", "host_numa:node=99", "|device", "device:x"};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    cistern_pool_options o = {.size = sizeof o, .upstream = words[i]};
    CHECK(cistern_upstream_check(0, words[i]) != CISTERN_OK);
    CHECK(cistern_pool_create(0, pool, &o) != CISTERN_OK);
    char text[1000];
    cistern_last_error(text, sizeof text);
    CHECK(strstr(text, "options.upstream: ") == text && strchr(text, '\n') == NULL);
    o.upstream = NULL;
    o.spill = words[i];
    CHECK(cistern_pool_create(0, pool, &o) != CISTERN_OK);
    cistern_last_error(text, sizeof text);
    CHECK(strstr(text, "options.spill: ") == text && strchr(text, '\n') == NULL);
  }
  FAILS(CISTERN_INVALID, "teapot", cistern_upstream_check(0, "teapot"));
  FAILS(CISTERN_INVALID, "managed", cistern_upstream_check(0, "teapot")); /* the choices */
  cistern_pool_options o = {.size = sizeof o, .upstream = "pinned", .flags = CISTERN_POOL_IPC_LEGACY};
  FAILS(CISTERN_INVALID, "choose", cistern_pool_create(0, pool, &o));
  o.flags = 0;
  o.alloc = (void *(*)(void *, size_t, int, void *))(uintptr_t)8;
  o.free = (void (*)(void *, void *, size_t, int, void *))(uintptr_t)8;
  FAILS(CISTERN_INVALID, "one of them", cistern_pool_create(0, pool, &o));
  FAILS(CISTERN_INVALID, "no pool", cistern_pool_set_limit(0, pool, 1));
  cistern_pool_stats s = {.size = sizeof s};
  FAILS(CISTERN_INVALID, "no pool", cistern_pool_get_stats(0, pool, &s));
  CHECK(stats_of(0).reserved.all.current == 0);
}

/* A program that was compiled when the options ended with ctx. */
static void older(void) {
  struct {
    cistern_pool_options o;
  } x;
  memset(&x, 0xee, sizeof x);
  x.o.size = offsetof(cistern_pool_options, upstream);
  x.o.flags = CISTERN_POOL_NO_SPLIT;
  x.o.alloc = NULL;
  x.o.free = NULL;
  OK(cistern_pool_create(0, pool, &x.o));
  OK(cistern_release(from(pool, MIB)));
  CHECK(pool_stats(pool).limit == 0);
  OK(cistern_pool_release(0, pool));
  /* One whose statistics end earlier, and one whose end later. */
  OK(cistern_pool_create(0, pool, NULL));
  void *p = from(pool, MIB);
  struct {
    cistern_pool_stats s;
    uint64_t more[4];
  } y;
  memset(&y, 0xee, sizeof y);
  y.s.size = offsetof(cistern_pool_stats, cached);
  OK(cistern_pool_get_stats(0, pool, &y.s));
  CHECK(y.s.allocated == MIB && y.s.cached == 0xeeeeeeeeeeeeeeee);
  y.s.size = sizeof y;
  OK(cistern_pool_get_stats(0, pool, &y.s));
  CHECK(y.s.blocks == 1 && y.more[0] == 0 && y.more[3] == 0);
  y.s.size = 4;
  FAILS(CISTERN_INVALID, "sizeof", cistern_pool_get_stats(0, pool, &y.s));
  OK(cistern_release(p));
  OK(cistern_pool_release(0, pool));
  OK(cistern_trim(0));
}

static int asked;
static void *hoard;
static uint64_t missed;

static int help(void *ctx, int device, uint64_t missing) {
  CHECK(ctx == &asked && device == 0);
  CHECK(pool_stats(pool).limit == 64 * MIB); /* no lock is held */
  asked++;
  missed = missing;
  if (hoard == NULL)
    return 0;
  OK(cistern_release(hoard));
  hoard = NULL;
  return 1;
}

static int later;
static int device_help(void *ctx, int device, uint64_t missing) {
  (void)ctx, (void)device, (void)missing;
  CHECK(asked > 0); /* the pool's own comes first */
  later++;
  return 0;
}

static void limits(void) {
  cistern_pool_options o = {.size = sizeof o, .limit = 64 * MIB, .on_out_of_memory = help, .on_out_of_memory_ctx = &asked};
  OK(cistern_pool_create(0, pool, &o));
  OK(cistern_on_out_of_memory(0, device_help, NULL));
  void *p = from(pool, 40 * MIB), *q;
  FAILS(CISTERN_OUT_OF_MEMORY, "64.00 MiB", cistern_alloc(&q, 40 * MIB, 0, STREAM(1), pool));
  CHECK(asked == 1 && missed == 40 * MIB && later == 0); /* others cannot help: the limit is the pool's */
  OK(cistern_set_limit(0, 48 * MIB));
  FAILS(CISTERN_OUT_OF_MEMORY, "48.00 MiB", cistern_alloc(&q, 20 * MIB, 0, STREAM(1), pool));
  CHECK(asked == 2 && missed == 20 * MIB && later == 1);
  OK(cistern_set_limit(0, 0));
  CHECK((q = cistern_malloc(200 * MIB, 0, STREAM(1))) != NULL); /* others are not limited by it */
  OK(cistern_release(q));
  hoard = p;
  q = from(pool, 40 * MIB);
  CHECK(asked == 3 && hoard == NULL);
  FAILS(CISTERN_OUT_OF_MEMORY, "64.00 MiB", cistern_alloc(&p, 30 * MIB, 0, STREAM(1), pool));
  OK(cistern_pool_set_limit(0, pool, 96 * MIB));
  CHECK(pool_stats(pool).limit == 96 * MIB);
  p = from(pool, 30 * MIB);
  OK(cistern_release(p));
  OK(cistern_release(q));
  OK(cistern_pool_set_limit(0, pool, 0));
  OK(cistern_release(from(pool, 300 * MIB)));
  OK(cistern_pool_release(0, pool));
  OK(cistern_off_out_of_memory(0, device_help, NULL));
  OK(cistern_trim(0));
}

/* Beyond the limit the memory comes from elsewhere. */
static void spills(void) {
  cistern_pool_options o = {.size = sizeof o, .limit = 64 * MIB, .spill = "pinned"};
  OK(cistern_pool_create(0, pool, &o));
  void *p = from(pool, 60 * MIB);
  CHECK(pool_stats(pool).spilled == 0);
  char *q = from(pool, 40 * MIB);
  memset(q, 1, 40 * MIB); /* host memory */
  cistern_pool_stats s = pool_stats(pool);
  CHECK(s.spilled == 40 * MIB && s.allocated == 100 * MIB && s.blocks == 2);
  cistern_block b;
  OK(cistern_find(q, &b));
  CHECK(b.pool[0] == pool[0] && b.pool[1] == pool[1] && b.size == 40 * MIB);
  CHECK(stats_of(0).by_spill == 1);
  OK(cistern_release(p));
  OK(cistern_release(q));
  CHECK(pool_stats(pool).spilled == 0 && pool_stats(pool).allocated == 0);
  OK(cistern_pool_release(0, pool));
  OK(cistern_trim(0));
  CHECK(stats_of(0).reserved.all.current == 0);
}

/* What happens to a pool's upstream can be read. */
static void logged(void) {
  char name[] = "/tmp/cistern-upstreams-XXXXXX", words[200], text[4096];
  int fd = mkstemp(name);
  CHECK(fd >= 0);
  snprintf(words, sizeof words, "logging:file=%s|pinned", name);
  cistern_pool_options o = {.size = sizeof o, .upstream = words};
  OK(cistern_pool_create(0, pool, &o));
  OK(cistern_release(from(pool, 3 * MIB)));
  OK(cistern_pool_release(0, pool));
  OK(cistern_trim(0));
  ssize_t n = read(fd, text, sizeof text - 1);
  CHECK(n > 0);
  text[n] = 0;
  CHECK(strstr(text, "Thread,Time,Action,Pointer,Size,Stream") == text && strstr(text, ",allocate,") && strstr(text, ",free,"));
  close(fd);
  unlink(name);
}

int main(void) {
  wrong();
  kinds();
  older();
  limits();
  spills();
  logged();
  puts("ok");
  return 0;
}

/* Functions of the program that the library calls: for memory when there is none left, for a pool's segments, and to tell what is mapped. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

static void *hoard[64];
static int hoarded, calls, device_seen;
static uint64_t missing_seen;
static void *elsewhere;

static int give_back(void *ctx, int device, uint64_t missing) {
  CHECK(ctx == (void *)7); /* whatever the program likes */
  calls++;
  device_seen = device;
  missing_seen = missing;
  if (hoarded == 0)
    return 0;
  OK(cistern_release(hoard[--hoarded]));
  /* It may allocate from another device, ask for statistics, and fail at something. */
  CHECK((elsewhere = cistern_malloc(MIB, 1, NULL)) != NULL);
  OK(cistern_release(elsewhere));
  CHECK(stats_of(device).allocations.all.current > 0);
  CHECK(cistern_release((void *)512) == CISTERN_INVALID);
  return 1;
}

static int greedy, greed;
static int second;
static int no_help(void *ctx, int device, uint64_t missing) {
  (void)ctx;
  second++;
  if (greedy) { /* against the rules: it fails, and that is all */
    CHECK(cistern_malloc((ssize_t)missing, device, NULL) == NULL);
    CHECK_WORDS(CISTERN_OUT_OF_MEMORY, "tried");
    greed++;
  }
  return 0;
}

/* A pool whose segments come from the program: a piece of addresses of its own. */
static uintptr_t next = (uintptr_t)1 << 44;
static int segments, given, refuse, crooked;

static void *segment_alloc(void *ctx, size_t size, int device, void *stream) {
  CHECK(ctx == &segments && device == 0 && stream == STREAM(1) && size >= MIB);
  /* No lock is held: the library may be used. */
  void *p = cistern_malloc(4096, 0, NULL);
  CHECK(p != NULL);
  OK(cistern_release(p));
  cistern_snapshot *s;
  OK(cistern_snapshot_take(0, NULL, &s));
  cistern_snapshot_free(s);
  if (refuse) {
    CHECK(cistern_release((void *)512) == CISTERN_INVALID); /* its own failures do not show */
    return NULL;
  }
  segments++;
  void *at = (void *)(next + crooked);
  next += size;
  return at;
}

static void segment_free(void *ctx, void *ptr, size_t size, int device, void *stream) {
  CHECK(ctx == &segments && ptr != NULL && device == 0 && stream == STREAM(1) && size >= MIB);
  CHECK(stats_of(0).ooms >= 0);
  given++;
}

static void pools(void) {
  const uint64_t mine[2] = {5, 5}, whole[2] = {5, 6}, legacy[2] = {5, 7}, single[2] = {5, 8};
  cistern_pool_options o = {.size = sizeof o, .alloc = segment_alloc, .free = segment_free, .ctx = &segments};
  OK(cistern_pool_create(0, mine, &o));
  void *p, *q;
  OK(cistern_alloc(&p, 3 * MIB, 0, STREAM(1), mine));
  CHECK((uintptr_t)p >= (uintptr_t)1 << 44 && segments == 1);
  OK(cistern_release(p));
  OK(cistern_alloc(&q, 3 * MIB, 0, STREAM(1), mine));
  CHECK(q == p && segments == 1); /* cached */
  cistern_snapshot *s;
  OK(cistern_snapshot_take(0, mine, &s));
  CHECK(s->num_segments == 1 && s->segments[0].expandable == 0 && s->segments[0].addr == (uintptr_t)p);
  cistern_snapshot_free(s);
  refuse = 1;
  FAILS(CISTERN_OUT_OF_MEMORY, "out of memory", cistern_alloc(&p, 100 * MIB, 0, STREAM(1), mine));
  refuse = 0;
  crooked = 8;
  FAILS(CISTERN_INVALID, "alignment of 512 bytes", cistern_alloc(&p, 100 * MIB, 0, STREAM(1), mine));
  CHECK(given == 1);
  crooked = 0;
  OK(cistern_release(q));
  OK(cistern_pool_trim(0, mine));
  CHECK(given == 2);
  OK(cistern_alloc(&q, 3 * MIB, 0, STREAM(1), mine));
  OK(cistern_release(q));
  OK(cistern_pool_release(0, mine));
  OK(cistern_trim(0));
  CHECK(given == segments);

  o = (cistern_pool_options){.size = sizeof o, .flags = CISTERN_POOL_NO_SPLIT};
  OK(cistern_pool_create(0, whole, &o));
  OK(cistern_alloc(&p, 3 * MIB, 0, STREAM(1), whole));
  OK(cistern_alloc(&q, 3 * MIB, 0, STREAM(1), whole));
  OK(cistern_snapshot_take(0, whole, &s));
  CHECK(s->num_segments == 2 && s->num_blocks == 2);
  cistern_snapshot_free(s);
  OK(cistern_release(p));
  OK(cistern_release(q));
  o.flags = CISTERN_POOL_IPC_LEGACY | CISTERN_POOL_SINGLE_HANDLE;
  FAILS(CISTERN_INVALID, "choose", cistern_pool_create(0, legacy, &o));
  o.flags = CISTERN_POOL_IPC_LEGACY;
  OK(cistern_pool_create(0, legacy, &o));
  o.flags = CISTERN_POOL_SINGLE_HANDLE;
  OK(cistern_pool_create(0, single, &o));
  OK(cistern_alloc(&p, 3 * MIB, 0, STREAM(1), legacy));
  OK(cistern_alloc(&q, 3 * MIB, 0, STREAM(1), single));
  OK(cistern_snapshot_take(0, single, &s));
  CHECK(s->num_segments == 1 && s->segments[0].expandable == 0);
  cistern_snapshot_free(s);
  OK(cistern_release(p));
  OK(cistern_release(q));
  OK(cistern_pool_release(0, whole));
  OK(cistern_pool_release(0, legacy));
  OK(cistern_pool_release(0, single));
  OK(cistern_trim(0));
  CHECK(stats_of(0).reserved.all.current == 0);
}

/* Code that registers memory elsewhere keeps a list of what is mapped; nothing is handed out that is not on it. */
static struct range {
  uintptr_t addr;
  size_t size;
} mapped[4096];
static size_t num_mapped, unmaps;

static void on_map(void *ctx, int device, void *addr, size_t size) {
  CHECK(ctx == mapped && device == 0 && num_mapped < 4096);
  CHECK(stats_of(0).reserved.all.current > 0); /* no lock is held */
  mapped[num_mapped++] = (struct range){(uintptr_t)addr, size};
}

static void on_unmap(void *ctx, int device, void *addr, size_t size) {
  CHECK(ctx == mapped && device == 0);
  unmaps++;
  CHECK(cistern_base(addr, NULL) == NULL);
  OK(cistern_on_unmap(0, on_unmap, mapped)); /* that it is set is no news */
  for (size_t i = 0; i < num_mapped; i++)
    if (mapped[i].addr == (uintptr_t)addr && mapped[i].size == size) {
      mapped[i] = mapped[--num_mapped];
      return;
    }
  CHECK(!"unmapped what was not mapped");
}

static void covered(void *p, size_t size) {
  for (uintptr_t a = (uintptr_t)p, end = a + size; a < end;) {
    size_t i = 0;
    while (i < num_mapped && (a < mapped[i].addr || a >= mapped[i].addr + mapped[i].size))
      i++;
    CHECK(i < num_mapped);
    a = mapped[i].addr + mapped[i].size;
  }
}

static void registrations(void) {
  OK(cistern_on_map(0, on_map, mapped));
  OK(cistern_on_unmap(0, on_unmap, mapped));
  void *p[40];
  for (int i = 0; i < 40; i++) {
    CHECK((p[i] = cistern_malloc((i % 7 + 1) * MIB, 0, STREAM(i % 3))) != NULL);
    covered(p[i], (i % 7 + 1) * MIB);
  }
  for (int i = 0; i < 40; i++)
    OK(cistern_release(p[i]));
  CHECK(unmaps == 0); /* nothing moves */
  void *q = cistern_malloc(200 * MIB, 0, STREAM(0));
  CHECK(q != NULL);
  covered(q, 200 * MIB);
  CHECK(unmaps == 0);
  OK(cistern_release(q));
  OK(cistern_trim(0));
  CHECK(unmaps > 0 && num_mapped == 0);
  OK(cistern_on_map(0, NULL, NULL));
  OK(cistern_on_unmap(0, NULL, NULL));
  CHECK((q = cistern_malloc(MIB, 0, STREAM(0))) != NULL && num_mapped == 0);
  OK(cistern_release(q));
  OK(cistern_trim(0));
}

/* Functions that are asked for memory and taken back. */

static atomic_int counted, inside, leave, others;
static atomic_flag staying = ATOMIC_FLAG_INIT;
static int off_within;

static int count(void *ctx, int device, uint64_t missing) {
  (void)missing;
  counted++;
  if (ctx == &off_within) {
    FAILS(CISTERN_INVALID, "by an out-of-memory function", cistern_off_out_of_memory(device, count, ctx));
    off_within++;
  }
  return 0;
}

static int stay(void *ctx, int device, uint64_t missing) {
  (void)ctx, (void)device, (void)missing;
  if (atomic_flag_test_and_set(&staying)) {
    others++;
    return 0;
  }
  inside = 1;
  while (!leave)
    usleep(1000);
  counted++;
  usleep(20000);
  inside = 0;
  return 0;
}

static void *exhaust(void *arg) {
  void *p;
  FAILS(CISTERN_OUT_OF_MEMORY, "", cistern_alloc(&p, 128 * MIB, 0, NULL, NULL));
  return arg;
}

static void *take_back(void *arg) {
  OK(cistern_off_out_of_memory(0, stay, NULL));
  CHECK(!inside && counted == 1);
  return arg;
}

static void taken_back(void) {
  FAILS(CISTERN_INVALID, "not registered", cistern_off_out_of_memory(0, count, NULL));
  FAILS(CISTERN_INVALID, "not registered", cistern_off_out_of_memory(1, count, NULL));
  OK(cistern_set_limit(0, 64 * MIB));
  OK(cistern_on_out_of_memory(0, count, NULL));
  OK(cistern_on_out_of_memory(0, count, &off_within));
  exhaust(NULL);
  CHECK(counted == 2 && off_within == 1);
  FAILS(CISTERN_INVALID, "not registered", cistern_off_out_of_memory(0, count, &counted)); /* another ctx */
  OK(cistern_off_out_of_memory(0, count, &off_within));
  exhaust(NULL);
  CHECK(counted == 3);
  OK(cistern_off_out_of_memory(0, count, NULL));
  FAILS(CISTERN_INVALID, "not registered", cistern_off_out_of_memory(0, count, NULL));
  exhaust(NULL);
  CHECK(counted == 3);
  OK(cistern_on_out_of_memory(0, count, NULL)); /* and again */
  exhaust(NULL);
  CHECK(counted == 4);
  OK(cistern_off_out_of_memory(0, count, NULL));

  /* A call that is under way is waited for, and others are not made meanwhile. */
  counted = 0;
  OK(cistern_on_out_of_memory(0, stay, NULL));
  pthread_t asker, taker;
  pthread_create(&asker, NULL, exhaust, NULL);
  while (!inside)
    usleep(1000);
  pthread_create(&taker, NULL, take_back, NULL);
  for (int before = -1; before != others;) { /* until the taker has come so far that others are not asked */
    before = others;
    usleep(20000);
    exhaust(NULL);
  }
  CHECK(inside);
  leave = 1;
  pthread_join(taker, NULL);
  pthread_join(asker, NULL);
  int before = others;
  exhaust(NULL);
  CHECK(counted == 1 && others == before);
  OK(cistern_set_limit(0, 0));
}

static int asked[2];

static int ask(void *ctx, int device, uint64_t missing) {
  CHECK(missing > 0);
  asked[device] += ctx == NULL ? 1 : 100;
  return 0;
}

static void exhaust_device(int device) {
  void *p;
  FAILS(CISTERN_OUT_OF_MEMORY, "", cistern_alloc(&p, 64 * 1024 * MIB, device, NULL, NULL));
}

/* Asked by every device, also by one that comes into use later. */
static void everywhere(void) {
  FAILS(CISTERN_INVALID, "all devices", cistern_off_out_of_memory(-1, ask, NULL));
  FAILS(CISTERN_INVALID, "not registered", cistern_off_out_of_memory(0, ask, NULL));
  OK(cistern_on_out_of_memory(-1, ask, NULL)); /* nothing is in use */
  OK(cistern_on_out_of_memory(-1, ask, NULL));
  char *json = cistern_stats_json();
  CHECK(json != NULL && strstr(json, "\"devices\":[]") != NULL);
  cistern_string_free(json);
  exhaust_device(0);
  CHECK(asked[0] == 1 && asked[1] == 0);
  OK(cistern_on_out_of_memory(-1, ask, &asked));
  exhaust_device(1);
  exhaust_device(0);
  CHECK(asked[0] == 102 && asked[1] == 101);
  OK(cistern_off_out_of_memory(-1, ask, NULL));
  FAILS(CISTERN_INVALID, "all devices", cistern_off_out_of_memory(-1, ask, NULL));
  exhaust_device(0);
  exhaust_device(1);
  CHECK(asked[0] == 202 && asked[1] == 201);
  OK(cistern_off_out_of_memory(-1, ask, &asked));
  exhaust_device(0);
  CHECK(asked[0] == 202);
}

int main(void) {
  everywhere();
  pools();
  registrations();
  taken_back();
  OK(cistern_set_limit(0, 256 * MIB));
  OK(cistern_on_out_of_memory(0, give_back, (void *)7));
  OK(cistern_on_out_of_memory(0, give_back, (void *)7)); /* not twice */
  OK(cistern_on_out_of_memory(0, no_help, NULL));
  while (hoarded < 8)
    CHECK((hoard[hoarded++] = cistern_malloc(32 * MIB, 0, NULL)) != NULL);
  CHECK(calls == 0);
  void *p = cistern_malloc(32 * MIB, 0, NULL);
  CHECK(p != NULL && calls == 1 && second == 1 && device_seen == 0 && missing_seen == 32 * MIB);
  CHECK(stats_of(0).by_callback == 1 && stats_of(0).retries == 1);
  OK(cistern_release(p));
  p = cistern_malloc(256 * MIB, 0, NULL); /* one callback is not enough */
  CHECK(p == NULL);
  CHECK_WORDS(CISTERN_OUT_OF_MEMORY, "callback");
  cistern_oom o;
  OK(cistern_last_oom(&o));
  CHECK(o.tried & 32);
  greedy = 1;
  int before = calls;
  CHECK(cistern_malloc(256 * MIB, 0, NULL) == NULL);
  CHECK(greed == 1 && calls == before + 1);
  greedy = 0;
  while (hoarded > 0)
    OK(cistern_release(hoard[--hoarded]));
  CHECK((p = cistern_malloc(256 * MIB, 0, NULL)) != NULL);
  OK(cistern_release(p));
  puts("ok");
  return 0;
}

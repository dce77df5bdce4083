/* The life of pools, and of captures as far as they work without a GPU. */
#include "check.h"

static const uint64_t a[2] = {0, 1}, b[2] = {7, 0}, none[2] = {4, 4};

static void of_pool(void *p, const uint64_t pool[2]) {
  cistern_block x;
  OK(cistern_find(p, &x));
  CHECK(x.pool[0] == pool[0] && x.pool[1] == pool[1]);
}

/* A program that records a tree of graphs into one pool goes back to where a branch began. */
static void checkpoints(void) {
  const uint64_t tree[2] = {0, 77};
  OK(cistern_pool_create(0, tree, NULL));
  OK(cistern_capture_begin(0, tree, STREAM(4)));
  void *p[6];
  for (int i = 0; i < 6; i++)
    CHECK((p[i] = cistern_malloc(MIB * (i + 1), 0, STREAM(4))) != NULL);
  OK(cistern_release(p[1]));
  OK(cistern_release(p[4]));
  OK(cistern_capture_end(0, STREAM(4)));

  cistern_block before[8], after[8];
  size_t n;
  OK(cistern_pool_blocks(0, tree, NULL, 0, &n));
  CHECK(n == 4);
  memset(before, 0xee, sizeof before);
  OK(cistern_pool_blocks(0, tree, before, 2, &n));
  CHECK(n == 4 && before[2].addr == 0xeeeeeeeeeeeeeeee);
  OK(cistern_pool_blocks(0, tree, before, 8, &n));
  for (size_t i = 0; i < n; i++) {
    CHECK(i == 0 || before[i - 1].addr < before[i].addr);
    CHECK(before[i].stream == STREAM(4) && before[i].pool[1] == 77 && before[i].state == CISTERN_BLOCK_USED);
  }
  /* Another branch: some of it goes, something else comes. */
  OK(cistern_release(p[0]));
  OK(cistern_release(p[5]));
  void *q;
  OK(cistern_alloc(&q, 2 * MIB, 0, STREAM(4), tree));
  OK(cistern_pool_restore(0, tree, before, 4));
  OK(cistern_pool_blocks(0, tree, after, 8, &n));
  CHECK(n == 4);
  for (size_t i = 0; i < 4; i++)
    CHECK(after[i].addr == before[i].addr && after[i].size == before[i].size && after[i].requested == before[i].requested);
  CHECK(stats_of(0).allocations.all.current == 4);
  /* What cannot be leaves all as it is. */
  after[3].addr = (uint64_t)1 << 46;
  FAILS(CISTERN_INVALID, "", cistern_pool_restore(0, tree, after, 4));
  after[3] = after[2];
  FAILS(CISTERN_INVALID, "", cistern_pool_restore(0, tree, after, 4)); /* twice the same */
  after[3].size = UINT64_MAX - 511;
  FAILS(CISTERN_INVALID, "", cistern_pool_restore(0, tree, after, 4));
  after[3].size = 0;
  FAILS(CISTERN_INVALID, "", cistern_pool_restore(0, tree, after, 4));
  CHECK(stats_of(0).allocations.all.current == 4);
  OK(cistern_pool_restore(0, tree, NULL, 0)); /* nothing is live */
  CHECK(stats_of(0).allocations.all.current == 0);
  OK(cistern_pool_release(0, tree));
}

static void largest(void) {
  uint64_t bytes;
  OK(cistern_trim(0));
  OK(cistern_largest_free(0, STREAM(5), &bytes));
  CHECK(bytes == 0);
  void *p = cistern_malloc(30 * MIB, 0, STREAM(5));
  CHECK(p != NULL);
  OK(cistern_release(p));
  OK(cistern_largest_free(0, STREAM(5), &bytes));
  CHECK(bytes >= 30 * MIB);
  int64_t got = stats_of(0).device_allocs;
  CHECK((p = cistern_malloc((ssize_t)bytes, 0, STREAM(5))) != NULL && stats_of(0).device_allocs == got);
  OK(cistern_largest_free(0, STREAM(5), &bytes));
  CHECK(bytes == 0);
  OK(cistern_release(p));
}

int main(void) {
  const uint64_t standard[2] = {0, 0};
  FAILS(CISTERN_INVALID, "no pool {0, 1}", cistern_pool_begin(0, a, STREAM(1)));
  OK(cistern_pool_create(0, a, NULL));
  FAILS(CISTERN_INVALID, "exists", cistern_pool_create(0, a, NULL));
  cistern_pool_options options = {.size = sizeof options};
  OK(cistern_pool_create(0, b, &options));

  void *p, *q, *r;
  OK(cistern_alloc(&p, MIB, 0, STREAM(1), a)); /* by name */
  of_pool(p, a);
  FAILS(CISTERN_INVALID, "no pool {4, 4}", cistern_alloc(&q, MIB, 0, STREAM(1), none));

  OK(cistern_pool_begin(0, b, STREAM(1))); /* by stream */
  OK(cistern_pool_begin(0, a, STREAM(1))); /* they nest */
  CHECK((q = cistern_malloc(MIB, 0, STREAM(1))) != NULL);
  of_pool(q, a);
  OK(cistern_release(q));
  OK(cistern_pool_end(0, STREAM(1)));
  CHECK((q = cistern_malloc(MIB, 0, STREAM(1))) != NULL);
  of_pool(q, b);
  OK(cistern_alloc(&r, MIB, 0, STREAM(1), a));
  of_pool(r, a);
  OK(cistern_release(r));
  CHECK((r = cistern_malloc(MIB, 0, STREAM(2))) != NULL); /* another stream is not routed */
  of_pool(r, standard);
  OK(cistern_release(r));
  FAILS(CISTERN_INVALID, "still allocate", cistern_pool_release(0, b));
  OK(cistern_pool_end(0, STREAM(1)));
  FAILS(CISTERN_INVALID, "not routed", cistern_pool_end(0, STREAM(1)));
  CHECK((r = cistern_malloc(MIB, 0, STREAM(1))) != NULL);
  of_pool(r, standard);
  OK(cistern_release(r));

  cistern_snapshot *s;
  OK(cistern_snapshot_take(0, b, &s));
  CHECK(s->num_segments == 1 && s->num_blocks == 2 && s->blocks[0].addr == (uintptr_t)q && s->segments[0].pool[0] == 7);
  cistern_snapshot_free(s);
  FAILS(CISTERN_INVALID, "no pool", cistern_snapshot_take(0, none, &s));
  CHECK(s == NULL);

  OK(cistern_release(q));
  OK(cistern_pool_trim(0, b));
  OK(cistern_snapshot_take(0, b, &s));
  CHECK(s->num_segments == 0);
  cistern_snapshot_free(s);

  /* What is out when its pool is released stays, and is freed as always. */
  OK(cistern_pool_release(0, a));
  FAILS(CISTERN_INVALID, "no pool", cistern_pool_release(0, a));
  FAILS(CISTERN_INVALID, "no pool", cistern_alloc(&q, MIB, 0, STREAM(1), a));
  of_pool(p, a);
  OK(cistern_release(p));
  OK(cistern_pool_create(0, a, NULL)); /* the name is free again */
  OK(cistern_alloc(&p, MIB, 0, STREAM(1), a));
  of_pool(p, a);
  OK(cistern_release(p));

  /* A capture pins its pool until that is released. */
  FAILS(CISTERN_INVALID, "pool of its own", cistern_capture_begin(0, standard, STREAM(3)));
  OK(cistern_capture_begin(0, a, STREAM(3)));
  CHECK((p = cistern_malloc(10 * MIB, 0, STREAM(3))) != NULL);
  of_pool(p, a);
  OK(cistern_release(p));
  OK(cistern_capture_end(0, STREAM(3)));
  FAILS(CISTERN_INVALID, "no capture", cistern_capture_end(0, STREAM(3)));
  OK(cistern_trim(0));
  CHECK(stats_of(0).reserved.all.current >= (int64_t)(10 * MIB));
  OK(cistern_pool_release(0, a));
  OK(cistern_pool_release(0, b));
  OK(cistern_trim(0));
  CHECK(stats_of(0).reserved.all.current == 0);

  checkpoints();
  largest();

  for (int i = 0; i < 2000; i++) { /* nothing is left of a pool */
    const uint64_t id[2] = {0, 100 + i};
    OK(cistern_pool_create(0, id, NULL));
    OK(cistern_alloc(&p, 3 * MIB, 0, STREAM(1), id));
    OK(cistern_release(p));
    OK(cistern_pool_release(0, id));
  }
  CHECK(stats_of(0).reserved.all.peak < (int64_t)(64 * MIB));
  puts("ok");
  return 0;
}

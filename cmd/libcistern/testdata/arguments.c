/* Bad arguments of every function: a code and words, never more. */
#include "check.h"

static int never(void *ctx, int device, uint64_t missing) {
  (void)ctx, (void)device, (void)missing;
  return 0;
}

int main(void) {
  const uint64_t pool[2] = {1, 2};
  uint64_t bytes = 0, more = 0;
  size_t n;
  void *p;
  const int bad[] = {-2, -1, cistern_device_count(), 64, 1 << 30, -(1 << 30)};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    int d = bad[i];
    cistern_stats s = {.size = sizeof s};
    cistern_snapshot *snap;
    cistern_event e;
    cistern_pool_options options = {.size = sizeof options};
    cistern_alloc_options with = {.size = sizeof with, .flags = CISTERN_ALLOC_HOST_ORDER};
    cistern_pool_stats ps = {.size = sizeof ps};
    CHECK(cistern_malloc(512, d, NULL) == NULL);
    CHECK_WORDS(CISTERN_INVALID, "there ");
#define BAD(call) FAILS(CISTERN_INVALID, "device", call)
    BAD(cistern_alloc(&p, 512, d, NULL, NULL));
    BAD(cistern_alloc(&p, 512, d, NULL, pool));
    BAD(cistern_alloc_with(&p, 512, d, NULL, NULL));
    BAD(cistern_alloc_with(&p, 512, d, NULL, &with));
    BAD(cistern_library_usage(d, NULL, 0, &n));
    BAD(cistern_stream_durable(d, NULL));
    if (d != -1)
      BAD(cistern_trim(d));
    BAD(cistern_set_limit(d, 1));
    BAD(cistern_get_limit(d, &bytes));
    BAD(cistern_mem_info(d, &bytes, &more));
    BAD(cistern_node_available(d, &bytes));
    BAD(cistern_largest_free(d, NULL, &bytes));
    BAD(cistern_peer(d, 0));
    BAD(cistern_peer(0, d));
    if (d != -1) {
      BAD(cistern_history(d, 5));
      BAD(cistern_on_out_of_memory(d, never, NULL));
      BAD(cistern_off_out_of_memory(d, never, NULL));
    }
    BAD(cistern_on_unmap(d, NULL, NULL));
    BAD(cistern_on_map(d, NULL, NULL));
    BAD(cistern_pool_create(d, pool, &options));
    BAD(cistern_pool_begin(d, pool, NULL));
    BAD(cistern_pool_end(d, NULL));
    BAD(cistern_capture_begin(d, pool, NULL));
    BAD(cistern_capture_end(d, NULL));
    BAD(cistern_capture_reuse(d, 1));
    BAD(cistern_pool_release(d, pool));
    BAD(cistern_pool_trim(d, pool));
    BAD(cistern_pool_blocks(d, pool, NULL, 0, &n));
    BAD(cistern_pool_restore(d, pool, NULL, 0));
    BAD(cistern_upstream_check(d, "device"));
    BAD(cistern_pool_set_limit(d, pool, 1));
    BAD(cistern_pool_get_stats(d, pool, &ps));
    BAD(cistern_pause(d, NULL, NULL));
    BAD(cistern_resume(d, NULL, NULL));
    BAD(cistern_pause_buffers(d, 1));
    BAD(cistern_node_allow_pause(d, NULL));
    BAD(cistern_node_deny_pause(d));
    BAD(cistern_node_build(d, "x", 1, NULL, &p));
    BAD(cistern_node_open(d, "x", -1, 0, &p));
    BAD(cistern_get_stats(d, &s));
    BAD(cistern_reset_peaks(d));
    BAD(cistern_reset_accumulated(d));
    BAD(cistern_snapshot_take(d, NULL, &snap));
    BAD(cistern_stack_usage(d, NULL, 0, &n));
    BAD(cistern_history_drain(d, &e, 1, &n, NULL));
    BAD(cistern_history_hash(d, &bytes));
  }

#define NONE(call) FAILS(CISTERN_INVALID, "NULL", call)
  NONE(cistern_alloc(NULL, 512, 0, NULL, NULL));
  NONE(cistern_alloc_with(NULL, 512, 0, NULL, NULL));
  CHECK(cistern_library(NULL) == 0);
  CHECK_WORDS(CISTERN_INVALID, "NULL");
  NONE(cistern_library_default(NULL));
  NONE(cistern_library_usage(0, NULL, 0, NULL));
  NONE(cistern_library_usage(0, NULL, 5, &n));
  NONE(cistern_off_out_of_memory(0, NULL, NULL));
  NONE(cistern_upstream_check(0, NULL));
  NONE(cistern_pool_set_limit(0, NULL, 1));
  cistern_pool_stats ps = {.size = sizeof ps};
  NONE(cistern_pool_get_stats(0, NULL, &ps));
  NONE(cistern_pool_get_stats(0, pool, NULL));
  NONE(cistern_find((void *)512, NULL));
  NONE(cistern_segment_base((void *)512, NULL, &n));
  NONE(cistern_last_oom(NULL));
  NONE(cistern_get_limit(0, NULL));
  NONE(cistern_mem_info(0, NULL, &more));
  NONE(cistern_mem_info(0, &more, NULL));
  NONE(cistern_node_available(0, NULL));
  NONE(cistern_node_build(0, "x", 1, NULL, NULL));
  NONE(cistern_node_build(0, NULL, 1, NULL, &p));
  NONE(cistern_node_open(0, "x", -1, 0, NULL));
  NONE(cistern_node_open(0, NULL, -1, 0, &p));
  NONE(cistern_node_remove(NULL, -1, 0));
  FAILS(CISTERN_INVALID, "no object", cistern_node_commit((void *)512, NULL));
  FAILS(CISTERN_INVALID, "no object", cistern_node_abandon((void *)512));
  FAILS(CISTERN_INVALID, "no object", cistern_node_close((void *)512));
  FAILS(CISTERN_INVALID, "no object", cistern_node_write((void *)512, 0, &bytes, 1, NULL));
  FAILS(CISTERN_INVALID, "no object", cistern_node_read((void *)512, 0, &bytes, 1, NULL));
  FAILS(CISTERN_INVALID, "user", cistern_node_remove("x", (int64_t)1 << 40, 0));
  CHECK(cistern_node_describe((void *)512) == NULL);
  CHECK_WORDS(CISTERN_INVALID, "no object");
  NONE(cistern_largest_free(0, NULL, NULL));
  NONE(cistern_on_out_of_memory(0, NULL, NULL));
  NONE(cistern_pool_create(0, NULL, NULL));
  NONE(cistern_pool_begin(0, NULL, NULL));
  NONE(cistern_capture_begin(0, NULL, NULL));
  NONE(cistern_pool_release(0, NULL));
  NONE(cistern_pool_trim(0, NULL));
  NONE(cistern_pool_blocks(0, NULL, NULL, 0, &n));
  NONE(cistern_pool_blocks(0, pool, NULL, 0, NULL));
  NONE(cistern_pool_blocks(0, pool, NULL, 5, &n));
  NONE(cistern_pool_restore(0, NULL, NULL, 0));
  NONE(cistern_pool_restore(0, pool, NULL, 1));
  cistern_block block = {0};
  OK(cistern_pool_create(0, pool, NULL));
  FAILS(CISTERN_INVALID, "blocks", cistern_pool_restore(0, pool, &block, SIZE_MAX));
  OK(cistern_pool_release(0, pool));
  NONE(cistern_get_stats(0, NULL));
  NONE(cistern_tag_push(NULL));
  NONE(cistern_snapshot_take(0, NULL, NULL));
  NONE(cistern_snapshot_write(NULL));
  NONE(cistern_history_drain(0, NULL, 0, NULL, NULL));
  NONE(cistern_history_hash(0, NULL));
  NONE(cistern_history_drain(0, NULL, 5, &n, NULL));
  NONE(cistern_trace_write(NULL));
  NONE(cistern_stack_usage(0, NULL, 0, NULL));
  NONE(cistern_stack_usage(0, NULL, 5, &n));
  NONE(cistern_stack_text(1, NULL, 5));
  NONE(cistern_share((void *)512, NULL, 512));
  NONE(cistern_open(NULL, 0, &p));
  NONE(cistern_open("x", 0, NULL));

  /* Pointers that were never handed out: to the driver, to the host, to nowhere. */
  int here;
  void *strangers[] = {&here, (void *)1, (void *)-1, (void *)-512, (void *)((uintptr_t)1 << 47), (void *)((uintptr_t)1 << 63)};
  for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
    void *x = strangers[i];
    char handle[CISTERN_HANDLE_MAX];
    cistern_block b;
    cistern_free(x, 512, 0, NULL);
    CHECK_WORDS(CISTERN_INVALID, "not a live allocation");
    FAILS(CISTERN_INVALID, "not a live allocation", cistern_release(x));
    FAILS(CISTERN_INVALID, "not a live allocation", cistern_release_on(x, NULL));
    FAILS(CISTERN_INVALID, "not a live allocation", cistern_record_stream(x, NULL));
    FAILS(CISTERN_INVALID, "not a live allocation", cistern_find(x, &b));
    FAILS(CISTERN_INVALID, "not a live allocation", cistern_segment_base(x, &p, &n));
    CHECK(cistern_base(x, &n) == NULL && n == 0);
    CHECK_WORDS(CISTERN_INVALID, "not a live allocation");
    CHECK(cistern_share(x, handle, sizeof handle) == CISTERN_INVALID);
    CHECK(cistern_share(x, handle, SIZE_MAX) == CISTERN_INVALID);
    CHECK(cistern_close(x) == CISTERN_INVALID);
  }

  CHECK(cistern_malloc(-1, 0, NULL) == NULL);
  CHECK_WORDS(CISTERN_INVALID, "size is negative");
  FAILS(CISTERN_OUT_OF_MEMORY, "", cistern_alloc(&p, SIZE_MAX, 0, NULL, NULL));
  cistern_stats s = {.size = 3};
  FAILS(CISTERN_INVALID, "sizeof", cistern_get_stats(0, &s));
  cistern_pool_options o = {.size = 4};
  FAILS(CISTERN_INVALID, "too small", cistern_pool_create(0, pool, &o));
  o.size = sizeof o + 8;
  FAILS(CISTERN_INVALID, "newer cistern.h", cistern_pool_create(0, pool, &o));
  o.size = sizeof o;
  o.flags = 1u << 30;
  FAILS(CISTERN_INVALID, "flags", cistern_pool_create(0, pool, &o));
  o.flags = 0;
  o.free = (void (*)(void *, void *, size_t, int, void *))(uintptr_t)8;
  FAILS(CISTERN_INVALID, "both or neither", cistern_pool_create(0, pool, &o));
  FAILS(CISTERN_INVALID, "history", cistern_history(0, SIZE_MAX));
  FAILS(CISTERN_INVALID, "no such file", cistern_snapshot_write("/no/such/folder/x.pickle"));
  FAILS(CISTERN_INVALID, "no such file", cistern_trace_write("/no/such/folder/x.cistern"));
  FAILS(CISTERN_INVALID, "path is empty", cistern_trace_write(""));
  FAILS(CISTERN_INVALID, "kinds", cistern_stacks(4, 0));
  FAILS(CISTERN_INVALID, "kinds", cistern_stacks(UINT32_MAX, UINT64_MAX));
  OK(cistern_stacks(CISTERN_STACKS_NATIVE | CISTERN_STACKS_PYTHON, UINT64_MAX)); /* no Python here, which is no failure */
  OK(cistern_stacks(0, UINT64_MAX));
  FAILS(CISTERN_INVALID, "no stack 0", cistern_stack_text(0, NULL, 0));
  FAILS(CISTERN_INVALID, "no stack 4294967295", cistern_stack_text(UINT32_MAX, NULL, 0));
  FAILS(CISTERN_INVALID, "dir is empty", cistern_report("", 0));
  OK(cistern_report(NULL, 1));
  const uint64_t standard[2] = {0, 0};
  FAILS(CISTERN_INVALID, "default pool", cistern_pool_release(0, standard));
  FAILS(CISTERN_INVALID, "exists", cistern_pool_create(0, standard, NULL));

  char one[1];
  CHECK(cistern_last_error(one, 1) == CISTERN_INVALID && one[0] == 0);
  char five[5];
  CHECK(cistern_last_error(five, 5) == CISTERN_INVALID && strlen(five) == 4);
  CHECK(cistern_last_error(NULL, 0) == CISTERN_INVALID);
  /* And all works as before. */
  CHECK((p = cistern_malloc(512, 0, NULL)) != NULL);
  OK(cistern_release(p));
  puts("ok");
  return 0;
}

/* Functions of the program that the library calls: for memory when there is none left. */
#include "check.h"

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

static int second;
static int no_help(void *ctx, int device, uint64_t missing) {
  (void)ctx, (void)device, (void)missing;
  second++;
  return 0;
}

int main(void) {
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
  while (hoarded > 0)
    OK(cistern_release(hoard[--hoarded]));
  CHECK((p = cistern_malloc(256 * MIB, 0, NULL)) != NULL);
  OK(cistern_release(p));
  puts("ok");
  return 0;
}

/* A tour of cistern.h: memory, a pool of its own kind of memory, allocations by tag, running out, and making way for others.
 *
 *     cc memory.c $(pkg-config --cflags --libs cistern) -o memory && ./memory
 *
 * Without a GPU: CISTERN_CONF=driver:sim:8GiB ./memory. The pool's memory is of any kind that cistern.h names: ./memory pinned
 */
#include <cistern.h>

#include <stdio.h>
#include <stdlib.h>

#define MIB ((size_t)1 << 20)
enum { DEVICE = 0 };

/* Whatever fails has said why. */
static void check(int code, const char *what) {
  if (code == CISTERN_OK)
    return;
  char why[2048];
  cistern_last_error(why, sizeof why);
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}

static void show(const char *when) {
  cistern_stats s = {.size = sizeof s};
  check(cistern_get_stats(DEVICE, &s), "statistics");
  printf("%s: %lld MiB held, %lld MiB handed out, %lld MiB paused\n", when, (long long)(s.reserved.all.current >> 20),
         (long long)(s.allocated.all.current >> 20), (long long)(s.paused.current >> 20));
  cistern_library_use use[16];
  size_t n;
  check(cistern_library_usage(DEVICE, use, 16, &n), "statistics by library");
  for (size_t i = 0; i < n && i < 16; i++)
    printf("  %-8s %3lld blocks %6llu MiB\n", cistern_library_name(use[i].library), (long long)use[i].blocks,
           (unsigned long long)(use[i].allocated >> 20));
}

int main(int argc, char **argv) {
  /* Memory, for work that is queued on the stream from now on (here the legacy default stream); usually a cached block. */
  check(cistern_library_default("tour"), "a name for what this program allocates");
  void *p = cistern_malloc(64 * MIB, DEVICE, NULL);
  if (p == NULL)
    check(CISTERN_OUT_OF_MEMORY, "64 MiB");

  /* A pool apart from the rest, of segments of one physical handle each, that may hold 256 MiB. */
  const uint64_t pool[2] = {1, 0};
  cistern_pool_options of = {.size = sizeof of, .upstream = argc > 1 ? argv[1] : "virtual", .limit = 256 * MIB};
  check(cistern_pool_create(DEVICE, pool, &of), "a pool");

  /* On behalf of another component, which statistics list by its name. */
  cistern_alloc_options guest = {.size = sizeof guest, .pool = {pool[0], pool[1]}, .library = cistern_library("guest")};
  void *q, *r;
  check(cistern_alloc_with(&q, 200 * MIB, DEVICE, NULL, &guest), "200 MiB from the pool");
  show("two libraries");

  /* The pool has no 100 MiB left: the words say what was tried, the top allocations and what would help. */
  int code = cistern_alloc_with(&r, 100 * MIB, DEVICE, NULL, &guest);
  char why[2048];
  cistern_last_error(why, sizeof why);
  printf("code %d: %s\n", code, why);
  check(cistern_pool_set_limit(DEVICE, pool, 512 * MIB), "a higher limit");
  check(cistern_alloc_with(&r, 100 * MIB, DEVICE, NULL, &guest), "100 MiB from the pool");

  /* The pool makes way for others: its contents go to host memory, its addresses stay. */
  cistern_pause_options options = {.size = sizeof options, .keep = CISTERN_KEEP_HOST, .pool = pool};
  cistern_pause_report did;
  if (cistern_pause(DEVICE, &options, &did) == CISTERN_UNSUPPORTED) {
    cistern_last_error(why, sizeof why);
    printf("not paused: %s\n", why);
  } else {
    printf("paused %lld blocks, %llu MiB of physical memory\n", (long long)did.blocks, (unsigned long long)(did.physical >> 20));
    show("paused");
    check(cistern_resume(DEVICE, &options, &did), "resume");
    printf("resumed %lld blocks, %llu MiB of contents\n", (long long)did.blocks, (unsigned long long)(did.kept >> 20));
  }

  cistern_release(p);
  cistern_release(q);
  cistern_release(r);
  check(cistern_pool_release(DEVICE, pool), "the end of the pool");
  check(cistern_trim(DEVICE), "trim");
  show("at the end");
  return 0;
}

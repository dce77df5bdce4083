/* A small run whose history is recorded from the start. */
#include "check.h"

int main(int argc, char **argv) {
  CHECK(argc == 2);
  const uint64_t pool[2] = {0, 9};
  OK(cistern_pool_create(0, pool, NULL));
  void *kept = cistern_malloc(3 * MIB, 0, NULL);
  CHECK(kept != NULL);
  for (int i = 0; i < 10; i++) {
    void *p;
    OK(cistern_alloc(&p, MIB * (i + 1), 0, STREAM(1), pool));
    OK(cistern_release(p));
  }
  OK(cistern_snapshot_write(argv[1]));
  puts("ok");
  return 0;
}

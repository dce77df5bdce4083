/* Started with settings that are wrong in the environment: every function says so, until cistern_init has better ones. */
#include "check.h"

int main(int argc, char **argv) {
  CHECK(argc == 2);
  int code = cistern_trim(-1);
  CHECK(code == CISTERN_INVALID);
  CHECK_WORDS(code, argv[1]);
  CHECK(cistern_malloc(512, 0, NULL) == NULL);
  CHECK_WORDS(code, argv[1]);
  CHECK(cistern_device_count() == -1);
  FAILS(code, argv[1], cistern_init(NULL));
  setenv("CISTERN_CONF", "driver:sim:1GiB,limit:100MiB", 1); /* the environment as it is now */
  void *p = cistern_malloc(512, 0, NULL);
  CHECK(p != NULL);
  uint64_t limit;
  OK(cistern_get_limit(0, &limit));
  CHECK(limit == 100 * MIB);
  OK(cistern_release(p));
  puts("ok");
  return 0;
}

/* A bug in Cistern, which the library that this runs with was built to have: the call that meets it fails with words that
 * say where, and so does every later one, at once, also from other threads. */
#include "check.h"

#include <pthread.h>

static void *other(void *p) {
  CHECK(cistern_malloc(512, 0, NULL) == NULL);
  CHECK_WORDS(CISTERN_INTERNAL, "a bug in Cistern");
  FAILS(CISTERN_INTERNAL, "a bug in Cistern", cistern_release(p));
  return NULL;
}

int main(void) {
  alarm(300); /* a hang ends */
  void *p = cistern_malloc(512, 0, NULL);
  CHECK(p != NULL);
  CHECK(cistern_malloc(666 * MIB, 0, NULL) == NULL);
  CHECK_WORDS(CISTERN_INTERNAL, "a bug in Cistern " CISTERN_VERSION);
  CHECK_WORDS(CISTERN_INTERNAL, "injected");
  CHECK_WORDS(CISTERN_INTERNAL, "engine.(*request).");
  pthread_t t;
  pthread_create(&t, NULL, other, p);
  pthread_join(t, NULL);
  cistern_free(p, 512, 0, NULL);
  FAILS(CISTERN_INTERNAL, "injected", cistern_init(NULL));
  FAILS(CISTERN_INTERNAL, "injected", cistern_trim(-1));
  CHECK(cistern_stats_json() == NULL && cistern_device_count() == -1);
  puts("ok");
  return 0;
}

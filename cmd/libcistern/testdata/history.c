/* A history with threads, tags, libraries and stacks, written in Cistern's format: two threads with known names ask for 1 and
 * 2 MiB, one gives the other's back; the name of the file is the argument. Prints the threads' numbers, then ok. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sys/syscall.h>

static void *shared;

__attribute__((noinline)) static void *ask(size_t n) {
  void *p = cistern_malloc((ssize_t)n, 0, NULL);
  __asm__ volatile("" ::: "memory");
  return p;
}

static pthread_barrier_t met;

static void *asker(void *arg) {
  pthread_setname_np(pthread_self(), "asker");
  printf("%ld\n", syscall(SYS_gettid));
  OK(cistern_tag_push("weights"));
  CHECK((shared = ask(MIB)) != NULL);
  OK(cistern_tag_pop());
  pthread_barrier_wait(&met);
  pthread_barrier_wait(&met); /* the file is being written */
  return arg;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  FAILS(CISTERN_INVALID, "no device is in use", cistern_trace_write(argv[1]));
  OK(cistern_library_default("program"));
  pthread_barrier_init(&met, NULL, 2);
  pthread_t t;
  pthread_create(&t, NULL, asker, NULL);
  pthread_barrier_wait(&met);
  printf("%ld\n", syscall(SYS_gettid));
  void *p;
  cistern_alloc_options o = {.size = sizeof o, .library = cistern_library("somebody")};
  OK(cistern_alloc_with(&p, 2 * MIB, 0, NULL, &o));
  OK(cistern_release(shared));
  OK(cistern_trace_write(argv[1]));
  pthread_barrier_wait(&met);
  pthread_join(t, NULL);
  FAILS(CISTERN_INVALID, "no such file", cistern_trace_write("/no/such/folder/x.cistern"));
  puts("ok");
  return 0;
}

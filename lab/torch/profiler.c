/* A native profiler as hosts.py loads it: SIGPROF for every millisecond of CPU time, to any thread that runs, and a handler
 * without SA_ONSTACK that uses 8 KiB of stack and checks that they stay as it wrote them. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/time.h>

static atomic_long samples;
static atomic_uint sum;

static __attribute__((noinline)) unsigned down(int kib, unsigned mark) {
  volatile unsigned char frame[1024];
  for (size_t i = 0; i < sizeof frame; i += 8)
    frame[i] = (unsigned char)(mark + i);
  unsigned below = kib > 1 ? down(kib - 1, mark + 1) : 0;
  for (size_t i = 0; i < sizeof frame; i += 8)
    if (frame[i] != (unsigned char)(mark + i))
      abort();
  return below + frame[8];
}

static void sample(int number) {
  int saved = errno;
  (void)number;
  atomic_fetch_add(&sum, down(8, (unsigned)samples));
  atomic_fetch_add(&samples, 1);
  errno = saved;
}

static int every(long us) {
  struct itimerval t = {{0, us}, {0, us}};
  return setitimer(ITIMER_PROF, &t, NULL);
}

int profiler_start(void) {
  struct sigaction action = {.sa_handler = sample, .sa_flags = SA_RESTART};
  sigemptyset(&action.sa_mask);
  return sigaction(SIGPROF, &action, NULL) != 0 || every(1000) != 0;
}

long profiler_stop(void) {
  every(0);
  return samples;
}

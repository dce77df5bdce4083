/* Signals: handlers that use much stack, with and without SA_ONSTACK and alternate stacks, on threads that are within the
 * library nearly always. */
#define _GNU_SOURCE
#include "hosts.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/time.h>

static atomic_long handled;
static atomic_uint sum;
static size_t depth; /* the bytes of stack that the handler uses */

/* down uses so many bytes of stack and checks that they stay as it wrote them. */
static __attribute__((noinline)) unsigned down(size_t bytes, unsigned mark) {
  volatile unsigned char frame[1024];
  for (size_t i = 0; i < sizeof frame; i += 8)
    frame[i] = (unsigned char)(mark + i);
  unsigned below = bytes > sizeof frame ? down(bytes - sizeof frame, mark + 1) : 0;
  for (size_t i = 0; i < sizeof frame; i += 8)
    if (frame[i] != (unsigned char)(mark + i))
      abort();
  return below + frame[8];
}

static void handler(int number) {
  (void)number;
  int saved = errno;
  if (depth > 0)
    atomic_fetch_add(&sum, down(depth, (unsigned)handled));
  atomic_fetch_add(&handled, 1);
  errno = saved;
}

static void handle(int number, int flags) {
  struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
  sigemptyset(&action.sa_mask);
  CHECK(sigaction(number, &action, NULL) == 0);
}

static int alternate; /* the workers have alternate signal stacks of their own */

static void *worker(void *number) {
  void *stack = NULL;
  if (alternate) {
    stack_t alt = {.ss_size = 64 << 10};
    CHECK((stack = alt.ss_sp = malloc(alt.ss_size)) != NULL);
    CHECK(sigaltstack(&alt, NULL) == 0);
  }
  work(number);
  if (alternate) {
    stack_t now, none = {.ss_flags = SS_DISABLE};
    CHECK(sigaltstack(NULL, &now) == 0 && now.ss_sp == stack && now.ss_size == 64 << 10); /* it is still the program's */
    CHECK(sigaltstack(&none, NULL) == 0);
    free(stack);
  }
  return NULL;
}

/* storm has the workers work while each is sent the signal every millisecond. */
static void storm(int number) {
  pthread_t worker_of[WORKERS];
  prepare();
  for (uintptr_t i = 0; i < WORKERS; i++)
    CHECK(pthread_create(&worker_of[i], NULL, worker, (void *)i) == 0);
  for (double end = seconds() + duration; seconds() < end; usleep(1000))
    for (int i = 0; i < WORKERS && number != 0; i++)
      CHECK(pthread_kill(worker_of[i], number) == 0);
  stop = 1;
  for (int i = 0; i < WORKERS; i++)
    CHECK(pthread_join(worker_of[i], NULL) == 0);
  CHECK(rounds >= WORKERS && handled > 0);
  CHECK(stats_of(0).allocations.all.current == 0);
}

/* The handlers are set after the library has begun: those that are there when Go begins are given SA_ONSTACK by it. */
static void storm_of(int number, int flags, size_t bytes) {
  depth = bytes;
  OK(cistern_init(NULL));
  handle(number, flags);
  storm(number);
}

void signals_plain(void) { storm_of(SIGUSR1, 0, 8 << 10); }

/* Collections of Go's beside it, which stop its threads and look after stacks. */
static void *collect(void *arg) {
  OK(cistern_history(0, 100000));
  while (!stop) {
    for (int i = 0; i < 100; i++)
      cistern_string_free(cistern_stats_json());
    cistern_snapshot *s;
    OK(cistern_snapshot_take(0, NULL, &s));
    cistern_snapshot_free(s);
  }
  return arg;
}

void signals_collected(void) {
  pthread_t collector;
  OK(cistern_init(NULL));
  CHECK(pthread_create(&collector, NULL, collect, NULL) == 0);
  signals_plain();
  CHECK(pthread_join(collector, NULL) == 0);
}

/* Threads whose alternate stacks come and go. */
static void *changing(void *number) {
  unsigned seed = 1;
  char *stack = mmap(NULL, 64 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(stack != MAP_FAILED);
  stack_t alt = {.ss_sp = stack, .ss_size = 64 << 10}, none = {.ss_flags = SS_DISABLE};
  CHECK(sigaltstack(&alt, NULL) == 0);
  turn((uintptr_t)number, &seed);
  CHECK(sigaltstack(&none, NULL) == 0);
  CHECK(munmap(stack, 64 << 10) == 0);
  return work(number);
}

void signals_changing(void) {
  pthread_t collector, thread[WORKERS];
  prepare();
  CHECK(pthread_create(&collector, NULL, collect, NULL) == 0);
  for (uintptr_t i = 0; i < WORKERS; i++)
    CHECK(pthread_create(&thread[i], NULL, changing, (void *)i) == 0);
  usleep((useconds_t)(duration * 1e6));
  stop = 1;
  for (int i = 0; i < WORKERS; i++)
    CHECK(pthread_join(thread[i], NULL) == 0);
  CHECK(pthread_join(collector, NULL) == 0);
}

void signals_onstack(void) { storm_of(SIGUSR1, SA_ONSTACK, 8 << 10); }

void signals_altstack(void) {
  alternate = 1;
  storm_of(SIGUSR1, SA_ONSTACK, 8 << 10);
}

void signals_onstack_deep(void) { storm_of(SIGUSR1, SA_ONSTACK, 100 << 10); }

/* As deep as most handlers never are. */
void signals_deep(void) { storm_of(SIGUSR2, 0, 100 << 10); }

/* What a profiler does: a timer of processor time, whose signal the kernel gives to any thread that runs. */
void signals_profile(void) {
  depth = 8 << 10;
  OK(cistern_init(NULL));
  handle(SIGPROF, SA_RESTART);
  struct itimerval each = {{0, 1000}, {0, 1000}}, none = {{0, 0}, {0, 0}};
  CHECK(setitimer(ITIMER_PROF, &each, NULL) == 0);
  storm(0);
  CHECK(setitimer(ITIMER_PROF, &none, NULL) == 0);
}

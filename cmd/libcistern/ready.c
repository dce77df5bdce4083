//go:build linux && cgo

/* Signal handlers of the program run on threads that are within Go. Without SA_ONSTACK the kernel puts a handler's frame on
 * the stack in use, which there is a goroutine's of a few KiB with the heap of Go below it; with SA_ONSTACK, which Go also adds
 * to the handlers that it finds when it starts, on the alternate stack that Go gives a thread without one, of 32 KiB, with the
 * heap below it. So before the first call of a thread into Go it is given an alternate stack with an end, unless it has one,
 * and its goroutine is given room (ready.go), while its signals are blocked. Later calls cost nothing: blocking signals around
 * each would cost two system calls, three times what such a call takes.
 *
 * The goroutine stays the thread's until it ends, and its stack never shrinks (gcshrinkstackoff, in the Makefile). */
#define _GNU_SOURCE
#include "shim.h"
#include "_cgo_export.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of runtime/cgo: 0 where no pthread_key was left, so that every call of a thread may get another goroutine. */
extern uintptr_t x_cgo_pthread_key_created;

enum { ALTERNATE = 256 << 10, END = 64 << 10 /* a multiple of every page size */ };

/* The kernel's set of signals: pthread_sigmask leaves out those of the C library itself. */
typedef uint64_t signals;
#define SIGNAL(n) ((signals)1 << ((n)-1))
enum { SIGNAL_SETXID = 33 }; /* of setuid, which waits for all threads; its handler has SA_ONSTACK */

static signals mask(signals set) {
  signals before = 0;
  syscall(SYS_rt_sigprocmask, SIG_SETMASK, &set, &before, sizeof set);
  return before;
}

/* give_alternate gives the thread an alternate stack whose end is a fault, where there is memory for it. */
static void give_alternate(shim_thread *t) {
  stack_t now;
  if (sigaltstack(NULL, &now) != 0 || !(now.ss_flags & SS_DISABLE))
    return;
  char *p = mmap(NULL, END + ALTERNATE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return;
  stack_t alternate = {.ss_sp = p + END, .ss_size = ALTERNATE};
  if (mprotect(p, END, PROT_NONE) != 0 || sigaltstack(&alternate, NULL) != 0)
    munmap(p, END + ALTERNATE);
  else
    t->alternate = p;
}

static void *pass(void *gate) {
  pthread_mutex_lock(gate);
  pthread_mutex_unlock(gate);
  return NULL;
}

/* may_have reports whether the process may have so many more threads at once. The caller's signals are blocked, as they are not for
 * these. */
static int may_have(int n) {
  pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* shut until all are there */
  pthread_attr_t attr;
  int i = 0;
  pthread_t *made = calloc((size_t)n, sizeof *made);
  if (made == NULL)
    return 0;
  pthread_attr_init(&attr);
  pthread_attr_setstacksize(&attr, 64 << 10);
  pthread_mutex_lock(&gate);
  while (i < n && pthread_create(&made[i], &attr, pass, &gate) == 0)
    i++;
  pthread_mutex_unlock(&gate);
  for (int k = 0; k < i; k++)
    pthread_join(made[k], NULL);
  pthread_attr_destroy(&attr);
  free(made);
  return i == n;
}

/* Go ends the process where it gets no thread. Those that it needs are made when the library starts and kept (threads.go); whether the
 * process may have them is asked before the first call. Go's runtime, which may still be starting then, needs some for itself. */
enum { RUNNING_MOST = 16, WAITING = 8, RUNTIME = 6 };
static uint32_t asked;

/* Nor may it be short of addresses (RLIMIT_AS): it takes those of its heap when the library starts (reserveHeap), and each of these
 * threads has a stack. */
enum { ADDRESSES = 1 << 30 };

static int enough_addresses(void) {
  static const char none[] = "the process may not have the address space that is needed, 1 GiB: raise its limit (ulimit -v)";
  void *p = mmap(NULL, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    shim_fail(CISTERN_UNSUPPORTED, none, sizeof none - 1);
    return 0;
  }
  munmap(p, ADDRESSES);
  return 1;
}

static int enough_stack(void) {
  static const char none[] = "the process may not have the threads that are needed: raise its limit (ulimit -u) or that of its "
                             "container (pids.max)";
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  if (__atomic_load_n(&asked, __ATOMIC_RELAXED))
    return 1;
  if (!may_have((int)(n < RUNNING_MOST ? n : RUNNING_MOST) + WAITING + RUNTIME)) {
    shim_fail(CISTERN_UNSUPPORTED, none, sizeof none - 1);
    return 0;
  }
  if (!enough_addresses())
    return 0;
  __atomic_store_n(&asked, 1, __ATOMIC_RELAXED);
  return 1;
}

int shim_make_ready(void) {
  /* What says of a fault where it was stays: blocked, it ends the process. */
  signals before = mask(~(SIGNAL(SIGSEGV) | SIGNAL(SIGBUS) | SIGNAL(SIGFPE) | SIGNAL(SIGILL) | SIGNAL(SIGTRAP) | SIGNAL(SIGSYS) |
                          SIGNAL(SIGNAL_SETXID)));
  int enough = enough_stack();
  if (enough) {
    shim_thread *t = shim_thread_get();
    if (t != NULL && t->alternate == NULL)
      give_alternate(t);
    coreReady();
    if (t != NULL)
      t->ready = x_cgo_pthread_key_created != 0;
  }
  mask(before); /* Go has unblocked some */
  return enough;
}

void shim_unready(shim_thread *t) {
  stack_t now, none = {.ss_flags = SS_DISABLE};
  if (t->alternate == NULL)
    return;
  if (sigaltstack(NULL, &now) == 0 && now.ss_sp == (char *)t->alternate + END && !(now.ss_flags & SS_ONSTACK))
    sigaltstack(&none, NULL);
  munmap(t->alternate, END + ALTERNATE);
}

//go:build linux && cgo

/* A signal for the process is the program's. The kernel gives it to any thread that has it not blocked: where that is one of
 * Go's, the thread that sleeps or reads is not woken, so that Ctrl-C does nothing until it ends, and what a program waits for
 * with signalfd or sigwait is lost. So Go's threads have blocked what Go does not need itself.
 *
 * They have the signals blocked that are blocked in the thread that starts Go, which a constructor of this library does: all
 * of them are blocked around that. Constructors with a priority run before those without; Go's is in the first object that is
 * linked, and this file's is behind it. Were it not, Go's threads would be as they were without this. */
#define _GNU_SOURCE
#include "shim.h"

#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>

/* Go has a table of signals (runtime/sigtab_linux_generic.go), in which some are marked as not to be blocked by any thread that
 * runs Go, be it one of the program's that is in here for a moment. That is right for those that say of a fault where it was,
 * and for those of Go's own, but not for SIGCHLD and SIGPROF, which are for os/signal and for profiles of Go, and used by
 * neither here. The mark is taken off them before Go starts. The table has no name outside of Go; it is known by what is in it,
 * and where it is not found all stays as it is. */
struct go_signal {
  int32_t flags;
  const char *name;
  int64_t length;
};

enum { GO_UNBLOCK = 128, GO_SIGNALS = 65 };

static sigset_t before_go;

static int look(struct dl_phdr_info *info, size_t size, void *arg) {
  shim_data *d = arg;
  uintptr_t own = (uintptr_t)&before_go;
  (void)size;
  *d = (shim_data){.low = UINTPTR_MAX};
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *h = &info->dlpi_phdr[i];
    uintptr_t begin = info->dlpi_addr + h->p_vaddr;
    if (h->p_type != PT_LOAD)
      continue;
    d->low = begin < d->low ? begin : d->low;
    d->high = begin + h->p_memsz > d->high ? begin + h->p_memsz : d->high;
    if (own >= begin && own < begin + h->p_memsz)
      d->from = begin, d->filled = begin + h->p_filesz, d->to = begin + h->p_memsz;
  }
  return d->from != 0;
}

void shim_find_data(shim_data *d) {
  if (!dl_iterate_phdr(look, d))
    *d = (shim_data){0};
}

/* What the table lies among are other variables, which an AddressSanitizer has guards between: it is not asked here. */
#define UNGUARDED __attribute__((no_sanitize("address")))

UNGUARDED uintptr_t shim_functions(const shim_data *d, uintptr_t from, uintptr_t to, uintptr_t code[3]) {
  for (const uintptr_t *w = (const uintptr_t *)from; (uintptr_t)(w + 4) <= to; w++) {
    int i = 0;
    while (w[0] == 0 && i < 3 && w[1 + i] >= d->low && w[1 + i] < d->high && w[1 + i] % sizeof *w == 0)
      i++;
    if (i < 3)
      continue;
    for (i = 0; i < 3; i++)
      code[i] = *(const uintptr_t *)w[1 + i];
    return (uintptr_t)(w + 1);
  }
  return 0;
}

/* is_named reports whether an entry has a name that begins so; the name is only read where it lies in this library. */
UNGUARDED static int is_named(const shim_data *d, const struct go_signal *s, const char *name) {
  uintptr_t at = (uintptr_t)s->name;
  if (s->length <= 0 || s->length >= 128 || at < d->low || at >= d->high || d->high - at <= (uintptr_t)s->length)
    return 0;
  for (int64_t i = 0; name[i] != 0; i++)
    if (i >= s->length || s->name[i] != name[i])
      return 0;
  return 1;
}

UNGUARDED static void leave_blocked(void) {
  shim_data d;
  shim_find_data(&d);
  for (uintptr_t at = (d.from + 7) & ~(uintptr_t)7; at + GO_SIGNALS * sizeof(struct go_signal) <= d.filled; at += 8) {
    struct go_signal *table = (struct go_signal *)at;
    if (is_named(&d, &table[SIGCHLD], "SIGCHLD: ") && is_named(&d, &table[SIGPROF], "SIGPROF: ") && is_named(&d, &table[SIGHUP], "SIGHUP: ") &&
        table[SIGCHLD].flags & GO_UNBLOCK && table[SIGSEGV].flags & GO_UNBLOCK && !(table[SIGHUP].flags & GO_UNBLOCK)) {
      table[SIGCHLD].flags &= ~GO_UNBLOCK;
      table[SIGPROF].flags &= ~GO_UNBLOCK;
      return;
    }
  }
}

__attribute__((constructor(101))) static void before_go_starts(void) {
  sigset_t all;
  leave_blocked();
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_go);
}

__attribute__((constructor)) static void go_is_started(void) { pthread_sigmask(SIG_SETMASK, &before_go, NULL); }

//go:build linux && cgo

/* What sharing leaves in the process beside memory: descriptors, which a child of fork must not keep open (a parent that
 * died would seem to live), and the name of a socket, which goes when the process exits. */
#define _GNU_SOURCE
#include "shim.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

/* Descriptors + 1; 0 is free. There are few: a listener, and one or two for each peer that is being answered. */
static int held[1024];
static char socket_name[108];

void shim_share_opened(int fd) {
  for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
    int none = 0;
    if (__atomic_compare_exchange_n(&held[i], &none, fd + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
      return;
  }
}

void shim_share_closing(int fd) {
  for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
    int mine = fd + 1;
    if (__atomic_compare_exchange_n(&held[i], &mine, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
      return;
  }
}

void shim_share_listening(const char *path, size_t n) {
  if (n < sizeof socket_name) {
    memcpy(socket_name, path, n);
    socket_name[n] = 0;
  }
}

static void after_fork(void) {
  for (size_t i = 0; i < sizeof held / sizeof *held; i++)
    if (held[i] != 0)
      close(held[i] - 1);
  memset(held, 0, sizeof held);
  socket_name[0] = 0;
}

__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, after_fork); }

__attribute__((destructor)) static void unload(void) {
  if (*shim_alive != 0 && socket_name[0] != 0)
    unlink(socket_name);
}

//go:build linux && cgo

/* What sharing leaves in the process beside memory: descriptors, which a child of fork must not keep open (a parent that
 * died would seem to live), and the name of a socket, which goes when the process exits. */
#define _GNU_SOURCE
#include "shim.h"

#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* One bit for each descriptor: a batch of 64 for each of 64 importers, and what the kernel numbers between them. Those
 * above are too many to be true. */
enum { MOST = 1 << 16, BITS = 64 };
static uint64_t held[MOST / BITS];
/* What they were: the program may have closed one and opened a file of its own under the number. */
static struct identity {
  dev_t device;
  ino_t inode;
} identities[MOST];
static char socket_name[108];

void shim_share_opened(int fd) {
  struct stat st;
  if (fd < 0 || fd >= MOST || fstat(fd, &st) != 0)
    return;
  identities[fd] = (struct identity){st.st_dev, st.st_ino};
  __atomic_fetch_or(&held[fd / BITS], (uint64_t)1 << fd % BITS, __ATOMIC_RELEASE);
}

void shim_share_closing(int fd) {
  if (fd >= 0 && fd < MOST)
    __atomic_fetch_and(&held[fd / BITS], ~((uint64_t)1 << fd % BITS), __ATOMIC_RELAXED);
}

void shim_share_listening(const char *path, size_t n) {
  if (n < sizeof socket_name) {
    memcpy(socket_name, path, n);
    socket_name[n] = 0;
  }
}

static void close_held(int fd) {
  struct stat st;
  if (fstat(fd, &st) == 0 && st.st_dev == identities[fd].device && st.st_ino == identities[fd].inode)
    close(fd);
}

static void after_fork(void) {
  for (int i = 0; i < MOST / BITS; i++) {
    for (uint64_t set = held[i]; set != 0; set &= set - 1)
      close_held(i * BITS + __builtin_ctzll(set));
    if (held[i] != 0)
      held[i] = 0;
  }
  socket_name[0] = 0;
}

__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, after_fork); }

__attribute__((destructor)) static void unload(void) {
  if (*shim_alive == 0 || socket_name[0] == 0)
    return;
  unlink(socket_name);
  *strrchr(socket_name, '/') = 0;
  rmdir(socket_name); /* unless others have theirs there */
}

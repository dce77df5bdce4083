//go:build linux && cgo

/* What belongs to a process or a thread rather than to a call: the guard against fork, the last failure of each thread,
 * and the trampolines by which Go calls functions of the host program. */
#define _GNU_SOURCE
#include "shim.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

__thread shim_thread *shim_self;

/* Until the constructor below has run nothing can call in; a page that cannot be mapped leaves this word. */
static volatile uint32_t alive_word = 1;
volatile uint32_t *shim_alive = &alive_word;

static pthread_key_t thread_key;
static int thread_key_made;

/* In a child of fork only the thread that forked exists, and none of Go's: whatever needs another goroutine, or a
 * collection, hangs. The kernel empties the page in every child, one made by a raw clone too; the handler does the same
 * where the kernel is older than 4.14. */
static void after_fork(void) { *shim_alive = 0; }

static void thread_end(void *p) {
  shim_thread *t = p;
  shim_self = NULL;
  shim_unready(t);
  free(t->tags);
  free(t->report);
  free(t);
}

__attribute__((constructor)) static void shim_load(void) {
  void *page = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page != MAP_FAILED) {
    madvise(page, (size_t)sysconf(_SC_PAGESIZE), MADV_WIPEONFORK); /* refused by old kernels, harmlessly */
    shim_alive = page;
    *shim_alive = 1;
  }
  pthread_atfork(NULL, NULL, after_fork);
  thread_key_made = pthread_key_create(&thread_key, thread_end) == 0;
}

shim_thread *shim_thread_get(void) {
  shim_thread *t = shim_self;
  if (t == NULL) {
    t = calloc(1, sizeof *t);
    if (t == NULL)
      return NULL;
    if (thread_key_made)
      pthread_setspecific(thread_key, t);
    shim_self = t;
  }
  return t;
}

int shim_fail(int code, const char *words, size_t n) {
  shim_thread *t = shim_thread_get();
  if (t != NULL) {
    t->code = code;
    t->has_oom = 0;
    free(t->report);
    t->report = NULL;
    if (n >= sizeof t->words) {
      n = sizeof t->words - 1;
      while (n > 0 && ((unsigned char)words[n] & 0xc0) == 0x80) /* no half characters */
        n--;
    }
    memcpy(t->words, words, n);
    t->words[n] = 0;
  }
  return code;
}

int shim_fail_oom(const cistern_oom *oom, const char *words, size_t n) {
  shim_fail(CISTERN_OUT_OF_MEMORY, words, n);
  if (shim_self != NULL) {
    shim_self->oom = *oom;
    shim_self->has_oom = 1;
  }
  return CISTERN_OUT_OF_MEMORY;
}

void shim_report(const char *path, size_t n) {
  if (shim_self != NULL) {
    free(shim_self->report);
    shim_self->report = strndup(path, n);
  }
}

void shim_failed(uintptr_t which) {
  if (shim_self != NULL) /* there is one: the failure's words are in it */
    shim_self->failed = which;
}

/* A function that allocates although it must not, and finds no memory, is not called for that: it would never end. */
int shim_call_oom(uintptr_t fn, uintptr_t ctx, int device, uint64_t missing) {
  shim_thread *t = shim_thread_get();
  if (t == NULL || t->calling)
    return 0;
  t->calling = 1;
  int helped = ((int (*)(void *, int, uint64_t))fn)((void *)ctx, device, missing);
  t->calling = 0;
  return helped;
}

void shim_call_range(uintptr_t fn, uintptr_t ctx, int device, uintptr_t addr, size_t size) {
  ((void (*)(void *, int, void *, size_t))fn)((void *)ctx, device, (void *)addr, size);
}

uintptr_t shim_call_alloc(uintptr_t fn, uintptr_t ctx, size_t size, int device, uintptr_t stream) {
  return (uintptr_t)((void *(*)(void *, size_t, int, void *))fn)((void *)ctx, size, device, (void *)stream);
}

void shim_call_free(uintptr_t fn, uintptr_t ctx, uintptr_t ptr, size_t size, int device, uintptr_t stream) {
  ((void (*)(void *, void *, size_t, int, void *))fn)((void *)ctx, (void *)ptr, size, device, (void *)stream);
}

const char *shim_getenv(const char *name) { return secure_getenv(name); }

uint64_t shim_thread_id(void) { return (uint64_t)syscall(SYS_gettid); }

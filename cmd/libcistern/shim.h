//go:build linux && cgo

/* What the C shim and the Go code behind it know of each other. */
#ifndef CISTERN_SHIM_H
#define CISTERN_SHIM_H

#include "cistern.h"

/* What one thread has: the words and figures of its last failure, its tags. Made when there is first something to keep,
 * freed when the thread ends. */
typedef struct shim_thread {
  int code;
  cistern_oom oom;
  int has_oom;
  int calling; /* within a function registered by cistern_on_out_of_memory */
  int ready;   /* the thread may call into Go: see ready.c */
  void *alternate; /* the alternate signal stack that it has from there, NULL: none */
  uint32_t *tags; /* a stack */
  size_t num_tags, cap_tags;
  uint32_t id;     /* the kernel's number of it; 0 until it was asked */
  uintptr_t failed; /* the request that has just failed, for coreFailed; 0: none, or not recorded */
  uint64_t random; /* which of its small requests have their stacks taken; 0 until the first */
  char *report;    /* the file of its last failure, NULL: none */
  char words[2048];
} shim_thread;

/* The calling thread's, NULL where it has none yet. An initial-exec thread-local of 8 bytes is all that the shim takes of
 * what dlopen has to share out. */
extern __thread shim_thread *shim_self __attribute__((visibility("hidden"), tls_model("initial-exec")));

/* shim_alive points to a word that is 1 in a process that may call into Go, 0 in a child of fork. */
extern volatile uint32_t *shim_alive __attribute__((visibility("hidden")));

/* shim_ready comes before every call into Go, and is 0, with a failure kept, where there may be none. All but the first of a thread
 * cost one branch. */
int shim_make_ready(void) __attribute__((visibility("hidden")));
static inline int shim_ready(void) {
  const shim_thread *t = shim_self;
  return __builtin_expect(t != NULL && t->ready, 1) || shim_make_ready();
}
/* shim_unready is for a thread that ends. */
void shim_unready(shim_thread *t) __attribute__((visibility("hidden")));

/* shim_thread_get is shim_self, made if need be; NULL without memory. */
shim_thread *shim_thread_get(void) __attribute__((visibility("hidden")));

/* What cistern_pool_create was given, as numbers: to Go's collector a pointer that looks like one of its own is a bug. */
typedef struct shim_pool {
  uint32_t flags;
  uintptr_t alloc, free, ctx;
  const char *upstream, *spill;
  uint64_t limit;
  uintptr_t oom, oom_ctx;
} shim_pool;

/* shim_fail keeps a failure for cistern_last_error and returns its code. The words need no final 0. */
int shim_fail(int code, const char *words, size_t n) __attribute__((visibility("hidden")));
/* shim_fail_oom keeps the figures of an out-of-memory error as well. */
int shim_fail_oom(const cistern_oom *oom, const char *words, size_t n) __attribute__((visibility("hidden")));

/* shim_report keeps the name of the file of the thread's last failure. */
void shim_report(const char *path, size_t n) __attribute__((visibility("hidden")));

/* shim_failed leaves word of a request that failed for the function that made it; which is no pointer to C. */
void shim_failed(uintptr_t which) __attribute__((visibility("hidden")));

/* shim_tag is the calling thread's innermost tag, 0 where there is none. */
static inline uint32_t shim_tag(void) {
  shim_thread *t = shim_self;
  return t && t->num_tags ? t->tags[t->num_tags - 1] : 0;
}

/* Go cannot call C functions by their address; these do it for Go, to which functions and their contexts are numbers. */
int shim_call_oom(uintptr_t fn, uintptr_t ctx, int device, uint64_t missing) __attribute__((visibility("hidden")));
void shim_call_range(uintptr_t fn, uintptr_t ctx, int device, uintptr_t addr, size_t size) __attribute__((visibility("hidden")));
uintptr_t shim_call_alloc(uintptr_t fn, uintptr_t ctx, size_t size, int device, uintptr_t stream) __attribute__((visibility("hidden")));
void shim_call_free(uintptr_t fn, uintptr_t ctx, uintptr_t ptr, size_t size, int device, uintptr_t stream) __attribute__((visibility("hidden")));

/* What sharing memory leaves in the process, for guard.c: descriptors that a child of fork closes, and the name of a socket
 * that is removed at exit. */
void shim_share_opened(int fd) __attribute__((visibility("hidden")));
void shim_share_closing(int fd) __attribute__((visibility("hidden")));
void shim_share_listening(const char *path, size_t n) __attribute__((visibility("hidden")));

/* This library as the dynamic linker has mapped it, and what of that may be written: up to filled it comes from the file. */
typedef struct shim_data {
  uintptr_t low, high, from, filled, to;
} shim_data;
void shim_find_data(shim_data *d) __attribute__((visibility("hidden")));

/* shim_functions looks among the variables in [from, to) for three values of functions in a row, as Go has them, behind a word of 0:
 * it returns the address of the first, 0 where there are no more, and where their code is. */
uintptr_t shim_functions(const shim_data *d, uintptr_t from, uintptr_t to, uintptr_t code[3]) __attribute__((visibility("hidden")));

/* shim_getenv is getenv, as Go's own view of the environment is as old as the library's loading. In a program with more rights
 * than its user's there is no variable: see internal/environ. */
const char *shim_getenv(const char *name) __attribute__((visibility("hidden")));
/* shim_thread_id tells threads apart. */
uint64_t shim_thread_id(void) __attribute__((visibility("hidden")));

#endif

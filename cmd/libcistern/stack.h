//go:build linux && cgo

/* The caller of a request: the thread's number and the stacks of its native and Python functions, as numbers, taken before any
 * lock and any call into Go. See stack.c. */
#ifndef CISTERN_STACK_H
#define CISTERN_STACK_H

#include "shim.h"

/* What requests and frees have to look for beside their business: 0 for most programs, which pay for reading this and no
 * more. */
enum {
  WATCH_NATIVE = CISTERN_STACKS_NATIVE,
  WATCH_PYTHON = CISTERN_STACKS_PYTHON,
  WATCH_EVENTS = 4, /* histories are kept, which tell threads apart */
  WATCH_START = 8   /* the library has not started: its settings may say more */
};
extern uint32_t stack_watch __attribute__((visibility("hidden"), aligned(64)));

static inline uint32_t stack_watched(void) { return __atomic_load_n(&stack_watch, __ATOMIC_RELAXED); }

/* On whose behalf a request is made. */
enum { STACK_NATIVE_MOST = 64, STACK_PYTHON_MOST = 64 };
typedef struct stack_origin {
  uint32_t thread; /* the kernel's number */
  uint32_t n;      /* frames, innermost first */
  uint64_t frames[STACK_NATIVE_MOST + STACK_PYTHON_MOST];
} stack_origin;

/* A frame is an address that a function returns to, or, with this bit, the number of a place in Python source. */
#define STACK_PYTHON ((uint64_t)1 << 63)

/* stack_thread is the calling thread's number, asked of the kernel once. */
uint32_t stack_thread(void) __attribute__((visibility("hidden")));

/* stack_take records the caller of a request for so many bytes: the thread, and the stack if the request is one of those that have theirs
 * taken. */
void stack_take(stack_origin *to, uint32_t watch, uint64_t size) __attribute__((visibility("hidden")));

/* stack_take_failed is stack_take for a request that has failed: also where stacks are not taken,
 * of the kinds that are available. */
void stack_take_failed(stack_origin *to) __attribute__((visibility("hidden")));
/* stack_prepare makes that possible. */
void stack_prepare(void) __attribute__((visibility("hidden")));

/* For Go. stack_set has the stacks of these kinds taken from now on and returns 0, or else the kind that cannot be taken and
 * why, and nothing has changed. stack_watch_set is for the other bits. */
uint32_t stack_set(uint32_t kinds, uint64_t sample, const char **why) __attribute__((visibility("hidden")));
void stack_watch_set(uint32_t bit, int on) __attribute__((visibility("hidden")));
/* stack_taken reports whether stacks are taken. */
int stack_taken(void) __attribute__((visibility("hidden")));
/* stack_place is what a place in Python source is called; the strings stay. */
typedef struct stack_python_place {
  const char *file, *function;
  int32_t line;
} stack_python_place;
int stack_place(uint64_t frame, stack_python_place *out) __attribute__((visibility("hidden")));
/* stack_demangle is the name of a C++ function as people write it, to be freed; NULL where the process has nothing that
 * can tell, or where it is no such name. stack_find_demangler looks for what can tell, and is to be called with no lock held. */
void stack_find_demangler(void) __attribute__((visibility("hidden")));
char *stack_demangle(const char *name) __attribute__((visibility("hidden")));

#endif

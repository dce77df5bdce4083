//go:build linux && cgo

/* Stacks of callers of requests. They are taken in the calling thread before anything else is done, as numbers:
 * native frames by the unwinder of the C compiler's runtime, which is looked up when stacks are switched on, so that the
 * library needs it no sooner; Python's by pystack.c, which needs neither Python's headers nor its lock. What they are
 * called is found out when they are read, but for Python (places.c), whose code may be gone by then.
 *
 * With both kinds a stack is the native frames up to where the interpreter begins, and then Python's: what the interpreter
 * does between two functions says nothing that they do not. */
#define _GNU_SOURCE
#include "stack.h"
#include "launch.h"
#include "places.h"
#include "pystack.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <unwind.h>

uint32_t stack_watch = WATCH_START;

uint32_t stack_thread(void) {
  shim_thread *t = shim_thread_get();
  if (t == NULL)
    return (uint32_t)shim_thread_id();
  if (t->id == 0)
    t->id = (uint32_t)shim_thread_id();
  return t->id;
}

/* ---- which requests ---- */

static uint64_t sample; /* those of at least so many bytes always, others by their share of it */

/* sampled decides by a number that no other thread takes part in (xorshift64*). */
static int sampled(uint64_t size) {
  uint64_t every = __atomic_load_n(&sample, __ATOMIC_RELAXED);
  if (size >= every)
    return 1;
  shim_thread *t = shim_thread_get();
  if (t == NULL)
    return 0;
  uint64_t x = t->random;
  if (x == 0)
    x = (shim_thread_id() + 1) * 0x9e3779b97f4a7c15u ^ (uintptr_t)t; /* another one in every thread */
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  t->random = x;
  return (uint64_t)((unsigned __int128)(x * 0x2545f4914f6cdd1du) * every >> 64) < size;
}

/* ---- native frames ---- */

/* What is used of the compiler's runtime. */
static _Unwind_Reason_Code (*unwind)(_Unwind_Trace_Fn, void *);
static _Unwind_Ptr (*address)(struct _Unwind_Context *, int *);

typedef struct range {
  uintptr_t from, to;
} range;

static range interpreter; /* the code of Python's */
enum { OURS_MOST = 4 };
static range ours[OURS_MOST]; /* of this library, and of those that stand between it and PyTorch */

static inline int within(const range *r, uintptr_t pc) { return pc - r->from < r->to - r->from; }

static inline int is_ours(uintptr_t pc) {
  for (int i = 0; i < OURS_MOST && ours[i].to != 0; i++)
    if (within(&ours[i], pc))
      return 1;
  return 0;
}

struct walk {
  uint64_t *frames;
  int n, outside; /* outside: our own frames lie behind */
  int python;     /* it ends where the interpreter begins */
};

static _Unwind_Reason_Code visit(struct _Unwind_Context *context, void *arg) {
  struct walk *w = arg;
  int exact = 0; /* 1: where a signal came in, not where a function returns to */
  uintptr_t pc = address(context, &exact);
  if (pc == 0 || w->n == STACK_NATIVE_MOST)
    return _URC_END_OF_STACK;
  if (!w->outside && is_ours(pc))
    return _URC_NO_REASON;
  w->outside = 1;
  if (w->python && within(&interpreter, pc))
    return _URC_END_OF_STACK;
  w->frames[w->n++] = pc + (exact != 0);
  return _URC_NO_REASON;
}

/* code is the code of an object, nothing where it has none. */
static range code(const struct dl_phdr_info *info) {
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *p = &info->dlpi_phdr[i];
    if (p->p_type == PT_LOAD && (p->p_flags & PF_X) != 0)
      return (range){info->dlpi_addr + p->p_vaddr, info->dlpi_addr + p->p_vaddr + p->p_memsz};
  }
  return (range){0, 0};
}

struct code_at {
  uintptr_t addr;
  range found;
};

static int look_for_code(struct dl_phdr_info *info, size_t size, void *arg) {
  (void)size;
  struct code_at *at = arg;
  range r = code(info);
  if (!within(&r, at->addr))
    return 0;
  at->found = r;
  return 1;
}

struct ours {
  range list[OURS_MOST];
  int n;
};

/* look_for_ours finds this library, whatever it is called, and those whose names begin as its own does: what stands between it
 * and PyTorch, which is loaded before anything is asked for. */
static int look_for_ours(struct dl_phdr_info *info, size_t size, void *arg) {
  (void)size;
  struct ours *o = arg;
  range r = code(info);
  const char *name = strrchr(info->dlpi_name, '/');
  name = name != NULL ? name + 1 : info->dlpi_name;
  if (o->n < OURS_MOST && r.to != 0 &&
      (within(&r, (uintptr_t)look_for_ours) || strncmp(name, "libcistern", strlen("libcistern")) == 0))
    o->list[o->n++] = r;
  return 0;
}

/* What was found is written down under this lock. It is not held while anything is looked for: the dynamic linker has a lock
 * of its own, and calls constructors with it, which may ask this library for something. */
static pthread_mutex_t setting = PTHREAD_MUTEX_INITIALIZER;

/* no_descriptor reports whether no file can be opened, whichever it is: dlopen says why it failed in words only. */
static int no_descriptor(void) {
  int fd = open("/", O_PATH | O_CLOEXEC);
  if (fd >= 0)
    close(fd);
  return fd < 0 && (errno == EMFILE || errno == ENFILE);
}

static const char *find_unwinder(void) {
  if (__atomic_load_n(&unwind, __ATOMIC_ACQUIRE) != NULL)
    return NULL;
  void *lib = dlopen("libgcc_s.so.1", RTLD_NOW | RTLD_LOCAL);
  if (lib == NULL)
    return no_descriptor() ? "libgcc_s.so.1, which finds them, cannot be opened: the process has no file descriptor left"
                           : "libgcc_s.so.1, which finds them, is not here";
  void *walk = dlsym(lib, "_Unwind_Backtrace"), *get = dlsym(lib, "_Unwind_GetIPInfo");
  if (walk == NULL || get == NULL)
    return "libgcc_s.so.1 has no _Unwind_Backtrace";
  struct ours o = {0};
  dl_iterate_phdr(look_for_ours, &o);
  pthread_mutex_lock(&setting);
  if (unwind == NULL) {
    memcpy(ours, o.list, sizeof ours);
    address = (_Unwind_Ptr(*)(struct _Unwind_Context *, int *))(uintptr_t)get;
    __atomic_store_n(&unwind, (_Unwind_Reason_Code(*)(_Unwind_Trace_Fn, void *))(uintptr_t)walk, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&setting);
  return NULL;
}

/* ---- Python frames ---- */

static struct pystack python;
static struct pystack_learned python_learned;
static int python_found = PYSTACK_EARLY; /* enum pystack_found; PYSTACK_FOUND is written last */
static uint32_t python_asked;

static void *symbol(const char *name, void *ctx) {
  (void)ctx;
  return dlsym(RTLD_DEFAULT, name);
}

static int searching(int found) { return found == PYSTACK_MISSING || found == PYSTACK_EARLY; }

/* find_python returns an enum pystack_found. */
static int find_python(void) {
  int found = __atomic_load_n(&python_found, __ATOMIC_ACQUIRE);
  if (!searching(found))
    return found;
  struct pystack p;
  struct code_at its = {0};
  found = pystack_find(&p, &python_learned, symbol, NULL);
  if (found == PYSTACK_FOUND) {
    its.addr = (uintptr_t)p.thread;
    dl_iterate_phdr(look_for_code, &its);
  }
  pthread_mutex_lock(&setting);
  if (searching(python_found)) {
    if (found == PYSTACK_FOUND) {
      python = p;
      interpreter = its.found;
    }
    __atomic_store_n(&python_found, found, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&setting);
  return __atomic_load_n(&python_found, __ATOMIC_ACQUIRE);
}

/* refuse_python says why there are no frames of the Python that was found, NULL where there may be, now or later. */
static const char *refuse_python(int found) {
  if (found == PYSTACK_FOUND)
    found = pystack_state(&python);
  if (found != PYSTACK_FOUND && found != PYSTACK_MISSING && found != PYSTACK_EARLY)
    return pystack_why(found);
  return places_open() != 0 ? "no host memory for their names" : NULL;
}

/* say_python tells people, once, that there are no frames although they were asked for. */
static __attribute__((cold)) void say_python(int found) {
  static uint32_t said;
  const char *why = refuse_python(found);
  if (why == NULL || __atomic_exchange_n(&said, 1, __ATOMIC_RELAXED) != 0)
    return;
  char line[256];
  int n = snprintf(line, sizeof line, "cistern: stacks of Python's functions: %s\n", why);
  launch_say(line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

/* take_python is the calling thread's Python frames. An interpreter that comes later is found in a while. */
static int take_python(uint64_t *frames) {
  if (__atomic_load_n(&python_found, __ATOMIC_ACQUIRE) != PYSTACK_FOUND) {
    if (__atomic_fetch_add(&python_asked, 1, __ATOMIC_RELAXED) % 1024 != 0)
      return 0;
    int found = find_python();
    if (found != PYSTACK_FOUND) {
      say_python(found);
      return 0;
    }
  }
  struct pyframe at[STACK_PYTHON_MOST];
  int n = pystack_walk(&python, at, STACK_PYTHON_MOST);
  if (n <= 0 && pystack_state(&python) != PYSTACK_FOUND)
    say_python(PYSTACK_FOUND); /* what its objects look like is seen when they are */
  for (int i = 0; i < n; i++)
    frames[i] = STACK_PYTHON | places_number(&python, &at[i]);
  return n > 0 ? n : 0;
}

/* ---- both ---- */

/* take takes the stack of the calling thread. */
static void take(stack_origin *to, uint32_t kinds) {
  uint64_t inner[STACK_PYTHON_MOST];
  int n = kinds & WATCH_PYTHON ? take_python(inner) : 0;
  _Unwind_Reason_Code (*all)(_Unwind_Trace_Fn, void *) = __atomic_load_n(&unwind, __ATOMIC_ACQUIRE);
  if (kinds & WATCH_NATIVE && all != NULL) {
    struct walk w = {to->frames, 0, 0, n > 0};
    all(visit, &w);
    to->n = (uint32_t)w.n;
  }
  memcpy(to->frames + to->n, inner, (size_t)n * sizeof *inner);
  to->n += (uint32_t)n;
}

void stack_take(stack_origin *to, uint32_t watch, uint64_t size) {
  to->thread = stack_thread();
  to->n = 0;
  if ((watch & (WATCH_NATIVE | WATCH_PYTHON)) != 0 && size != 0 && sampled(size))
    take(to, watch);
}

static uint32_t prepared; /* kinds */

void stack_take_failed(stack_origin *to) {
  uint32_t kinds = stack_watched() & (WATCH_NATIVE | WATCH_PYTHON);
  to->thread = stack_thread();
  to->n = 0;
  take(to, kinds != 0 ? kinds : __atomic_load_n(&prepared, __ATOMIC_ACQUIRE));
}

void stack_prepare(void) {
  uint32_t kinds = find_unwinder() == NULL ? WATCH_NATIVE : 0;
  if (refuse_python(find_python()) == NULL)
    kinds |= WATCH_PYTHON;
  __atomic_store_n(&prepared, kinds, __ATOMIC_RELEASE);
}

void stack_watch_set(uint32_t bit, int on) {
  if (on)
    __atomic_fetch_or(&stack_watch, bit, __ATOMIC_RELAXED);
  else
    __atomic_fetch_and(&stack_watch, ~bit, __ATOMIC_RELAXED);
}

uint32_t stack_set(uint32_t kinds, uint64_t bytes, const char **why) {
  if (kinds & WATCH_NATIVE && (*why = find_unwinder()) != NULL)
    return WATCH_NATIVE;
  if (kinds & WATCH_PYTHON && (*why = refuse_python(find_python())) != NULL)
    return WATCH_PYTHON;
  pthread_mutex_lock(&setting);
  __atomic_store_n(&sample, bytes, __ATOMIC_RELAXED);
  uint32_t now = stack_watched();
  while (!__atomic_compare_exchange_n(&stack_watch, &now, (now & ~(uint32_t)(WATCH_NATIVE | WATCH_PYTHON)) | kinds, 0,
                                      __ATOMIC_RELEASE, __ATOMIC_RELAXED))
    ;
  pthread_mutex_unlock(&setting);
  return 0;
}

int stack_taken(void) { return (stack_watched() & (WATCH_NATIVE | WATCH_PYTHON)) != 0; }

/* ---- names of C++ ---- */

static char *(*demangle)(const char *, char *, size_t *, int *);

void stack_find_demangler(void) {
  if (__atomic_load_n(&demangle, __ATOMIC_ACQUIRE) != NULL)
    return;
  /* A program with functions in C++ has its runtime; one that has none is not given one. */
  void *lib = dlopen("libstdc++.so.6", RTLD_NOLOAD | RTLD_NOW);
  void *f = dlsym(lib != NULL ? lib : RTLD_DEFAULT, "__cxa_demangle");
  __atomic_store_n(&demangle, (char *(*)(const char *, char *, size_t *, int *))(uintptr_t)f, __ATOMIC_RELEASE);
}

char *stack_demangle(const char *name) {
  char *(*f)(const char *, char *, size_t *, int *) = __atomic_load_n(&demangle, __ATOMIC_ACQUIRE);
  int status = 0;
  return f != NULL && name[0] == '_' && name[1] == 'Z' ? f(name, NULL, NULL, &status) : NULL;
}

/* What every function of cistern.h begins with: see shim.c. */
#ifndef CISTERN_SHIM_GUARD_H
#define CISTERN_SHIM_GUARD_H

#include "shim.h"

#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
#define ALIVE() __builtin_expect(*shim_alive != 0, 1)

static inline int forked(void) {
  static const char words[] = "this process is a child of fork, which cannot use the GPU memory of its parent: start "
                              "such processes with spawn or forkserver instead";
  return shim_fail(CISTERN_FORKED, words, sizeof words - 1);
}

static inline int invalid(const char *words) { return shim_fail(CISTERN_INVALID, words, strlen(words)); }

/* Every function has GUARD before its call into Go, or GUARD_FORK first and READY only where it comes to that call. Handles
 * and device addresses are numbers to Go, whose collector would take them for pointers of its own. */
#define GUARD_FORK  \
  if (!ALIVE())     \
    return forked()
#define READY         \
  if (!shim_ready())  \
    return CISTERN_UNSUPPORTED
#define GUARD       \
  GUARD_FORK;       \
  READY
#define NEED(arg)                                              \
  if ((arg) == NULL)                                           \
    return invalid(#arg " is NULL: expected where to write")

/* SIZED copies the options that a caller passed. Its header may be older, with fewer fields, or newer, with more;
 * the fields before the one named were always there. */
#define SIZED(to, options, later)                                                                                   \
  do {                                                                                                              \
    uint32_t size_ = (options)->size;                                                                               \
    if (size_ < offsetof(__typeof__(to), later))                                                                    \
      return invalid("options.size is too small: set it to sizeof *options");                                       \
    if (size_ > sizeof(to))                                                                                         \
      return invalid("options.size is larger than this library's: the program was compiled with a newer cistern.h"); \
    if (size_ % sizeof(void *) != 0)                                                                                \
      return invalid("options.size ends within a field: set it to sizeof *options");                                \
    memcpy(&(to), options, size_);                                                                                  \
  } while (0)

#endif

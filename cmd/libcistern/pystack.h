//go:build linux && cgo

/* The Python frames of the calling thread, read without Python: no header of it is needed and none of its locks is taken.
 *
 * A thread that is in the driver, or in an allocator, may hold a lock for which the thread that has the GIL waits, as
 * PyTorch's allocator does; to ask for the GIL there would be a deadlock. It is not needed either: the frames of a thread
 * change only while it runs Python, and each holds its code object, so that what a thread reads of its own frames stays
 * as it is until it returns.
 *
 * Nothing here needs a C library, memory or thread-local storage: the audit library, which has none of them, is built
 * from the same file. */
#ifndef CISTERN_PYSTACK_H
#define CISTERN_PYSTACK_H

#include <stddef.h>
#include <stdint.h>

/* Why there are no Python frames. */
enum pystack_found {
  PYSTACK_FOUND,
  PYSTACK_MISSING,        /* no Python in this process */
  PYSTACK_EARLY,         /* it is not initialised yet: ask again */
  PYSTACK_VERSION,       /* not one from 3.10 to 3.14 */
  PYSTACK_FREE_THREADED, /* built without the GIL, where others may change what a thread reads */
  PYSTACK_LAYOUT,        /* what its objects look like is not what its version says: a build with other options */
};

enum { PYSTACK_LINES = 2048 };

/* What walks have learned of an interpreter. All threads share it; it begins as zeros, and is for one interpreter. */
struct pystack_learned {
  uint32_t state;                /* of what is known of the layout */
  uint64_t lines[PYSTACK_LINES]; /* that were looked up last */
};

/* One interpreter: where its functions and types are, and where its objects have what is read of them. Nothing of it changes
 * once it is found. */
struct pystack {
  struct pystack_learned *learned;
  void *(*thread)(void);
  int (*finalizing)(void);
  const void *code_type, *string_type, *bytes_type, *frame_type;
  uint32_t version; /* 0x030c for 3.12 */
  uint16_t thread_frame, cframe, frame_code, frame_back, frame_at, frame_owner, frame_line;
  uint16_t code_file, code_name, code_table, code_line, code_start, code_traceable, string_ascii, string_wide;
};

struct pyframe {
  const void *code;
  uint64_t id;               /* of the code object: another one that is made where it was has another id */
  uint32_t line, first_line; /* 0 where the code has none */
};

/* Finds Python by its symbols; lookup gives the address of one, or NULL. Returns why not, or PYSTACK_FOUND. Threads may look at
 * the same time, each for itself; what they find is the same. */
int pystack_find(struct pystack *p, struct pystack_learned *learned, void *(*lookup)(const char *name, void *ctx), void *ctx);

/* The frames of the calling thread, innermost first, at most cap; as Python's own traceback has them. */
int pystack_walk(const struct pystack *p, struct pyframe *out, int cap);

/* The names of a frame, in UTF-8, ended by 0: the file (its end, where it is too long) and the function, qualified from
 * Python 3.11 on. To be asked within the call that the frame was found in. Returns 0 where there are none. */
int pystack_names(const struct pystack *p, const struct pyframe *f, char *file, size_t file_size, char *func, size_t func_size);

/* What is known of an interpreter that was found, after walks: PYSTACK_FOUND or PYSTACK_LAYOUT. */
int pystack_state(const struct pystack *p);

/* A reason in words, to stand behind a colon. */
const char *pystack_why(int found);

#endif

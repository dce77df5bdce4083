//go:build linux && cgo

/* Fronts, in C: requests and frees that need no call into Go. What they are is said in internal/front, whose structures
 * are the same as these, field by field; front.go holds one against the other before the first is used. */
#ifndef CISTERN_FRONT_H
#define CISTERN_FRONT_H

#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))

enum { FRONT_SLOTS = 16, FRONT_CLASSES = 2, FRONT_POLL_EVERY = 16 };

typedef struct front_amount {
  int64_t blocks, bytes, requested;
} front_amount;

typedef struct front_entry {
  uint64_t addr, requested, stamp;
} front_entry;

typedef struct front {
  uint32_t word; /* 1 while locked */
  uint32_t count;
  front_amount net[FRONT_CLASSES];
  uint32_t polls, index;
  front_amount taken[FRONT_CLASSES];
  uint8_t gap1[16];
  front_amount puts[FRONT_CLASSES + 1], takes[FRONT_CLASSES + 1];
  uint64_t epoch, mask, small_max;
  uint32_t routed;
  uint8_t gap2[20];
  front_entry tray[FRONT_SLOTS];
} front;

typedef struct front_flags {
  uint32_t quick, waiting;
  uint8_t gap[120];
} front_flags;

/* The offsets of front's fields and its size, as internal/front has them. */
enum { FRONT_LAYOUT = 16 };
extern const uint64_t front_layout[FRONT_LAYOUT] HIDDEN;

/* front_take meets a request from the tray of the stream's front; NULL if Go must. */
void *front_take(uint64_t size, int device, void *stream) HIDDEN;
/* front_put takes a block back into the tray; 0 if Go must. Either way the block is unknown here afterwards. */
int front_put(void *ptr) HIDDEN;
/* front_forget makes the block's free Go's business. */
void front_forget(void *ptr) HIDDEN;
/* front_know says that Go has handed a block out that front_put may take back, and which front is the stream's. */
void front_know(void *ptr, uint64_t size, int device, void *stream, uint32_t index) HIDDEN;

/* For Go: makes a front known by an index above 0; at most FRONT_MAX are. */
enum { FRONT_MAX = 4095 };
void front_add(uint32_t index, front *f, const front_flags *flags) HIDDEN;

#endif

//go:build linux && cgo

/* Fronts, in C: requests and frees that need no call into Go. What they are is said in internal/magazine, whose structures
 * are the same as these, field by field; front.go holds one against the other before the first is used. */
#ifndef CISTERN_FRONT_H
#define CISTERN_FRONT_H

#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))

enum {
  FRONT_SLOTS = 16,
  FRONT_CLASSES = 2,
  FRONT_POLL_EVERY = 16,
  FRONT_MARK_BITS = 12,
  FRONT_TURNS_MANY = 16,
  FRONT_TURNS_MOST = 64,
  FRONT_AGE_SHARED = 64,
  FRONT_CONSTANTS = 7
};
extern const int front_constants[FRONT_CONSTANTS] HIDDEN;

typedef struct front_amount {
  int64_t blocks, bytes, requested;
} front_amount;

typedef struct front_entry {
  uint64_t addr, requested, stamp;
  uint32_t mark, gap;
} front_entry;

typedef struct front {
  uint32_t word; /* 1 while locked */
  uint32_t count;
  front_amount net[FRONT_CLASSES];
  uint64_t owner;
  front_amount taken[FRONT_CLASSES];
  uint32_t polls, turns;
  uint8_t gap1[8];
  front_amount puts[FRONT_CLASSES + 1], takes[FRONT_CLASSES + 1];
  int64_t frees[FRONT_CLASSES];
  uint64_t epoch, mask, small_max;
  uint32_t version, limited, routed, index;
  uint8_t gap2[56];
  front_entry tray[FRONT_SLOTS];
} front;

typedef struct front_flags {
  uint32_t quick, waiting;
  uint8_t gap[120];
} front_flags;

/* The offsets of front's fields and its size, as internal/magazine has them. */
enum { FRONT_LAYOUT = 22 };
extern const uint64_t front_layout[FRONT_LAYOUT] HIDDEN;

/* front_take meets a request from the tray of the stream's front; NULL if Go must. It says also whether the stream is
 * known to have a front. */
void *front_take(uint64_t size, int device, void *stream, int *known) HIDDEN;
/* front_put takes a block back into the tray; 0 if Go must. Either way the block is unknown here afterwards. */
int front_put(void *ptr) HIDDEN;
/* front_put_on is front_put for a block that is given back on this stream: only into the tray of that stream's front. */
int front_put_on(void *ptr, void *stream) HIDDEN;
/* front_forget makes the block's free Go's business; front_forget_all that of all blocks, if rarely. */
void front_forget(void *ptr) HIDDEN;
void front_forget_all(void) HIDDEN;
/* front_know says that Go has handed a block out with a ticket, not 0, since front_turn returned turn: front_put may take it
 * back. front_know_stream says that the ticket's front is the stream's. */
void front_know(void *ptr, uint64_t size, uint32_t ticket, uint64_t turn) HIDDEN;
void front_know_stream(int device, void *stream, uint32_t ticket) HIDDEN;

/* For Go: makes a front known by an index above 0; at most FRONT_MAX are. */
enum { FRONT_MAX = 4095 };
void front_add(uint32_t index, front *f, const front_flags *flags) HIDDEN;
/* front_stop leaves every request and every free to Go from now on: after a bug there, which has to be said. */
void front_stop(void) HIDDEN;

/* Between front_hold and front_release frees are Go's business, and what is handed out stays that; front_forget_all meanwhile
 * makes it so of all that was handed out before. For threads that take memory away from live blocks, or free blocks of others,
 * so that none of these comes into a tray.
 *
 * front_turn is a number that differs after every front_hold. Its lower half is how many threads hold, the upper half how
 * many ever did. A block is remembered, or put into a tray, only if the lower half was 0 before the block was handed out, or
 * before its entry was taken, and the number is the same at the end. */
void front_hold(void) HIDDEN;
void front_release(void) HIDDEN;
uint64_t front_turn(void) HIDDEN;

#endif

//go:build linux && cgo

/* Magazines, in C: requests and frees that need no call into Go. internal/magazine has the design and the same structures,
 * field by field; magazine.go compares both before the first magazine is used. */
#ifndef CISTERN_MAGAZINE_H
#define CISTERN_MAGAZINE_H

#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))

enum {
  MAGAZINE_CAPACITY = 16,
  MAGAZINE_CLASSES = 2,
  MAGAZINE_POLL_EVERY = 16,
  MAGAZINE_MARK_BITS = 12,
  MAGAZINE_TURNS_MANY = 16,
  MAGAZINE_TURNS_MOST = 64,
  MAGAZINE_AGE_SHARED = 64,
  MAGAZINE_CONSTANTS = 7
};
extern const int magazine_constants[MAGAZINE_CONSTANTS] HIDDEN;

typedef struct magazine_amount {
  int64_t blocks, bytes, requested;
} magazine_amount;

typedef struct magazine_slot {
  uint64_t addr, requested, stamp;
  uint32_t mark, gap;
} magazine_slot;

typedef struct magazine {
  uint32_t word; /* 1 while locked */
  uint32_t count;
  magazine_amount net[MAGAZINE_CLASSES];
  uint64_t owner;
  magazine_amount taken[MAGAZINE_CLASSES];
  uint32_t polls, turns;
  uint8_t gap1[8];
  magazine_amount puts[MAGAZINE_CLASSES + 1], takes[MAGAZINE_CLASSES + 1];
  int64_t frees[MAGAZINE_CLASSES];
  uint64_t epoch, mask, small_max;
  uint32_t version, limited, routed, index;
  uint8_t gap2[56];
  magazine_slot slots[MAGAZINE_CAPACITY];
} magazine;

typedef struct magazine_flags {
  uint32_t quick, waiting;
  uint8_t gap[120];
} magazine_flags;

/* The offsets of magazine's fields and its size, as internal/magazine has them. */
enum { MAGAZINE_LAYOUT = 22 };
extern const uint64_t magazine_layout[MAGAZINE_LAYOUT] HIDDEN;

/* magazine_take meets a request from the stream's magazine; NULL if Go must. It says also whether the stream is
 * known to have a magazine. */
void *magazine_take(uint64_t size, int device, void *stream, int *known) HIDDEN;
/* magazine_put takes a block back into the magazine; 0 if Go must. Either way the block is unknown here afterwards. */
int magazine_put(void *ptr) HIDDEN;
/* magazine_put_on is magazine_put for a block that is given back on this stream: only into that stream's magazine. */
int magazine_put_on(void *ptr, void *stream) HIDDEN;
/* magazine_forget leaves the free of the block to Go; magazine_forget_all the frees of all blocks, and is rare. */
void magazine_forget(void *ptr) HIDDEN;
void magazine_forget_all(void) HIDDEN;
/* magazine_know says that Go has handed a block out with a token, not 0, since magazine_turn returned turn: magazine_put may take it
 * back. magazine_know_stream says that the token's magazine is the stream's. */
void magazine_know(void *ptr, uint64_t size, uint32_t token, uint64_t turn) HIDDEN;
void magazine_know_stream(int device, void *stream, uint32_t token) HIDDEN;

/* For Go: makes a magazine known by an index above 0; at most MAGAZINE_MAX are. */
enum { MAGAZINE_MAX = 4095 };
void magazine_add(uint32_t index, magazine *m, const magazine_flags *flags) HIDDEN;
/* magazine_stop leaves every request and every free to Go from now on: after a bug in Go, which has to be reported. */
void magazine_stop(void) HIDDEN;

/* Between magazine_hold and magazine_release frees are left to Go, now and later, of what is handed out meanwhile;
 * magazine_forget_all does the same for all that was handed out before. For threads that take memory away from live blocks, or free blocks of others,
 * so that none of these comes into a magazine.
 *
 * magazine_turn is a number that differs after every magazine_hold. Its lower half is how many threads hold, the upper half how
 * many ever did. A block is remembered, or put into a magazine, only if the lower half was 0 before the block was handed out, or
 * before its entry was taken, and the number is the same at the end. */
void magazine_hold(void) HIDDEN;
void magazine_release(void) HIDDEN;
uint64_t magazine_turn(void) HIDDEN;

#endif

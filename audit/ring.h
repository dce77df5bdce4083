// What the audit library and its reader share: the memory that events go through. ring.go reads the same; a test holds
// one against the other.
//
// The ring is a bounded queue of fixed slots. A producer takes the number of a slot by raising head, writes the slot and
// publishes it by raising the slot's turn, an odd number then; the one reader takes slots in order. Nobody waits for anybody: where the slot
// at head is not free yet the event is dropped and counted. A producer that is killed, or stopped, between the two steps
// leaves a hole; the reader passes it by raising the turn itself, so that the producer's own step fails should it ever
// come, and the checksum shows what such a latecomer has written over.

#ifndef CISTERN_AUDIT_RING_H
#define CISTERN_AUDIT_RING_H

#include <stdint.h>

#define RING_MAGIC 0x3144554154534943u // "CISTAUD1", the version is its end
#define RING_PAYLOAD 144

enum record { RECORD_CALL = 1, RECORD_PROCESS, RECORD_MODULE, RECORD_UNKNOWN };

struct slot {
	uint64_t turn;  // twice the lap for which the slot is free, and one more once it is published
	uint64_t check; // over all that follows, and the number
	uint64_t time;  // ns, CLOCK_MONOTONIC, when the call began
	uint64_t took;  // ns
	uint64_t addr, size, stream, handle, pool, extra;
	uint32_t pid, tid;
	int32_t device, result; // device is -1 where there is none
	uint8_t type;           // enum record
	uint8_t call;           // enum call, of a RECORD_CALL
	uint16_t count;         // of frames, or bytes of text, in the payload
	uint32_t flags;         // of a RECORD_PROCESS: 1 where it has just loaded the driver, and was not forked by one that had
	uint64_t payload[RING_PAYLOAD / 8]; // frames, innermost first; or text
	uint64_t spare[1];
};

enum { RING_STACKS = 1 };

struct ring {
	uint64_t magic, nonce;
	uint32_t slots, flags; // slots is a power of two
	uint64_t closed;       // nobody reads any more
	uint64_t pad0[4];
	uint64_t head; // next number to be taken
	uint64_t pad1[7];
	uint64_t dropped; // events for which there was no room
	uint64_t pad2[7];
	uint64_t tail; // the reader's
	uint64_t pad3[487];
	struct slot slot[]; // at 4096
};

_Static_assert(sizeof(struct slot) == 256, "a slot is 256 bytes");
_Static_assert(sizeof(struct ring) == 4096, "slots begin on a page");

#endif

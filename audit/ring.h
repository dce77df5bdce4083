// The memory through which the audit library passes events to its reader. ring.go has the same layout; a test compares them.
//
// The ring is a bounded queue of fixed slots. A producer takes the number of a slot by raising head, writes the slot and
// publishes it by raising the slot's turn, an odd number then; the one reader takes slots in order. No thread waits for another:
// where the slot at head is not free yet the event is dropped and counted. A producer that is killed, or stopped, between the two
// steps leaves an unpublished slot; the reader passes it by raising the turn itself, so that the producer's own step fails later.
// The checksum shows what such a late producer has written over.

#ifndef CISTERN_AUDIT_RING_H
#define CISTERN_AUDIT_RING_H

#include <stdint.h>

#define RING_MAGIC 0x3244554154534943u // "CISTAUD2", the version is its end
#define RING_PAYLOAD 144
#define RING_ALIVE 256
#define RING_NAME "cistern-audit" // of the file in memory, as /proc shows it behind /memfd:

// A stack has a number that follows from what is in it. It is sent when it is seen first, before the call that has it:
// so a call costs a slot, however deep its stack is. What a stack of Python needs to be read is sent alike: the code
// objects with their names. Where such things are longer than a payload they go through several slots, one after the
// other: handle is the length of all, extra where this slot's piece begins.
enum record {
	RECORD_CALL = 1, // payload: the caller's address, and with CALL_STACK the stack's number
	RECORD_PROCESS,  // text: its program; handle: its parent, extra: the process whose memory it began with, if any
	RECORD_MODULE,   // text: its file
	RECORD_UNKNOWN,  // text: a way to functions that could not be followed
	RECORD_STACK,    // addr: its number; payload: return addresses, size of them, then pairs of a code object's number and a line; in words
	RECORD_CODE,     // addr: its number, size: its first line; text: its file, a zero, its function
	RECORD_PYTHON,   // text: why the stacks of a process have no frames of Python
	RECORD_ENDED,    // addr: a process that had ended by then, as another one saw when it began
	RECORD_DEVICE,   // device: the process's number of it, size: its memory; text: its UUID, 16 bytes, and its name
};
enum { CALL_STACK = 1, PROCESS_FRESH = 1, MODULE_PYTHON = 1 }; // flags of records; fresh: it has just loaded the driver

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
	uint16_t count;         // of words, or bytes of text, in the payload
	uint32_t flags;
	uint64_t payload[RING_PAYLOAD / 8]; // words; or text
	uint64_t spare[1];
};

enum { RING_NATIVE = 1, RING_PYTHON = 2 }; // stacks that are wanted

struct ring {
	uint64_t magic, nonce;
	uint32_t slots, flags; // slots is a power of two
	uint64_t closed;       // the reader has ended
	uint64_t pad0[4];
	uint64_t head; // next number to be taken
	uint64_t spent; // ns that threads spent on events once the driver had returned; beside head, which they have written just before
	uint64_t pad1[6];
	uint64_t dropped; // events for which there was no room
	uint64_t pad2[7];
	uint64_t tail; // the reader's
	// The processes that write here, each a number of its PID namespace and its PID; 0 where there is none. One that begins
	// looks which have ended: the reader may be late, and cannot know then which of them were there together.
	uint64_t alive[RING_ALIVE];
	uint64_t pad3[487 - RING_ALIVE];
	struct slot slot[]; // at 4096
};

_Static_assert(sizeof(struct slot) == 256, "a slot is 256 bytes");
_Static_assert(sizeof(struct ring) == 4096, "slots begin on a page");

#endif

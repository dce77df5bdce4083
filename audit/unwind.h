// Native stacks: see unwind.c.

#ifndef CISTERN_AUDIT_UNWIND_H
#define CISTERN_AUDIT_UNWIND_H

#include <stdint.h>

#include "sys.h"

#define ADDRESS_MASK (((uint64_t)1 << ADDRESS_BITS) - 1) // without the signature that aarch64 may have in a return address

// A place in a stack: the address at which a function goes on, and its stack and frame pointers then. end is where the
// stack ends at the latest.
struct place {
	uint64_t pc;
	uintptr_t sp, fp, end;
};

// unwind writes the return addresses behind a place, the innermost first, and moves it there. Its pc is 0 then where they are
// all, or cap of them; else it is where nothing says how to go on.
int unwind(uint32_t pid, struct place *p, uint64_t *frames, int cap);

// stacks.c: memory read by the kernel; and whether an address stands behind a call, in code.
int read_word(uint32_t pid, uintptr_t at, uint64_t *to);
int is_return(uint32_t pid, uint64_t p);

#endif

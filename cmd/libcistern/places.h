//go:build linux && cgo

/* Places in Python source, as numbers. */
#ifndef CISTERN_PLACES_H
#define CISTERN_PLACES_H

#include "pystack.h"
#include "stack.h"

/* places_open makes the tables; 0, or -1 without memory. Before any of the others. */
int places_open(void) __attribute__((visibility("hidden")));
/* places_number is the number of the place that a frame of the calling thread is at, below 2^32. */
uint64_t places_number(const struct pystack *p, const struct pyframe *f) __attribute__((visibility("hidden")));

#endif

//go:build linux && cgo

// Functions of a user's library, called by their address: to Go they are numbers.

#ifndef CISTERN_EXTERNAL_LIBRARY_H
#define CISTERN_EXTERNAL_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

typedef struct external_functions {
	uintptr_t alloc, free;
} external_functions;

// external_load loads a library and finds two functions in it. 0: reason says why not.
int external_load(const char *path, const char *alloc, const char *free, external_functions *out, char *reason, size_t reason_size);

uintptr_t external_alloc(uintptr_t fn, size_t size, int device, uintptr_t stream);
void external_free(uintptr_t fn, uintptr_t p, size_t size, int device, uintptr_t stream);

#endif

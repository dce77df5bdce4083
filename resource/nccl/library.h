//go:build linux && cgo

// The three calls of NCCL's that are used, by the declarations in its documentation: no nccl.h is needed to build.

#ifndef CISTERN_NCCL_LIBRARY_H
#define CISTERN_NCCL_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

typedef struct nccl_library nccl_library;

// nccl_open opens a library, or with loaded only one that the process has loaded already. NULL: reason says why.
nccl_library *nccl_open(const char *path, int loaded, char *reason, size_t reason_size);

// The results are NCCL's; 0 is success.
int nccl_alloc(nccl_library *l, uintptr_t *p, size_t size);
int nccl_free(nccl_library *l, uintptr_t p);
const char *nccl_words(nccl_library *l, int result);

// nccl_file is the path that the library was loaded from.
const char *nccl_file(nccl_library *l);

#endif

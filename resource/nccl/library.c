//go:build linux && cgo

#define _GNU_SOURCE // dladdr
#include "library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct nccl_library {
	int (*alloc)(void **p, size_t size);
	int (*free)(void *p);
	const char *(*words)(int result);
	const char *file; // that the library was loaded from
};

// look_up takes the handle over, and drops it where the library lacks what is needed.
static nccl_library *look_up(void *handle, const char *path, char *reason, size_t reason_size) {
	nccl_library *l = calloc(1, sizeof *l);
	if (l == NULL) {
		snprintf(reason, reason_size, "out of host memory");
		dlclose(handle);
		return NULL;
	}
	*(void **)&l->alloc = dlsym(handle, "ncclMemAlloc");
	*(void **)&l->free = dlsym(handle, "ncclMemFree");
	*(void **)&l->words = dlsym(handle, "ncclGetErrorString");
	if (l->alloc == NULL || l->free == NULL || l->words == NULL) {
		snprintf(reason, reason_size, "%s has no ncclMemAlloc (NCCL 2.19 is the first that does)", path);
		free(l);
		dlclose(handle);
		return NULL;
	}
	Dl_info info;
	l->file = dladdr(*(void **)&l->alloc, &info) != 0 && info.dli_fname != NULL ? info.dli_fname : "a file without a name";
	return l;
}

nccl_library *nccl_open(const char *path, int loaded, char *reason, size_t reason_size) {
	// RTLD_LOCAL: a program that brings an NCCL of its own later must not meet this one.
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0));
	if (handle == NULL) {
		const char *why = dlerror();
		snprintf(reason, reason_size, "%s", why != NULL ? why : "it is not loaded");
		return NULL;
	}
	return look_up(handle, path, reason, reason_size);
}

int nccl_alloc(nccl_library *l, uintptr_t *p, size_t size) {
	void *memory = NULL;
	int result = l->alloc(&memory, size);
	*p = (uintptr_t)memory;
	return result;
}

int nccl_free(nccl_library *l, uintptr_t p) { return l->free((void *)p); }

const char *nccl_words(nccl_library *l, int result) {
	const char *words = l->words(result);
	return words != NULL ? words : "unknown error";
}

const char *nccl_file(nccl_library *l) { return l->file; }

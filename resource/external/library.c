//go:build linux && cgo

#include "library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <sys/types.h>

int external_load(const char *path, const char *alloc, const char *free, external_functions *out, char *reason, size_t reason_size) {
	// RTLD_LOCAL: the library's names are no business of the program's. RTLD_NODELETE: its memory may outlive every user here.
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (handle == NULL) {
		const char *why = dlerror();
		snprintf(reason, reason_size, "%s", why != NULL ? why : "the library cannot be loaded");
		return 0;
	}
	const char *missing = NULL;
	if ((out->alloc = (uintptr_t)dlsym(handle, alloc)) == 0)
		missing = alloc;
	else if ((out->free = (uintptr_t)dlsym(handle, free)) == 0)
		missing = free;
	if (missing != NULL)
		snprintf(reason, reason_size, "%s has no function %s", path, missing);
	dlclose(handle);
	return missing == NULL;
}

uintptr_t external_alloc(uintptr_t fn, size_t size, int device, uintptr_t stream) {
	return (uintptr_t)((void *(*)(ssize_t, int, void *))fn)((ssize_t)size, device, (void *)stream);
}

void external_free(uintptr_t fn, uintptr_t p, size_t size, int device, uintptr_t stream) {
	((void (*)(void *, ssize_t, int, void *))fn)((void *)p, (ssize_t)size, device, (void *)stream);
}

//go:build linux && cgo

// What the C files of this package share: the table of calls and the scope in which a call is made.

#ifndef CISTERN_NVIDIA_INTERNAL_H
#define CISTERN_NVIDIA_INTERNAL_H

#include <stdatomic.h>

#include "driver.h"

typedef struct {
	CUdevice handle;
	// The primary context once this process's Cistern has retained it, and before that its number. Written once: a
	// context that was retained stays until the process ends, so every thread may read it without a lock.
	_Atomic(CUcontext) context;
	_Atomic uint64_t number;
} nv_device;

struct nv_driver {
	void *library;
	int count;
	nv_device *devices;
#define X(name, symbol, parameters) CUresult (*name) parameters;
	NV_CALLS(X)
#undef X
};

#define NV_FAIL(name, code) (((nv_result)NV_##name << 32) | (nv_result)(uint32_t)(code))

// NV_CALL makes a call, or says that the driver lacks it.
#define NV_CALL(d, name, ...) \
	((d)->name == NULL ? NV_FAIL(name, NV_MISSING) : nv_check((d)->name(__VA_ARGS__), NV_##name))

static inline nv_result nv_check(CUresult r, enum nv_call call) {
	return r == CUDA_SUCCESS ? 0 : ((nv_result)call << 32) | (nv_result)(uint32_t)r;
}

// nv_scope is what has to be restored on the thread after a call.
typedef struct {
	int mode; // the thread's own capture mode
	int exchanged;
	int pushed;
} nv_scope;

// nv_relax puts the thread into relaxed capture mode; nv_enter does, and also makes the device's primary context
// current, pushing it unless it is already. nv_leave undoes either, and returns r, or what failed in the undoing.
nv_result nv_relax(nv_driver *d, nv_scope *s);
nv_result nv_enter(nv_driver *d, intptr_t dev, nv_scope *s);
nv_result nv_leave(nv_driver *d, nv_scope *s, nv_result r);

// nv_check_device says whether there is such a device.
nv_result nv_check_device(nv_driver *d, intptr_t dev);

// nv_access describes read-write access for devices, which must exist, in some if that has max of at least n, else in memory to
// be freed; NULL where there is none. nv_capture_of asks about a stream, in a scope that was entered.
CUmemAccessDesc *nv_access(nv_driver *d, CUmemAccessDesc *some, size_t max, const intptr_t *devs, size_t n);
nv_result nv_capture_of(nv_driver *d, CUstream s, int *status, uint64_t *id);

// nv_context_number is the context's own number where the driver has them (CUDA 12.0), else its address, which can be
// reused.
nv_result nv_context_number(nv_driver *d, CUcontext context, uint64_t *number);

// NV_RELAXED and NV_ENTERED are a whole wrapper around one call.
#define NV_RELAXED(d, name, ...) \
	do { \
		nv_scope scope; \
		nv_result result = nv_relax(d, &scope); \
		if (result == 0) \
			result = NV_CALL(d, name, __VA_ARGS__); \
		return nv_leave(d, &scope, result); \
	} while (0)

#define NV_ENTERED(d, dev, name, ...) \
	do { \
		nv_scope scope; \
		nv_result result = nv_enter(d, dev, &scope); \
		if (result == 0) \
			result = NV_CALL(d, name, __VA_ARGS__); \
		return nv_leave(d, &scope, result); \
	} while (0)

#endif

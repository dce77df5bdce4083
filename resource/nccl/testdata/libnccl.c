// A stand-in for libnccl.so.2, for tests on machines without a GPU: the three calls that package nccl uses, by the
// declarations of NCCL's documentation. As NCCL does, it works on whatever device's context is current, which it asks the
// driver library that STANDIN_NCCL_DRIVER names; memory is that library's. STANDIN_NCCL_FAIL is a result that both calls
// return. Where no context is current, a call fails as NCCL's would.

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

enum { ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclInvalidArgument = 4 };

static void *driver_call(const char *name) {
	const char *path = getenv("STANDIN_NCCL_DRIVER");
	void *library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
	return library != NULL ? dlsym(library, name) : NULL;
}

static int ready(void) {
	int (*current)(void **) = (int (*)(void **))driver_call("cuCtxGetCurrent");
	void *context = NULL;
	return current != NULL && current(&context) == 0 && context != NULL;
}

static int forced(void) {
	const char *s = getenv("STANDIN_NCCL_FAIL");
	return s != NULL && *s != 0 ? atoi(s) : 0;
}

int ncclMemAlloc(void **p, size_t size) {
	if (p == NULL || size == 0)
		return ncclInvalidArgument;
	if (forced() != 0)
		return forced();
	int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))driver_call("cuMemAlloc_v2");
	uint64_t address = 0;
	if (!ready() || alloc == NULL || alloc(&address, size) != 0)
		return ncclUnhandledCudaError;
	*p = (void *)address;
	return ncclSuccess;
}

int ncclMemFree(void *p) {
	if (forced() != 0)
		return forced();
	int (*release)(uint64_t) = (int (*)(uint64_t))driver_call("cuMemFree_v2");
	if (!ready() || release == NULL || release((uint64_t)p) != 0)
		return ncclUnhandledCudaError;
	return ncclSuccess;
}

const char *ncclGetErrorString(int result) {
	switch (result) {
	case ncclSuccess: return "no error";
	case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
	case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
	default: return "unknown result code";
	}
}

//go:build linux && cgo

// Memory of other kinds than the device's plain memory: page-locked host memory, managed memory, stream-ordered pools;
// and the copy between any two of them.

#include "internal.h"

#include <stdlib.h>
#include <string.h>

nv_result nv_memcpy(nv_driver *d, intptr_t dev, CUdeviceptr dst, CUdeviceptr src, size_t size, uintptr_t s) {
	NV_ENTERED(d, dev, cuMemcpyAsync, dst, src, size, (CUstream)s);
}

// Host addresses cross as numbers: they are no memory of Go's, and need not look like it.

nv_result nv_host_alloc(nv_driver *d, intptr_t dev, size_t size, uint64_t *p) {
	void *m = NULL;
	nv_scope scope;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0)
		r = NV_CALL(d, cuMemHostAlloc, &m, size, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
	*p = (uintptr_t)m;
	return nv_leave(d, &scope, r);
}

nv_result nv_host_free(nv_driver *d, intptr_t dev, uint64_t p) {
	NV_ENTERED(d, dev, cuMemFreeHost, (void *)(uintptr_t)p);
}

nv_result nv_host_register(nv_driver *d, intptr_t dev, uint64_t p, size_t size) {
	NV_ENTERED(d, dev, cuMemHostRegister, (void *)(uintptr_t)p, size, CU_MEMHOSTREGISTER_PORTABLE);
}

nv_result nv_host_unregister(nv_driver *d, intptr_t dev, uint64_t p) {
	NV_ENTERED(d, dev, cuMemHostUnregister, (void *)(uintptr_t)p);
}

nv_result nv_managed_alloc(nv_driver *d, intptr_t dev, size_t size, CUdeviceptr *p) {
	NV_ENTERED(d, dev, cuMemAllocManaged, p, size, CU_MEM_ATTACH_GLOBAL);
}

nv_result nv_prefetch(nv_driver *d, intptr_t dev, CUdeviceptr p, size_t size, int to_host, uintptr_t s) {
	nv_result r = nv_check_device(d, dev);
	if (r != 0)
		return r;
	int handle = d->devices[dev].handle;
	// The plain name is the old call, which takes a device, and the only one before CUDA 12.2.
	if (d->cuMemPrefetchAsync_v2 == NULL)
		NV_ENTERED(d, dev, cuMemPrefetchAsync, p, size, to_host ? CU_DEVICE_CPU : handle, (CUstream)s);
	CUmemLocation to = {to_host ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE, to_host ? 0 : handle};
	NV_ENTERED(d, dev, cuMemPrefetchAsync_v2, p, size, to, 0, (CUstream)s);
}

nv_result nv_pool_create(nv_driver *d, intptr_t dev, int handles, size_t max, uintptr_t *pool) {
	nv_result r = nv_check_device(d, dev);
	if (r != 0)
		return r;
	CUmemPoolProps props;
	memset(&props, 0, sizeof props); // reserved bytes must be zero
	props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	props.handleTypes = handles;
	props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	props.location.id = d->devices[dev].handle;
	props.maxSize = max;
	NV_ENTERED(d, dev, cuMemPoolCreate, (CUmemoryPool *)pool, &props);
}

nv_result nv_pool_destroy(nv_driver *d, intptr_t dev, uintptr_t pool) {
	NV_ENTERED(d, dev, cuMemPoolDestroy, (CUmemoryPool)pool);
}

nv_result nv_pool_default(nv_driver *d, intptr_t dev, uintptr_t *pool) {
	nv_result r = nv_check_device(d, dev);
	if (r != 0)
		return r;
	NV_ENTERED(d, dev, cuDeviceGetDefaultMemPool, (CUmemoryPool *)pool, d->devices[dev].handle);
}

// flag reports whether the driver keeps the attribute in an int: the others are 64 bits wide.
static int flag(int attribute) {
	return attribute >= CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES &&
	       attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

nv_result nv_pool_get(nv_driver *d, intptr_t dev, uintptr_t pool, int attribute, uint64_t *value) {
	int narrow = 0;
	nv_scope scope;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0)
		r = NV_CALL(d, cuMemPoolGetAttribute, (CUmemoryPool)pool, attribute, flag(attribute) ? (void *)&narrow : (void *)value);
	if (flag(attribute))
		*value = (uint64_t)narrow;
	return nv_leave(d, &scope, r);
}

nv_result nv_pool_set(nv_driver *d, intptr_t dev, uintptr_t pool, int attribute, uint64_t value) {
	int narrow = value != 0;
	if (flag(attribute) && value > 1)
		return NV_FAIL(cuMemPoolSetAttribute, CUDA_ERROR_INVALID_VALUE);
	NV_ENTERED(d, dev, cuMemPoolSetAttribute, (CUmemoryPool)pool, attribute, flag(attribute) ? (void *)&narrow : (void *)&value);
}

nv_result nv_pool_trim(nv_driver *d, intptr_t dev, uintptr_t pool, size_t keep) {
	NV_ENTERED(d, dev, cuMemPoolTrimTo, (CUmemoryPool)pool, keep);
}

nv_result nv_pool_set_access(nv_driver *d, intptr_t dev, uintptr_t pool, const intptr_t *devs, size_t n) {
	CUmemAccessDesc some[16];
	for (size_t i = 0; i < n; i++) {
		nv_result r = nv_check_device(d, devs[i]);
		if (r != 0)
			return r;
	}
	CUmemAccessDesc *access = nv_access(d, some, sizeof some / sizeof *some, devs, n);
	if (access == NULL)
		return NV_FAIL(cuMemPoolSetAccess, 2 /* CUDA_ERROR_OUT_OF_MEMORY */);
	nv_scope scope;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0)
		r = NV_CALL(d, cuMemPoolSetAccess, (CUmemoryPool)pool, access, n);
	r = nv_leave(d, &scope, r);
	if (access != some)
		free(access);
	return r;
}

nv_result nv_alloc_async(nv_driver *d, intptr_t dev, size_t size, uintptr_t pool, uintptr_t s, CUdeviceptr *p) {
	NV_ENTERED(d, dev, cuMemAllocFromPoolAsync, p, size, (CUmemoryPool)pool, (CUstream)s);
}

nv_result nv_free_async(nv_driver *d, intptr_t dev, CUdeviceptr p, uintptr_t s) {
	NV_ENTERED(d, dev, cuMemFreeAsync, p, (CUstream)s);
}

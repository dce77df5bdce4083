//go:build linux && cgo

#include "internal.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const call_names[] = {
#define X(name, symbol, parameters) #name,
	NV_CALLS(X)
#undef X
};

const char *nv_call_name(int call) {
	return call >= 0 && call < NV_CALL_COUNT ? call_names[call] : "unknown call";
}

nv_driver *nv_open(const char *path, char *reason, size_t reason_size) {
	// RTLD_LOCAL: a program that loads the driver itself, or interposes on it, must not see a difference.
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (library == NULL) {
		const char *why = dlerror();
		snprintf(reason, reason_size, "%s", why != NULL ? why : "dlopen failed");
		return NULL;
	}
	nv_driver *d = calloc(1, sizeof *d);
	if (d == NULL) {
		snprintf(reason, reason_size, "out of host memory");
		dlclose(library);
		return NULL;
	}
	d->library = library;
#define X(name, symbol, parameters) *(void **)&d->name = dlsym(library, #symbol);
	NV_CALLS(X)
#undef X
	if (d->cuInit == NULL || d->cuDriverGetVersion == NULL) {
		snprintf(reason, reason_size, "%s: not a CUDA driver library (no cuInit)", path);
		nv_close(d);
		return NULL;
	}
	return d;
}

void nv_close(nv_driver *d) {
	dlclose(d->library);
	free(d->devices);
	free(d);
}

nv_result nv_init(nv_driver *d, int *version, int *devices) {
	nv_result r = NV_CALL(d, cuDriverGetVersion, version); // legal before cuInit
	if (r == 0)
		r = NV_CALL(d, cuInit, 0);
	int count = 0;
	if (r == 0)
		r = NV_CALL(d, cuDeviceGetCount, &count);
	if (r != 0)
		return r;
	d->devices = calloc(count > 0 ? (size_t)count : 1, sizeof *d->devices);
	if (d->devices == NULL)
		return NV_FAIL(cuDeviceGetCount, 2 /* CUDA_ERROR_OUT_OF_MEMORY */);
	for (int i = 0; i < count && r == 0; i++)
		r = NV_CALL(d, cuDeviceGet, &d->devices[i].handle, i);
	d->count = count;
	*devices = count;
	return r;
}

nv_result nv_relax(nv_driver *d, nv_scope *s) {
	s->exchanged = 0;
	s->pushed = 0;
	// Before CUDA 10.1 there is neither the call nor a mode to change.
	if (d->cuThreadExchangeStreamCaptureMode == NULL)
		return 0;
	s->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	nv_result r = NV_CALL(d, cuThreadExchangeStreamCaptureMode, &s->mode);
	s->exchanged = r == 0;
	return r;
}

nv_result nv_check_device(nv_driver *d, intptr_t dev) {
	return dev >= 0 && dev < d->count ? 0 : NV_FAIL(cuDeviceGet, CUDA_ERROR_INVALID_DEVICE);
}

nv_result nv_context_number(nv_driver *d, CUcontext context, uint64_t *number) {
	unsigned long long n = (uintptr_t)context;
	nv_result r = d->cuCtxGetId == NULL ? 0 : NV_CALL(d, cuCtxGetId, context, &n);
	*number = n;
	return r;
}

static nv_result retain(nv_driver *d, intptr_t dev, CUcontext *context) {
	uint64_t number = 0;
	nv_result r = NV_CALL(d, cuDevicePrimaryCtxRetain, context, d->devices[dev].handle);
	if (r != 0)
		return r;
	r = nv_context_number(d, *context, &number);
	if (r != 0) {
		(void)NV_CALL(d, cuDevicePrimaryCtxRelease, d->devices[dev].handle);
		return r;
	}
	// Two threads may both retain; the reference is never dropped, so one too many is harmless.
	atomic_store(&d->devices[dev].number, number);
	atomic_store(&d->devices[dev].context, *context);
	return 0;
}

// Make a context current that is not yet. Two calls instead of a push alone: asking is cheap, and in the usual case
// the program's own thread has the primary context current already.
static nv_result push(nv_driver *d, CUcontext context, nv_scope *s) {
	CUcontext current = NULL;
	nv_result r = NV_CALL(d, cuCtxGetCurrent, &current);
	if (r != 0 || current == context)
		return r;
	r = NV_CALL(d, cuCtxPushCurrent, context);
	s->pushed = r == 0;
	return r;
}

static nv_result active(nv_driver *d, intptr_t dev, int *is) {
	unsigned flags = 0;
	*is = 0;
	return NV_CALL(d, cuDevicePrimaryCtxGetState, d->devices[dev].handle, &flags, is);
}

// primary_context finds the device's primary context for a call.
static nv_result primary_context(nv_driver *d, intptr_t dev, enum nv_call call, CUcontext *context) {
	nv_result r = nv_check_device(d, dev);
	if (r != 0)
		return r;
	*context = atomic_load(&d->devices[dev].context);
	if (*context == NULL) {
		// Another library in the process may have made it: then it is as good as retained by us. Otherwise the
		// caller has not asked for a context, and none is made behind its back.
		int is = 0;
		r = active(d, dev, &is);
		if (r == 0 && !is)
			r = nv_check(CUDA_ERROR_INVALID_CONTEXT, call);
		if (r == 0)
			r = retain(d, dev, context);
	}
	return r;
}

nv_result nv_enter(nv_driver *d, intptr_t dev, nv_scope *s) {
	CUcontext context;
	nv_result r = nv_relax(d, s);
	if (r == 0)
		r = primary_context(d, dev, NV_cuCtxPushCurrent, &context);
	return r != 0 ? r : push(d, context, s);
}

static nv_result pop(nv_driver *d, nv_scope *s, nv_result r) {
	if (s->pushed) {
		CUcontext popped;
		nv_result p = NV_CALL(d, cuCtxPopCurrent, &popped);
		if (r == 0)
			r = p;
		s->pushed = 0;
	}
	return r;
}

nv_result nv_leave(nv_driver *d, nv_scope *s, nv_result r) {
	r = pop(d, s, r);
	if (s->exchanged) {
		nv_result x = NV_CALL(d, cuThreadExchangeStreamCaptureMode, &s->mode);
		if (r == 0)
			r = x;
	}
	return r;
}

// attribute reads a device attribute; one that the driver does not know yet is "no".
static int attribute(nv_driver *d, CUdevice handle, int which) {
	int value = 0;
	return NV_CALL(d, cuDeviceGetAttribute, &value, which, handle) == 0 ? value : 0;
}

static CUmemAllocationProp pinned(int location, int id, int handles, int rdma) {
	CUmemAllocationProp prop;
	memset(&prop, 0, sizeof prop); // reserved bytes must be zero
	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.requestedHandleTypes = handles;
	prop.location.type = location;
	prop.location.id = id;
	prop.allocFlags.gpuDirectRDMACapable = rdma != 0;
	return prop;
}

nv_result nv_device_info(nv_driver *d, intptr_t dev, nv_info *info) {
	memset(info, 0, sizeof *info);
	nv_result r = nv_check_device(d, dev);
	if (r != 0)
		return r;
	CUdevice handle = d->devices[dev].handle;
	size_t total = 0, granularity = 0;
	r = NV_CALL(d, cuDeviceGetName, info->name, (int)sizeof info->name - 1, handle);
	if (r == 0)
		r = NV_CALL(d, cuDeviceTotalMem, &total, handle);
	// The second version (CUDA 11.4) tells the instances of a partitioned GPU apart.
	if (r == 0)
		r = d->cuDeviceGetUuid_v2 != NULL ? NV_CALL(d, cuDeviceGetUuid_v2, &info->uuid, handle)
						  : NV_CALL(d, cuDeviceGetUuid, &info->uuid, handle);
	if (r != 0)
		return r;
	info->total = total;
	info->multiproc = attribute(d, handle, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
	info->managed = attribute(d, handle, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
	info->pools = attribute(d, handle, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
	info->pool_handles = attribute(d, handle, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES);
	// Node 0 is an answer; a driver that does not know the question has none.
	if (NV_CALL(d, cuDeviceGetAttribute, &info->host_numa, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, handle) != 0)
		info->host_numa = -1;
	info->vmm = attribute(d, handle, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
	if (!info->vmm || d->cuMemGetAllocationGranularity == NULL) {
		info->vmm = 0;
		return 0;
	}
	info->posix = attribute(d, handle, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
	info->fabric = attribute(d, handle, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
	info->host_vmm = attribute(d, handle, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
	info->rdma = attribute(d, handle, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
	CUmemAllocationProp prop = pinned(CU_MEM_LOCATION_TYPE_DEVICE, handle, 0, 0);
	r = NV_CALL(d, cuMemGetAllocationGranularity, &granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
	info->granularity = granularity;
	return r;
}

nv_result nv_context_active(nv_driver *d, intptr_t dev, int *is) {
	nv_result r = nv_check_device(d, dev);
	return r != 0 ? r : active(d, dev, is);
}

nv_result nv_context_retain(nv_driver *d, intptr_t dev) {
	nv_result r = nv_check_device(d, dev);
	if (r != 0 || atomic_load(&d->devices[dev].context) != NULL)
		return r;
	nv_scope scope;
	CUcontext context;
	r = nv_relax(d, &scope);
	if (r == 0)
		r = retain(d, dev, &context);
	return nv_leave(d, &scope, r);
}

nv_result nv_can_access_peer(nv_driver *d, intptr_t dev, intptr_t peer, int *can) {
	nv_result r = nv_check_device(d, dev);
	if (r == 0)
		r = nv_check_device(d, peer);
	return r != 0 ? r : NV_CALL(d, cuDeviceCanAccessPeer, can, d->devices[dev].handle, d->devices[peer].handle);
}

nv_result nv_enable_peer_access(nv_driver *d, intptr_t dev, intptr_t peer) {
	nv_scope scope;
	CUcontext context;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0)
		r = primary_context(d, peer, NV_cuCtxEnablePeerAccess, &context);
	if (r == 0)
		r = NV_CALL(d, cuCtxEnablePeerAccess, context, 0);
	return nv_leave(d, &scope, r);
}

nv_result nv_mem_info(nv_driver *d, intptr_t dev, size_t *free, size_t *total) {
	nv_result r = nv_check_device(d, dev);
	if (r != 0)
		return r;
	nv_scope scope;
	r = nv_relax(d, &scope);
	if (r != 0)
		return nv_leave(d, &scope, r);
	CUcontext context = atomic_load(&d->devices[dev].context);
	int borrowed = 0;
	if (context == NULL) {
		// Unlike nv_enter, give the reference back: looking must not keep a context alive that its owner drops.
		int is = 0;
		r = active(d, dev, &is);
		if (r == 0 && !is)
			r = NV_FAIL(cuMemGetInfo, CUDA_ERROR_INVALID_CONTEXT);
		if (r == 0) {
			r = NV_CALL(d, cuDevicePrimaryCtxRetain, &context, d->devices[dev].handle);
			borrowed = r == 0;
		}
	}
	if (r == 0)
		r = push(d, context, &scope);
	if (r == 0)
		r = NV_CALL(d, cuMemGetInfo, free, total);
	r = pop(d, &scope, r);
	if (borrowed) {
		nv_result released = NV_CALL(d, cuDevicePrimaryCtxRelease, d->devices[dev].handle);
		if (r == 0)
			r = released;
	}
	return nv_leave(d, &scope, r);
}

nv_result nv_mem_alloc(nv_driver *d, intptr_t dev, size_t size, CUdeviceptr *p) {
	NV_ENTERED(d, dev, cuMemAlloc, p, size);
}

nv_result nv_mem_free(nv_driver *d, intptr_t dev, CUdeviceptr p) {
	NV_ENTERED(d, dev, cuMemFree, p);
}

// The virtual memory calls name their device, or need none: no context is pushed for them.

nv_result nv_address_reserve(nv_driver *d, size_t size, size_t align, CUdeviceptr hint, CUdeviceptr *p) {
	NV_RELAXED(d, cuMemAddressReserve, p, size, align, hint, 0);
}

nv_result nv_address_free(nv_driver *d, CUdeviceptr p, size_t size) {
	NV_RELAXED(d, cuMemAddressFree, p, size);
}

nv_result nv_mem_create(nv_driver *d, size_t size, intptr_t dev, int host_numa, int node, int handles, int rdma,
			CUmemGenericAllocationHandle *h) {
	CUmemAllocationProp prop;
	if (host_numa) {
		prop = pinned(CU_MEM_LOCATION_TYPE_HOST_NUMA, node, handles, rdma);
	} else {
		nv_result r = nv_check_device(d, dev);
		if (r != 0)
			return r;
		prop = pinned(CU_MEM_LOCATION_TYPE_DEVICE, d->devices[dev].handle, handles, rdma);
	}
	NV_RELAXED(d, cuMemCreate, h, size, &prop, 0);
}

nv_result nv_mem_release(nv_driver *d, CUmemGenericAllocationHandle h) {
	NV_RELAXED(d, cuMemRelease, h);
}

nv_result nv_mem_map(nv_driver *d, CUdeviceptr p, size_t size, CUmemGenericAllocationHandle h) {
	NV_RELAXED(d, cuMemMap, p, size, 0, h, 0);
}

nv_result nv_mem_unmap(nv_driver *d, CUdeviceptr p, size_t size) {
	NV_RELAXED(d, cuMemUnmap, p, size);
}

CUmemAccessDesc *nv_access(nv_driver *d, CUmemAccessDesc *some, size_t max, const intptr_t *devs, size_t n) {
	CUmemAccessDesc *access = n <= max ? some : malloc(n * sizeof *access);
	for (size_t i = 0; access != NULL && i < n; i++) {
		access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		access[i].location.id = d->devices[devs[i]].handle;
		access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	}
	return access;
}

nv_result nv_mem_set_access(nv_driver *d, CUdeviceptr p, size_t size, const intptr_t *devs, size_t n, int flags) {
	CUmemAccessDesc some[16];
	for (size_t i = 0; i < n; i++) {
		nv_result r = nv_check_device(d, devs[i]);
		if (r != 0)
			return r;
	}
	CUmemAccessDesc *access = nv_access(d, some, sizeof some / sizeof *some, devs, n);
	if (access == NULL)
		return NV_FAIL(cuMemSetAccess, 2 /* CUDA_ERROR_OUT_OF_MEMORY */);
	for (size_t i = 0; i < n; i++)
		access[i].flags = flags;
	nv_scope scope;
	nv_result r = nv_relax(d, &scope);
	if (r == 0)
		r = NV_CALL(d, cuMemSetAccess, p, size, access, n);
	r = nv_leave(d, &scope, r);
	if (access != some)
		free(access);
	return r;
}

nv_result nv_mem_set_host_access(nv_driver *d, CUdeviceptr p, size_t size, int node) {
	CUmemAccessDesc access;
	access.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
	access.location.id = node;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	NV_RELAXED(d, cuMemSetAccess, p, size, &access, 1);
}

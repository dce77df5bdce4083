//go:build linux && cgo

// The part of the CUDA driver's ABI that Cistern uses, declared here so that no CUDA toolkit is needed to build, and
// the wrappers that Go calls. Types, constants and layouts are those of the CUDA Driver API documentation.

#ifndef CISTERN_NVIDIA_DRIVER_H
#define CISTERN_NVIDIA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef uint64_t CUdeviceptr;
typedef uint64_t CUmemGenericAllocationHandle;

typedef struct {
	unsigned char bytes[16];
} CUuuid;

typedef struct {
	int type; // CU_MEM_LOCATION_TYPE_*
	int id;
} CUmemLocation;

typedef struct {
	int type; // CU_MEM_ALLOCATION_TYPE_PINNED
	int requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType;
		unsigned char gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef struct {
	CUmemLocation location;
	int flags; // CU_MEM_ACCESS_FLAGS_PROT_*
} CUmemAccessDesc;

typedef struct {
	char reserved[64];
} CUipcMemHandle;

typedef struct {
	unsigned char reserved[64];
} CUmemPoolPtrExportData;

typedef struct {
	char reserved[64];
} CUipcEventHandle;

typedef struct {
	int allocType; // CU_MEM_ALLOCATION_TYPE_PINNED
	int handleTypes;
	CUmemLocation location;
	void *win32SecurityAttributes;
	size_t maxSize;
	unsigned short usage;
	unsigned char reserved[54];
} CUmemPoolProps;

_Static_assert(sizeof(CUmemAllocationProp) == (sizeof(void *) == 8 ? 32 : 28), "layout of CUmemAllocationProp");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "layout of CUmemAccessDesc");
_Static_assert(sizeof(CUmemPoolProps) == (sizeof(void *) == 8 ? 88 : 80), "layout of CUmemPoolProps");

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,

	CU_STREAM_NON_BLOCKING = 1,
	CU_STREAM_CAPTURE_MODE_RELAXED = 2,
	CU_EVENT_DISABLE_TIMING = 2,
	CU_EVENT_INTERPROCESS = 4,

	CU_MEM_ALLOCATION_TYPE_PINNED = 1,
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_LOCATION_TYPE_HOST = 2,
	CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
	CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
	CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
	CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
	CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
	CU_MEMHOSTALLOC_PORTABLE = 1,
	CU_MEMHOSTALLOC_DEVICEMAP = 2,
	CU_MEMHOSTREGISTER_PORTABLE = 1,
	CU_MEM_ATTACH_GLOBAL = 1,
	CU_DEVICE_CPU = -1,

	CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
	CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,

	CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
	CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
	CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
	CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
	CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
	CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,
	CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,

	CU_JIT_ERROR_LOG_BUFFER = 5,
	CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
};

// NV_CALLS lists every driver call: the name that people know, the symbol with the version whose ABI is declared here,
// and its parameters. Where a later driver gave the plain name a new signature in the headers, the old symbol keeps
// its own, so naming symbols exactly is what keeps the ABI.
#define NV_CALLS(X) \
	X(cuInit, cuInit, (unsigned)) \
	X(cuDriverGetVersion, cuDriverGetVersion, (int *)) \
	X(cuDeviceGetCount, cuDeviceGetCount, (int *)) \
	X(cuDeviceGet, cuDeviceGet, (CUdevice *, int)) \
	X(cuDeviceGetName, cuDeviceGetName, (char *, int, CUdevice)) \
	X(cuDeviceGetUuid, cuDeviceGetUuid, (CUuuid *, CUdevice)) \
	X(cuDeviceGetUuid_v2, cuDeviceGetUuid_v2, (CUuuid *, CUdevice)) \
	X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *, int, CUdevice)) \
	X(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t *, CUdevice)) \
	X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int *, CUdevice, CUdevice)) \
	X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *)) \
	X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) \
	X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
	X(cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext *)) \
	X(cuCtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext)) \
	X(cuCtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext *)) \
	X(cuCtxSynchronize, cuCtxSynchronize, (void)) \
	X(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, (CUcontext, unsigned)) \
	X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *)) \
	X(cuMemGetInfo, cuMemGetInfo_v2, (size_t *, size_t *)) \
	X(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
	X(cuMemFree, cuMemFree_v2, (CUdeviceptr)) \
	X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int)) \
	X(cuMemAddressReserve, cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
	X(cuMemAddressFree, cuMemAddressFree, (CUdeviceptr, size_t)) \
	X(cuMemCreate, cuMemCreate, \
	  (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)) \
	X(cuMemRelease, cuMemRelease, (CUmemGenericAllocationHandle)) \
	X(cuMemMap, cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)) \
	X(cuMemUnmap, cuMemUnmap, (CUdeviceptr, size_t)) \
	X(cuMemSetAccess, cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)) \
	X(cuMemExportToShareableHandle, cuMemExportToShareableHandle, \
	  (void *, CUmemGenericAllocationHandle, int, unsigned long long)) \
	X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *, void *, int)) \
	X(cuIpcGetMemHandle, cuIpcGetMemHandle, (CUipcMemHandle *, CUdeviceptr)) \
	X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, (CUdeviceptr *, CUipcMemHandle, unsigned)) \
	X(cuIpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr)) \
	X(cuMemHostAlloc, cuMemHostAlloc, (void **, size_t, unsigned)) \
	X(cuMemFreeHost, cuMemFreeHost, (void *)) \
	X(cuMemHostRegister, cuMemHostRegister_v2, (void *, size_t, unsigned)) \
	X(cuMemHostUnregister, cuMemHostUnregister, (void *)) \
	X(cuMemAllocManaged, cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned)) \
	X(cuMemPrefetchAsync, cuMemPrefetchAsync, (CUdeviceptr, size_t, CUdevice, CUstream)) \
	X(cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2, (CUdeviceptr, size_t, CUmemLocation, unsigned, CUstream)) \
	X(cuMemcpyAsync, cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
	X(cuMemPoolCreate, cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *)) \
	X(cuMemPoolDestroy, cuMemPoolDestroy, (CUmemoryPool)) \
	X(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice)) \
	X(cuMemPoolGetAttribute, cuMemPoolGetAttribute, (CUmemoryPool, int, void *)) \
	X(cuMemPoolSetAttribute, cuMemPoolSetAttribute, (CUmemoryPool, int, void *)) \
	X(cuMemPoolTrimTo, cuMemPoolTrimTo, (CUmemoryPool, size_t)) \
	X(cuMemPoolSetAccess, cuMemPoolSetAccess, (CUmemoryPool, const CUmemAccessDesc *, size_t)) \
	X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream)) \
	X(cuMemFreeAsync, cuMemFreeAsync, (CUdeviceptr, CUstream)) \
	X(cuMemPoolExportToShareableHandle, cuMemPoolExportToShareableHandle, (void *, CUmemoryPool, int, unsigned long long)) \
	X(cuMemPoolImportFromShareableHandle, cuMemPoolImportFromShareableHandle, \
	  (CUmemoryPool *, void *, int, unsigned long long)) \
	X(cuMemPoolExportPointer, cuMemPoolExportPointer, (CUmemPoolPtrExportData *, CUdeviceptr)) \
	X(cuMemPoolImportPointer, cuMemPoolImportPointer, (CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *)) \
	X(cuStreamGetCtx, cuStreamGetCtx, (CUstream, CUcontext *)) \
	X(cuStreamGetFlags, cuStreamGetFlags, (CUstream, unsigned *)) \
	X(cuStreamGetId, cuStreamGetId, (CUstream, unsigned long long *)) \
	X(cuCtxGetId, cuCtxGetId, (CUcontext, unsigned long long *)) \
	X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo, (CUstream, int *, uint64_t *)) \
	X(cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2, \
	  (CUstream, int *, uint64_t *, CUgraph *, const CUgraphNode **, size_t *)) \
	X(cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3, \
	  (CUstream, int *, uint64_t *, CUgraph *, const CUgraphNode **, const void **, size_t *)) \
	X(cuGraphNodeGetDependencies, cuGraphNodeGetDependencies, (CUgraphNode, CUgraphNode *, size_t *)) \
	X(cuStreamWaitEvent, cuStreamWaitEvent, (CUstream, CUevent, unsigned)) \
	X(cuStreamSynchronize, cuStreamSynchronize, (CUstream)) \
	X(cuEventCreate, cuEventCreate, (CUevent *, unsigned)) \
	X(cuEventDestroy, cuEventDestroy_v2, (CUevent)) \
	X(cuIpcGetEventHandle, cuIpcGetEventHandle, (CUipcEventHandle *, CUevent)) \
	X(cuIpcOpenEventHandle, cuIpcOpenEventHandle, (CUevent *, CUipcEventHandle)) \
	X(cuEventRecord, cuEventRecord, (CUevent, CUstream)) \
	X(cuEventQuery, cuEventQuery, (CUevent)) \
	X(cuEventSynchronize, cuEventSynchronize, (CUevent)) \
	X(cuEventElapsedTime, cuEventElapsedTime, (float *, CUevent, CUevent)) \
	X(cuStreamCreate, cuStreamCreate, (CUstream *, unsigned)) \
	X(cuStreamDestroy, cuStreamDestroy_v2, (CUstream)) \
	X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (CUstream, int)) \
	X(cuStreamEndCapture, cuStreamEndCapture, (CUstream, CUgraph *)) \
	X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long)) \
	X(cuGraphLaunch, cuGraphLaunch, (CUgraphExec, CUstream)) \
	X(cuGraphExecDestroy, cuGraphExecDestroy, (CUgraphExec)) \
	X(cuGraphDestroy, cuGraphDestroy, (CUgraph)) \
	X(cuModuleLoadDataEx, cuModuleLoadDataEx, (CUmodule *, const void *, unsigned, int *, void **)) \
	X(cuModuleUnload, cuModuleUnload, (CUmodule)) \
	X(cuModuleGetFunction, cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
	X(cuLaunchKernel, cuLaunchKernel, \
	  (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)) \
	X(cuMemcpyHtoD, cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t)) \
	X(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t)) \
	X(cuMemsetD8Async, cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))

enum nv_call {
#define X(name, symbol, parameters) NV_##name,
	NV_CALLS(X)
#undef X
	NV_CALL_COUNT
};

// nv_result tells what failed as well as how: zero is success, else the CUresult in the low 32 bits (NV_MISSING: the
// driver lacks the call) and enum nv_call above them.
typedef int64_t nv_result;
#define NV_MISSING 0x7fffffff

// NV_LEGACY_STREAM_ID is the number that the legacy default stream of a context goes by here. The driver counts from
// below.
#define NV_LEGACY_STREAM_ID UINT64_MAX

typedef struct nv_driver nv_driver;

// nv_open opens the library and looks up every call. It initialises nothing. On failure it returns NULL and writes the
// loader's reason to reason.
nv_driver *nv_open(const char *path, char *reason, size_t reason_size);
// nv_init is cuInit, and learns version and devices.
nv_result nv_init(nv_driver *d, int *version, int *devices);
// nv_close undoes nv_open; only for a driver that could not be initialised.
void nv_close(nv_driver *d);
const char *nv_call_name(int call);

typedef struct {
	char name[256];
	CUuuid uuid;
	uint64_t total;
	uint64_t granularity;
	int vmm, posix, fabric, rdma, multiproc;
	int managed, pools, pool_handles;
	int host_numa; // -1 where there is none
	int host_vmm;
} nv_info;

// The cuda.Driver interface. dev is a device's ordinal.
nv_result nv_device_info(nv_driver *d, intptr_t dev, nv_info *info);
nv_result nv_context_active(nv_driver *d, intptr_t dev, int *active);
nv_result nv_context_retain(nv_driver *d, intptr_t dev);
nv_result nv_can_access_peer(nv_driver *d, intptr_t dev, intptr_t peer, int *can);
nv_result nv_enable_peer_access(nv_driver *d, intptr_t dev, intptr_t peer);
nv_result nv_mem_info(nv_driver *d, intptr_t dev, size_t *free, size_t *total);
nv_result nv_mem_alloc(nv_driver *d, intptr_t dev, size_t size, CUdeviceptr *p);
nv_result nv_mem_free(nv_driver *d, intptr_t dev, CUdeviceptr p);
nv_result nv_address_reserve(nv_driver *d, size_t size, size_t align, CUdeviceptr hint, CUdeviceptr *p);
nv_result nv_address_free(nv_driver *d, CUdeviceptr p, size_t size);
nv_result nv_mem_create(nv_driver *d, size_t size, intptr_t dev, int host_numa, int node, int handles, int rdma,
			CUmemGenericAllocationHandle *h);
nv_result nv_mem_release(nv_driver *d, CUmemGenericAllocationHandle h);
nv_result nv_mem_map(nv_driver *d, CUdeviceptr p, size_t size, CUmemGenericAllocationHandle h);
nv_result nv_mem_unmap(nv_driver *d, CUdeviceptr p, size_t size);
nv_result nv_mem_set_access(nv_driver *d, CUdeviceptr p, size_t size, const intptr_t *devs, size_t n, int flags);
nv_result nv_mem_export(nv_driver *d, CUmemGenericAllocationHandle h, int *fd);
nv_result nv_mem_import(nv_driver *d, int fd, CUmemGenericAllocationHandle *h);
nv_result nv_ipc_export(nv_driver *d, intptr_t dev, CUdeviceptr p, CUipcMemHandle *h);
nv_result nv_ipc_open(nv_driver *d, intptr_t dev, const CUipcMemHandle *h, CUdeviceptr *p);
nv_result nv_ipc_close(nv_driver *d, intptr_t dev, CUdeviceptr p);
nv_result nv_stream_id(nv_driver *d, intptr_t dev, uintptr_t s, uint64_t *context, unsigned long long *id);
nv_result nv_stream_capture(nv_driver *d, intptr_t dev, uintptr_t s, int *status, uint64_t *id);

// nv_capture_nodes and nv_node_dependencies write up to max nodes, and to n how many there are.
nv_result nv_capture_nodes(nv_driver *d, intptr_t dev, uintptr_t s, uint64_t *id, uintptr_t *nodes, size_t max, size_t *n);
nv_result nv_node_dependencies(nv_driver *d, intptr_t dev, uintptr_t node, uintptr_t *nodes, size_t max, size_t *n);
nv_result nv_stream_wait_event(nv_driver *d, intptr_t dev, uintptr_t s, uintptr_t e);
nv_result nv_stream_synchronize(nv_driver *d, intptr_t dev, uintptr_t s);
nv_result nv_context_synchronize(nv_driver *d, intptr_t dev);
nv_result nv_event_create(nv_driver *d, intptr_t dev, unsigned flags, uintptr_t *e);
nv_result nv_event_destroy(nv_driver *d, intptr_t dev, uintptr_t e);
nv_result nv_event_record(nv_driver *d, intptr_t dev, uintptr_t e, uintptr_t s);
nv_result nv_event_query(nv_driver *d, intptr_t dev, uintptr_t e);
nv_result nv_event_synchronize(nv_driver *d, intptr_t dev, uintptr_t e);
nv_result nv_stream_create(nv_driver *d, intptr_t dev, unsigned flags, uintptr_t *s);
nv_result nv_stream_destroy(nv_driver *d, intptr_t dev, uintptr_t s);
nv_result nv_stream_blocking(nv_driver *d, intptr_t dev, uintptr_t s, int *blocking);
nv_result nv_memcpy(nv_driver *d, intptr_t dev, CUdeviceptr dst, CUdeviceptr src, size_t size, uintptr_t s);
nv_result nv_host_alloc(nv_driver *d, intptr_t dev, size_t size, uint64_t *p);
nv_result nv_host_free(nv_driver *d, intptr_t dev, uint64_t p);
nv_result nv_host_register(nv_driver *d, intptr_t dev, uint64_t p, size_t size);
nv_result nv_host_unregister(nv_driver *d, intptr_t dev, uint64_t p);
nv_result nv_managed_alloc(nv_driver *d, intptr_t dev, size_t size, CUdeviceptr *p);
nv_result nv_prefetch(nv_driver *d, intptr_t dev, CUdeviceptr p, size_t size, int to_host, uintptr_t s);
nv_result nv_mem_set_host_access(nv_driver *d, CUdeviceptr p, size_t size, int node);
nv_result nv_pool_create(nv_driver *d, intptr_t dev, int handles, size_t max, uintptr_t *pool);
nv_result nv_pool_destroy(nv_driver *d, intptr_t dev, uintptr_t pool);
nv_result nv_pool_default(nv_driver *d, intptr_t dev, uintptr_t *pool);
nv_result nv_pool_get(nv_driver *d, intptr_t dev, uintptr_t pool, int attribute, uint64_t *value);
nv_result nv_pool_set(nv_driver *d, intptr_t dev, uintptr_t pool, int attribute, uint64_t value);
nv_result nv_pool_trim(nv_driver *d, intptr_t dev, uintptr_t pool, size_t keep);
nv_result nv_pool_set_access(nv_driver *d, intptr_t dev, uintptr_t pool, const intptr_t *devs, size_t n);
nv_result nv_alloc_async(nv_driver *d, intptr_t dev, size_t size, uintptr_t pool, uintptr_t s, CUdeviceptr *p);
nv_result nv_free_async(nv_driver *d, intptr_t dev, CUdeviceptr p, uintptr_t s);
nv_result nv_pool_export(nv_driver *d, intptr_t dev, uintptr_t pool, int *fd);
nv_result nv_pool_import(nv_driver *d, intptr_t dev, int fd, uintptr_t *pool);
nv_result nv_pool_export_ptr(nv_driver *d, intptr_t dev, CUdeviceptr p, CUmemPoolPtrExportData *h);
nv_result nv_pool_import_ptr(nv_driver *d, intptr_t dev, uintptr_t pool, const CUmemPoolPtrExportData *h, CUdeviceptr *p);
nv_result nv_event_export(nv_driver *d, intptr_t dev, uintptr_t e, CUipcEventHandle *h);
nv_result nv_event_open(nv_driver *d, intptr_t dev, const CUipcEventHandle *h, uintptr_t *e);

// Work for the GPU: kernels, copies that wait, captures.
nv_result nv_event_elapsed(nv_driver *d, intptr_t dev, uintptr_t from, uintptr_t to, float *ms);
nv_result nv_capture_begin(nv_driver *d, intptr_t dev, uintptr_t s, int mode);
nv_result nv_capture_end(nv_driver *d, intptr_t dev, uintptr_t s, uintptr_t *graph);
nv_result nv_graph_instantiate(nv_driver *d, intptr_t dev, uintptr_t graph, uintptr_t *exec);
nv_result nv_graph_launch(nv_driver *d, intptr_t dev, uintptr_t exec, uintptr_t s);
nv_result nv_graph_exec_destroy(nv_driver *d, intptr_t dev, uintptr_t exec);
nv_result nv_graph_destroy(nv_driver *d, intptr_t dev, uintptr_t graph);
nv_result nv_module_load(nv_driver *d, intptr_t dev, const char *image, uintptr_t *module, char *log, size_t log_size);
nv_result nv_module_unload(nv_driver *d, intptr_t dev, uintptr_t module);
nv_result nv_module_function(nv_driver *d, intptr_t dev, uintptr_t module, const char *name, uintptr_t *function);
nv_result nv_launch(nv_driver *d, intptr_t dev, uintptr_t function, unsigned grid, unsigned block, uintptr_t s,
		    const uint64_t *args, size_t n);
nv_result nv_copy_to_device(nv_driver *d, intptr_t dev, CUdeviceptr to, const void *from, size_t size);
nv_result nv_copy_from_device(nv_driver *d, intptr_t dev, void *to, CUdeviceptr from, size_t size);
nv_result nv_memset(nv_driver *d, intptr_t dev, CUdeviceptr p, unsigned char value, size_t size, uintptr_t s);

#endif

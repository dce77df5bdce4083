// A stand-in for CUDA's runtime library, for PyTorch on a machine without a GPU. Each call becomes calls of libcuda.so.1, which is
// the stand-in of cuda/nvidia/standin: its memory is memory of the host, and work is done when it is queued.
//
// There are no kernels: a launch fails with cudaErrorNotSupported, as does every function of NVIDIA's that is not written here.
// It is compiled with CUDA's headers of the version that PyTorch was built with, so that signatures and structures are right.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static __thread int chosen; // by cudaSetDevice, in effect once the thread has a context
static __thread cudaError_t last;

// The codes of the driver are those of the runtime.
static cudaError_t ended(CUresult r) {
	if (r != CUDA_SUCCESS && r != CUDA_ERROR_NOT_READY)
		last = (cudaError_t)r;
	return (cudaError_t)r;
}

// cuCtxSetCurrent of the primary context, without a reference for each time that it is set.
static CUresult use_primary(int device) {
	static CUcontext primary[8];
	CUcontext context = __atomic_load_n(&primary[device], __ATOMIC_ACQUIRE);
	if (context == NULL) {
		CUresult r = cuDevicePrimaryCtxRetain(&context, device);
		if (r != CUDA_SUCCESS)
			return r;
		__atomic_store_n(&primary[device], context, __ATOMIC_RELEASE);
	}
	return cuCtxSetCurrent(context);
}

// What every call does first: start the driver, and make the device's primary context current where no context is.
static CUresult begin(void) {
	static int started;
	CUcontext context = NULL;
	if (!__atomic_load_n(&started, __ATOMIC_ACQUIRE)) {
		CUresult r = cuInit(0);
		if (r != CUDA_SUCCESS)
			return r;
		__atomic_store_n(&started, 1, __ATOMIC_RELEASE);
	}
	CUresult r = cuCtxGetCurrent(&context);
	return r == CUDA_SUCCESS && context == NULL ? use_primary(chosen) : r;
}

#define BEGIN \
	CUresult begun = begin(); \
	if (begun != CUDA_SUCCESS) \
		return ended(begun);
// A function that has the driver's arguments.
#define SAME(name, parameters, call) \
	cudaError_t name parameters { \
		BEGIN \
		return ended(call); \
	}

// Errors and devices.

cudaError_t cudaGetLastError(void) {
	cudaError_t e = last;
	last = cudaSuccess;
	return e;
}
cudaError_t cudaPeekAtLastError(void) { return last; }

const char *cudaGetErrorString(cudaError_t e) {
	const char *s = NULL;
	return cuGetErrorString((CUresult)e, &s) == CUDA_SUCCESS ? s : "unrecognized error code";
}
const char *cudaGetErrorName(cudaError_t e) {
	const char *s = NULL;
	return cuGetErrorName((CUresult)e, &s) == CUDA_SUCCESS ? s : "unrecognized error code";
}

SAME(cudaDriverGetVersion, (int *version), cuDriverGetVersion(version))
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceCount(int *n) {
	CUresult r = cuInit(0);
	return ended(r == CUDA_SUCCESS ? cuDeviceGetCount(n) : r);
}

cudaError_t cudaGetDevice(int *device) {
	CUcontext context = NULL;
	CUdevice of = 0;
	if (cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != NULL && cuCtxGetDevice(&of) == CUDA_SUCCESS)
		chosen = of;
	return *device = chosen, cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
	int n = 0;
	cudaError_t e = cudaGetDeviceCount(&n);
	if (e != cudaSuccess)
		return e;
	if (device < 0 || device >= n)
		return ended(CUDA_ERROR_INVALID_DEVICE);
	chosen = device;
	return ended(use_primary(device));
}

SAME(cudaDeviceSynchronize, (void), cuCtxSynchronize())
SAME(cudaDeviceCanAccessPeer, (int *can, int device, int peer), cuDeviceCanAccessPeer(can, device, peer))

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
	CUcontext context = NULL;
	BEGIN
	CUresult r = cuDevicePrimaryCtxRetain(&context, peer);
	return ended(r == CUDA_SUCCESS ? cuCtxEnablePeerAccess(context, flags) : r);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
	BEGIN
	switch (attribute) {
	case cudaDevAttrComputeCapabilityMajor: return *value = 9, cudaSuccess;
	case cudaDevAttrComputeCapabilityMinor: return *value = 0, cudaSuccess;
	default: return ended(cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device));
	}
}

// An H200's, as far as PyTorch asks.
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
	BEGIN
	memset(p, 0, sizeof *p);
	CUresult r = cuDeviceGetName(p->name, sizeof p->name, device);
	if (r == CUDA_SUCCESS)
		r = cuDeviceGetUuid((CUuuid *)&p->uuid, device);
	if (r == CUDA_SUCCESS)
		r = cuDeviceTotalMem(&p->totalGlobalMem, device);
	p->major = 9;
	p->multiProcessorCount = 132;
	p->maxThreadsPerMultiProcessor = 2048;
	p->maxThreadsPerBlock = 1024;
	p->maxGridSize[0] = 0x7fffffff;
	p->maxGridSize[1] = p->maxGridSize[2] = 65535;
	p->warpSize = 32;
	p->regsPerMultiprocessor = 65536;
	p->sharedMemPerBlock = 48 << 10;
	p->sharedMemPerBlockOptin = 227 << 10;
	p->sharedMemPerMultiprocessor = 228 << 10;
	p->l2CacheSize = 60 << 20;
	p->unifiedAddressing = p->managedMemory = p->concurrentKernels = 1;
	p->pciBusID = device + 1;
	return ended(r);
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int device) {
	BEGIN
	snprintf(id, (size_t)n, "0000:%02x:00.0", device + 1);
	return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }

// A function of the driver, of its newest interface; PyTorch asks for what it may never call.
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **fn, unsigned version, unsigned long long flags,
					     enum cudaDriverEntryPointQueryResult *found) {
	void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); // which is linked
	char newer[128];
	BEGIN
	(void)version, (void)flags;
	for (int v = 3; v >= 1; v--) {
		snprintf(newer, sizeof newer, v > 1 ? "%s_v%d" : "%s", name, v);
		if ((*fn = dlsym(driver, newer)) != NULL)
			break;
	}
	if (found != NULL)
		*found = *fn != NULL ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
	return cudaSuccess;
}

// Memory.

cudaError_t cudaMalloc(void **p, size_t size) {
	BEGIN
	*p = NULL;
	return size == 0 ? cudaSuccess : ended(cuMemAlloc((CUdeviceptr *)p, size));
}
cudaError_t cudaFree(void *p) {
	BEGIN
	return p == NULL ? cudaSuccess : ended(cuMemFree((CUdeviceptr)p));
}
cudaError_t cudaMallocManaged(void **p, size_t size, unsigned flags) {
	BEGIN
	return ended(cuMemAllocManaged((CUdeviceptr *)p, size, flags));
}
SAME(cudaMallocAsync, (void **p, size_t size, cudaStream_t s), cuMemAllocAsync((CUdeviceptr *)p, size, s))
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) {
	BEGIN
	return p == NULL ? cudaSuccess : ended(cuMemFreeAsync((CUdeviceptr)p, s));
}
SAME(cudaMemGetInfo, (size_t *free, size_t *total), cuMemGetInfo(free, total))
SAME(cudaDeviceGetDefaultMemPool, (cudaMemPool_t *pool, int device), cuDeviceGetDefaultMemPool(pool, device))
SAME(cudaMemPoolGetAttribute, (cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value),
     cuMemPoolGetAttribute(pool, (CUmemPool_attribute)a, value))
SAME(cudaMemPoolSetAttribute, (cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value),
     cuMemPoolSetAttribute(pool, (CUmemPool_attribute)a, value))
SAME(cudaMemPoolTrimTo, (cudaMemPool_t pool, size_t bytes), cuMemPoolTrimTo(pool, bytes))
SAME(cudaMemPoolSetAccess, (cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t n),
     cuMemPoolSetAccess(pool, (const CUmemAccessDesc *)list, n))

SAME(cudaHostAlloc, (void **p, size_t size, unsigned flags), cuMemHostAlloc(p, size, flags))
cudaError_t cudaMallocHost(void **p, size_t size) { return cudaHostAlloc(p, size, 0); }
cudaError_t cudaFreeHost(void *p) {
	BEGIN
	return p == NULL ? cudaSuccess : ended(cuMemFreeHost(p));
}
SAME(cudaHostRegister, (void *p, size_t size, unsigned flags), cuMemHostRegister(p, size, flags))
SAME(cudaHostUnregister, (void *p), cuMemHostUnregister(p))

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
	unsigned type = 0;
	int device = 0;
	BEGIN
	memset(a, 0, sizeof *a);
	a->device = -1;
	if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)p) != CUDA_SUCCESS)
		return cudaSuccess; // memory that CUDA does not know
	CUresult r = cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (CUdeviceptr)p);
	a->type = (enum cudaMemoryType)type;
	a->device = device;
	a->devicePointer = (void *)p;
	a->hostPointer = a->type == cudaMemoryTypeDevice ? NULL : (void *)p;
	return ended(r);
}

SAME(cudaMemcpyAsync, (void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s),
     ((void)kind, cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, size, s)))
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
	return cudaMemcpyAsync(to, from, size, kind, NULL);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int at, const void *from, int of, size_t size, cudaStream_t s) {
	(void)at, (void)of;
	return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, s);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t stride, size_t width, size_t height,
			      enum cudaMemcpyKind kind, cudaStream_t s) {
	cudaError_t e = cudaSuccess;
	for (size_t i = 0; i < height && e == cudaSuccess; i++)
		e = cudaMemcpyAsync((char *)to + i * pitch, (const char *)from + i * stride, width, kind, s);
	return e;
}
SAME(cudaMemsetAsync, (void *p, int value, size_t size, cudaStream_t s),
     cuMemsetD8Async((CUdeviceptr)p, (unsigned char)value, size, s))
cudaError_t cudaMemset(void *p, int value, size_t size) { return cudaMemsetAsync(p, value, size, NULL); }

SAME(cudaIpcGetMemHandle, (cudaIpcMemHandle_t *h, void *p), cuIpcGetMemHandle((CUipcMemHandle *)h, (CUdeviceptr)p))
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) {
	CUipcMemHandle h;
	BEGIN
	memcpy(&h, &handle, sizeof h);
	return ended(cuIpcOpenMemHandle((CUdeviceptr *)p, h, flags));
}
SAME(cudaIpcCloseMemHandle, (void *p), cuIpcCloseMemHandle((CUdeviceptr)p))

// Streams and events.

SAME(cudaStreamCreateWithFlags, (cudaStream_t *s, unsigned flags), cuStreamCreate(s, flags))
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
	(void)priority; // work is never in a queue
	return cudaStreamCreateWithFlags(s, flags);
}
SAME(cudaStreamDestroy, (cudaStream_t s), cuStreamDestroy(s))
SAME(cudaStreamQuery, (cudaStream_t s), cuStreamQuery(s))
SAME(cudaStreamSynchronize, (cudaStream_t s), cuStreamSynchronize(s))
SAME(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t e, unsigned flags), cuStreamWaitEvent(s, e, flags))

SAME(cudaEventCreateWithFlags, (cudaEvent_t *e, unsigned flags), cuEventCreate(e, flags))
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
SAME(cudaEventDestroy, (cudaEvent_t e), cuEventDestroy(e))
SAME(cudaEventQuery, (cudaEvent_t e), cuEventQuery(e))
SAME(cudaEventSynchronize, (cudaEvent_t e), cuEventSynchronize(e))
SAME(cudaEventElapsedTime, (float *ms, cudaEvent_t from, cudaEvent_t to), cuEventElapsedTime(ms, from, to))
SAME(cudaEventRecord, (cudaEvent_t e, cudaStream_t s), cuEventRecord(e, s))
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
	(void)flags; // of captures with events as nodes
	return cudaEventRecord(e, s);
}

// What an event of another process marks is done, as is all work: opened, it is one that nothing was recorded in.
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) {
	BEGIN
	memset(h, 0, sizeof *h);
	snprintf(h->reserved, sizeof h->reserved, "event %d %p", getpid(), (void *)e);
	return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) {
	return strncmp(h.reserved, "event ", 6) != 0 ? ended(CUDA_ERROR_INVALID_HANDLE) : cudaEventCreate(e);
}

// Host functions are called at once, as all work is done when it is queued. In a capture they would be nodes.
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *data) {
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	BEGIN
	CUresult r = cuStreamIsCapturing(s, &status);
	if (r != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE)
		return ended(r != CUDA_SUCCESS ? r : CUDA_ERROR_NOT_SUPPORTED);
	fn(data);
	return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

// Captures.

SAME(cudaThreadExchangeStreamCaptureMode, (enum cudaStreamCaptureMode *m), cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)m))
SAME(cudaStreamBeginCapture, (cudaStream_t s, enum cudaStreamCaptureMode m), cuStreamBeginCapture(s, (CUstreamCaptureMode)m))
SAME(cudaStreamEndCapture, (cudaStream_t s, cudaGraph_t *graph), cuStreamEndCapture(s, graph))
SAME(cudaStreamIsCapturing, (cudaStream_t s, enum cudaStreamCaptureStatus *status),
     cuStreamIsCapturing(s, (CUstreamCaptureStatus *)status))
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
				     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
	cuuint64_t number = 0;
	BEGIN
	if (graph != NULL)
		*graph = NULL;
	if (edges != NULL)
		*edges = NULL;
	CUresult r = cuStreamGetCaptureInfo(s, (CUstreamCaptureStatus *)status, &number, graph, nodes, NULL, n);
	if (id != NULL)
		*id = number;
	return ended(r);
}
SAME(cudaGraphInstantiateWithFlags, (cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags),
     cuGraphInstantiateWithFlags(exec, graph, flags))
SAME(cudaGraphInstantiate, (cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags),
     cuGraphInstantiateWithFlags(exec, graph, flags))
SAME(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t s), cuGraphLaunch(exec, s))
// The driver's stand-in keeps no nodes: what is captured here is done when it is queued.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
	(void)graph, (void)nodes;
	return *n = 0, cudaSuccess;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *after, cudaGraphEdgeData *edges, size_t *n) {
	BEGIN
	return ended(cuGraphNodeGetDependencies(node, after, (CUgraphEdgeData *)edges, n));
}
SAME(cudaGraphDestroy, (cudaGraph_t graph), cuGraphDestroy(graph))
SAME(cudaGraphExecDestroy, (cudaGraphExec_t exec), cuGraphExecDestroy(exec))

// Kernels are registered when PyTorch's libraries are loaded, and fail when they are launched.

void **__cudaRegisterFatBinary(void *image) {
	static void *handle;
	(void)image;
	return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle) { return (void)handle, 0; }
// It succeeds, as the compiler's code for <<<>>> leaves a launch out otherwise.
unsigned __cudaPushCallConfiguration(void) { return 0; }
int __cudaPopCallConfiguration(void) { return 0; }

// What all other functions return, which standin.py makes of their names.
int standin_unsupported(void) { return ended(CUDA_ERROR_NOT_SUPPORTED); }

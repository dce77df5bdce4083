// The functions of the driver that are seen. Each calls the driver's own, with the same arguments, and makes an event of
// it. The signatures are those of the CUDA Driver API documentation; versions before CUDA 3.2, with 32-bit addresses,
// are not seen.

#include "audit.h"

typedef uint64_t dptr;
typedef struct { char bytes[64]; } ipc_handle;

struct location { int type, id; };
struct prop { int type, handles; struct location location; };     // the beginning of CUmemAllocationProp
struct pool_props { int type, handles; struct location location; }; // and of CUmemPoolProps
struct access_desc { struct location location; int flags; };
struct array { size_t width, height; int format; unsigned channels; };
struct array_3d { size_t width, height, depth; int format; unsigned channels, flags; };
struct external { int type; union { int fd; struct { void *handle; const void *name; } win32; } handle; unsigned long long size; unsigned flags; };

// Indices of entries, in their order.
#define ENTRIES(X) \
	X(cuMemAlloc_v2) X(cuMemAllocPitch_v2) X(cuMemAllocManaged) X(cuMemAllocHost_v2) X(cuMemHostAlloc) \
	X(cuMemHostRegister_v2) X(cuMemHostRegister) X(cuMemHostUnregister) X(cuMemFree_v2) X(cuMemFreeHost) \
	X(cuMemAllocAsync) X(cuMemAllocAsync_ptsz) X(cuMemAllocFromPoolAsync) X(cuMemAllocFromPoolAsync_ptsz) \
	X(cuMemFreeAsync) X(cuMemFreeAsync_ptsz) X(cuMemPoolCreate) X(cuMemPoolDestroy) X(cuMemPoolTrimTo) X(cuMemPoolImportPointer) \
	X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) \
	X(cuMemRetainAllocationHandle) X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle) \
	X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle_v2) X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle) \
	X(cuArrayCreate_v2) X(cuArray3DCreate_v2) X(cuArrayDestroy) X(cuMipmappedArrayCreate) X(cuMipmappedArrayDestroy) \
	X(cuImportExternalMemory) X(cuDestroyExternalMemory) \
	X(cuDevicePrimaryCtxReset_v2) X(cuDevicePrimaryCtxReset) X(cuDevicePrimaryCtxRelease_v2) X(cuDevicePrimaryCtxRelease) \
	X(cuCtxDestroy_v2) X(cuCtxDestroy) \
	X(cuGraphAddMemAllocNode) X(cuGraphAddNode) X(cuGraphAddNode_v2) X(cuGraphLaunch) X(cuGraphLaunch_ptsz) X(cuGraphUpload) \
	X(cuGraphUpload_ptsz) X(cuDeviceGraphMemTrim) X(cuMemMapArrayAsync) X(cuMemMapArrayAsync_ptsz) \
	X(cuGetProcAddress_v2) X(cuGetProcAddress_v2_ptsz) X(cuGetProcAddress) X(cuGetProcAddress_ptsz)

#define INDEX(name) AT_##name,
enum { ENTRIES(INDEX) ENTRY_COUNT };

#define REAL(name, ...) (((int (*)(__VA_ARGS__))__atomic_load_n(&entries[AT_##name].real, __ATOMIC_RELAXED)))
#define BEGIN(call) \
	struct event e; \
	begin(&e, call, __builtin_return_address(0), __builtin_frame_address(0), __builtin_dwarf_cfa());

enum { AT_DEVICE = 1, RESERVED_MEM_CURRENT = 5, PER_THREAD = 2, FIRST_VERSION = 3020, LAST_VERSION = 13999,
	OUT_OF_MEMORY = 2, ARRAY_SPARSE = 0x40, ARRAY_DEFERRED = 0x80, NODES_WITH_EDGES = 12030 };

// Plain, pitched, managed and host memory.

static int my_cuMemAlloc_v2(dptr *p, size_t size) {
	BEGIN(MEM_ALLOC)
	int r = REAL(cuMemAlloc_v2, dptr *, size_t)(p, size);
	e.size = size;
	e.addr = r == 0 ? *p : 0;
	finish(&e, r);
	return r;
}

static int my_cuMemAllocPitch_v2(dptr *p, size_t *pitch, size_t width, size_t height, unsigned element) {
	BEGIN(MEM_ALLOC_PITCH)
	int r = REAL(cuMemAllocPitch_v2, dptr *, size_t *, size_t, size_t, unsigned)(p, pitch, width, height, element);
	e.size = r == 0 ? *pitch * height : width * height;
	e.addr = r == 0 ? *p : 0;
	finish(&e, r);
	return r;
}

static int my_cuMemAllocManaged(dptr *p, size_t size, unsigned flags) {
	BEGIN(MEM_ALLOC_MANAGED)
	int r = REAL(cuMemAllocManaged, dptr *, size_t, unsigned)(p, size, flags);
	e.size = size;
	e.addr = r == 0 ? *p : 0;
	finish(&e, r);
	return r;
}

static int my_cuMemAllocHost_v2(void **p, size_t size) {
	BEGIN(MEM_ALLOC_HOST)
	int r = REAL(cuMemAllocHost_v2, void **, size_t)(p, size);
	e.size = size;
	e.addr = r == 0 ? (uintptr_t)*p : 0;
	finish(&e, r);
	return r;
}

static int my_cuMemHostAlloc(void **p, size_t size, unsigned flags) {
	BEGIN(MEM_HOST_ALLOC)
	int r = REAL(cuMemHostAlloc, void **, size_t, unsigned)(p, size, flags);
	e.size = size;
	e.addr = r == 0 ? (uintptr_t)*p : 0;
	finish(&e, r);
	return r;
}

#define REGISTER(name) \
	static int my_##name(void *p, size_t size, unsigned flags) { \
		BEGIN(MEM_HOST_REGISTER) \
		int r = REAL(name, void *, size_t, unsigned)(p, size, flags); \
		e.size = size; \
		e.addr = (uintptr_t)p; \
		finish(&e, r); \
		return r; \
	}
REGISTER(cuMemHostRegister_v2)
REGISTER(cuMemHostRegister)

// What takes one address or handle back.
#define FREE(name, kind, type, field) \
	static int my_##name(type p) { \
		BEGIN(kind) \
		e.field = (uintptr_t)p; \
		int r = REAL(name, type)(p); \
		finish(&e, r); \
		return r; \
	}
FREE(cuMemHostUnregister, MEM_HOST_UNREGISTER, void *, addr)
FREE(cuMemFree_v2, MEM_FREE, dptr, addr)
FREE(cuMemFreeHost, MEM_FREE_HOST, void *, addr)
FREE(cuMemPoolDestroy, MEM_POOL_DESTROY, void *, pool)
FREE(cuMemRelease, MEM_RELEASE, uint64_t, handle)
FREE(cuIpcCloseMemHandle, IPC_CLOSE_MEM_HANDLE, dptr, addr)
FREE(cuArrayDestroy, ARRAY_DESTROY, void *, handle)
FREE(cuMipmappedArrayDestroy, MIPMAPPED_ARRAY_DESTROY, void *, handle)
FREE(cuDestroyExternalMemory, DESTROY_EXTERNAL_MEMORY, void *, handle)

// Graphs. Memory that their nodes allocate is got from the device when a graph is first launched, or uploaded, and stays
// with the device's graphs until it is trimmed. So those calls are looked at once a node has been added that allocates,
// and recorded where what graphs hold is another amount than before.

enum { GRAPH_RESERVED_MEM_CURRENT = 2, NODE_MEM_ALLOC = 10 };

static int allocating_graphs; // some graph of the process has such a node
static uint64_t graphs_held[MOST_DEVICES];

static void graphs_allocate(void) { __atomic_store_n(&allocating_graphs, 1, __ATOMIC_RELAXED); }

// graphs_now asks what the graphs of the event's device hold, and reports whether that is another amount than it was.
static int graphs_now(struct event *e) {
	uint64_t held = 0;
	if (e->device < 0 || e->device >= MOST_DEVICES || helpers.device_get_graph_mem_attribute == NULL ||
	    helpers.device_get_graph_mem_attribute(e->device, GRAPH_RESERVED_MEM_CURRENT, &held) != 0)
		return 0;
	e->extra = held;
	return __atomic_exchange_n(&graphs_held[e->device], held, __ATOMIC_RELAXED) != held;
}

#define GRAPH(name, kind) \
	static int my_##name(void *exec, void *stream) { \
		if (!__atomic_load_n(&allocating_graphs, __ATOMIC_RELAXED)) \
			return REAL(name, void *, void *)(exec, stream); \
		BEGIN(kind) \
		int r = REAL(name, void *, void *)(exec, stream); \
		e.handle = (uintptr_t)exec; \
		e.stream = (uintptr_t)stream; \
		e.device = current_device(); \
		if (graphs_now(&e) || r == OUT_OF_MEMORY) { \
			if (r == OUT_OF_MEMORY) \
				e.extra = 0; \
			finish(&e, r); \
		} \
		return r; \
	}
GRAPH(cuGraphLaunch, GRAPH_LAUNCH)
GRAPH(cuGraphLaunch_ptsz, GRAPH_LAUNCH)
GRAPH(cuGraphUpload, GRAPH_UPLOAD)
GRAPH(cuGraphUpload_ptsz, GRAPH_UPLOAD)

static int my_cuDeviceGraphMemTrim(int device) {
	BEGIN(DEVICE_GRAPH_MEM_TRIM)
	int r = REAL(cuDeviceGraphMemTrim, int)(device);
	e.device = device;
	graphs_now(&e);
	finish(&e, r);
	return r;
}

struct alloc_node { struct pool_props props; char rest[72]; const struct access_desc *access; size_t accesses, size; dptr p; };
struct any_node { int type, reserved[3]; struct alloc_node alloc; };

static void node_added(struct event *e, const struct alloc_node *a, int r) {
	graphs_allocate();
	e->size = a->size;
	e->addr = r == 0 ? a->p : 0;
	e->device = a->props.location.type == AT_DEVICE ? a->props.location.id : -1;
	finish(e, r);
}

static int my_cuGraphAddMemAllocNode(void **node, void *graph, void *const *after, size_t n, struct alloc_node *a) {
	BEGIN(GRAPH_ADD_MEM_ALLOC_NODE)
	int r = REAL(cuGraphAddMemAllocNode, void **, void *, void *const *, size_t, struct alloc_node *)(node, graph, after, n, a);
	e.handle = (uintptr_t)graph;
	if (a != NULL)
		node_added(&e, a, r);
	return r;
}

static int my_cuGraphAddNode(void **node, void *graph, void *const *after, size_t n, struct any_node *a) {
	BEGIN(GRAPH_ADD_MEM_ALLOC_NODE)
	int r = REAL(cuGraphAddNode, void **, void *, void *const *, size_t, struct any_node *)(node, graph, after, n, a);
	e.handle = (uintptr_t)graph;
	if (a != NULL && a->type == NODE_MEM_ALLOC)
		node_added(&e, &a->alloc, r);
	return r;
}

static int my_cuGraphAddNode_v2(void **node, void *graph, void *const *after, const void *edges, size_t n, struct any_node *a) {
	BEGIN(GRAPH_ADD_MEM_ALLOC_NODE)
	int r = REAL(cuGraphAddNode_v2, void **, void *, void *const *, const void *, size_t, struct any_node *)(node, graph, after, edges, n, a);
	e.handle = (uintptr_t)graph;
	if (a != NULL && a->type == NODE_MEM_ALLOC)
		node_added(&e, &a->alloc, r);
	return r;
}

// Stream-ordered memory. What a pool then holds from the driver is asked for with each allocation, which is when it grows.

static void reserved(struct event *e) {
	if (e->pool == 0 && helpers.device_get_mem_pool != NULL && (e->device = current_device()) >= 0) {
		void *pool = NULL;
		if (helpers.device_get_mem_pool(&pool, e->device) == 0)
			e->pool = (uintptr_t)pool;
	}
	uint64_t held = 0;
	if (e->pool != 0 && helpers.mem_pool_get_attribute != NULL &&
	    helpers.mem_pool_get_attribute((void *)(uintptr_t)e->pool, RESERVED_MEM_CURRENT, &held) == 0)
		e->extra = held;
}

// node_instead reports whether a call on a stream does nothing but add a node to the graph that is captured from it. The
// stream that others wait for without naming it cannot be captured.
static int node_instead(struct event *e, void *stream, int per_thread) {
	int status = 0;
	if (stream == NULL && per_thread)
		stream = (void *)2;
	if ((uintptr_t)stream <= 1 || helpers.stream_is_capturing == NULL || helpers.stream_is_capturing(stream, &status) != 0 || status == 0)
		return 0;
	e->call = GRAPH_ADD_MEM_ALLOC_NODE;
	graphs_allocate();
	return 1;
}

#define ALLOC_ASYNC(name, per_thread) \
	static int my_##name(dptr *p, size_t size, void *stream) { \
		BEGIN(MEM_ALLOC_ASYNC) \
		int r = REAL(name, dptr *, size_t, void *)(p, size, stream); \
		e.size = size; \
		e.stream = (uintptr_t)stream; \
		e.addr = r == 0 ? *p : 0; \
		if (!node_instead(&e, stream, per_thread) && r == 0) \
			reserved(&e); \
		finish(&e, r); \
		return r; \
	}
ALLOC_ASYNC(cuMemAllocAsync, 0)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, 1)

#define ALLOC_FROM_POOL_ASYNC(name, per_thread) \
	static int my_##name(dptr *p, size_t size, void *pool, void *stream) { \
		BEGIN(MEM_ALLOC_FROM_POOL_ASYNC) \
		int r = REAL(name, dptr *, size_t, void *, void *)(p, size, pool, stream); \
		e.size = size; \
		e.stream = (uintptr_t)stream; \
		e.pool = (uintptr_t)pool; \
		e.addr = r == 0 ? *p : 0; \
		if (!node_instead(&e, stream, per_thread) && r == 0) \
			reserved(&e); \
		finish(&e, r); \
		return r; \
	}
ALLOC_FROM_POOL_ASYNC(cuMemAllocFromPoolAsync, 0)
ALLOC_FROM_POOL_ASYNC(cuMemAllocFromPoolAsync_ptsz, 1)

#define FREE_ASYNC(name) \
	static int my_##name(dptr p, void *stream) { \
		BEGIN(MEM_FREE_ASYNC) \
		e.addr = p; \
		e.stream = (uintptr_t)stream; \
		int r = REAL(name, dptr, void *)(p, stream); \
		finish(&e, r); \
		return r; \
	}
FREE_ASYNC(cuMemFreeAsync)
FREE_ASYNC(cuMemFreeAsync_ptsz)

static int my_cuMemPoolCreate(void **pool, const struct pool_props *props) {
	BEGIN(MEM_POOL_CREATE)
	int r = REAL(cuMemPoolCreate, void **, const struct pool_props *)(pool, props);
	if (r == 0) {
		e.pool = (uintptr_t)*pool;
		e.device = props->location.type == AT_DEVICE ? props->location.id : -1;
	}
	finish(&e, r);
	return r;
}

static int my_cuMemPoolTrimTo(void *pool, size_t keep) {
	BEGIN(MEM_POOL_TRIM_TO)
	int r = REAL(cuMemPoolTrimTo, void *, size_t)(pool, keep);
	e.pool = (uintptr_t)pool;
	e.size = keep;
	if (r == 0)
		reserved(&e);
	finish(&e, r);
	return r;
}

static int my_cuMemPoolImportPointer(dptr *p, void *pool, void *data) {
	BEGIN(MEM_POOL_IMPORT_POINTER)
	int r = REAL(cuMemPoolImportPointer, dptr *, void *, void *)(p, pool, data);
	e.pool = (uintptr_t)pool;
	e.addr = r == 0 ? *p : 0;
	finish(&e, r);
	return r;
}

// Virtual memory.

static int my_cuMemAddressReserve(dptr *p, size_t size, size_t align, dptr hint, unsigned long long flags) {
	BEGIN(MEM_ADDRESS_RESERVE)
	int r = REAL(cuMemAddressReserve, dptr *, size_t, size_t, dptr, unsigned long long)(p, size, align, hint, flags);
	e.size = size;
	e.addr = r == 0 ? *p : 0;
	finish(&e, r);
	return r;
}

#define RANGE(name, kind) \
	static int my_##name(dptr p, size_t size) { \
		BEGIN(kind) \
		int r = REAL(name, dptr, size_t)(p, size); \
		e.addr = p; \
		e.size = size; \
		finish(&e, r); \
		return r; \
	}
RANGE(cuMemAddressFree, MEM_ADDRESS_FREE)
RANGE(cuMemUnmap, MEM_UNMAP)

static int my_cuMemCreate(uint64_t *handle, size_t size, const struct prop *prop, unsigned long long flags) {
	BEGIN(MEM_CREATE)
	int r = REAL(cuMemCreate, uint64_t *, size_t, const struct prop *, unsigned long long)(handle, size, prop, flags);
	e.size = size;
	e.handle = r == 0 ? *handle : 0;
	if (prop != NULL) {
		e.extra = (uint64_t)prop->location.type;
		e.device = prop->location.type == AT_DEVICE ? prop->location.id : -1;
	}
	finish(&e, r);
	return r;
}

static int my_cuMemMap(dptr p, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
	BEGIN(MEM_MAP)
	int r = REAL(cuMemMap, dptr, size_t, size_t, uint64_t, unsigned long long)(p, size, offset, handle, flags);
	e.addr = p;
	e.size = size;
	e.handle = handle;
	finish(&e, r);
	return r;
}

static int my_cuMemSetAccess(dptr p, size_t size, const struct access_desc *desc, size_t count) {
	BEGIN(MEM_SET_ACCESS)
	int r = REAL(cuMemSetAccess, dptr, size_t, const struct access_desc *, size_t)(p, size, desc, count);
	e.addr = p;
	e.size = size;
	e.extra = count;
	finish(&e, r);
	return r;
}

static int my_cuMemRetainAllocationHandle(uint64_t *handle, void *p) {
	BEGIN(MEM_RETAIN_ALLOCATION_HANDLE)
	int r = REAL(cuMemRetainAllocationHandle, uint64_t *, void *)(handle, p);
	e.addr = (uintptr_t)p;
	e.handle = r == 0 ? *handle : 0;
	finish(&e, r);
	return r;
}

// Sparse arrays: pieces of memory from cuMemCreate are mapped into them, and out. Each piece is an event of its own, with
// what tells where in which array it is as its address.

struct array_map {
	int resource;
	uint64_t array;
	int subresource;
	uint64_t where[4];
	int operation, kind;
	uint64_t handle, offset;
	unsigned devices, flags, reserved[2];
};

_Static_assert(sizeof(struct array_map) == 96 && sizeof(struct alloc_node) == 120, "as in CUDA");

enum { OPERATION_MAP = 1 };

#define MAP_ARRAY(name) \
	static int my_##name(struct array_map *list, unsigned n, void *stream) { \
		BEGIN(MEM_MAP_ARRAY_ASYNC) \
		int r = REAL(name, struct array_map *, unsigned, void *)(list, n, stream); \
		for (unsigned i = 0; list != NULL && i < n; i++) { \
			struct event each = e; \
			uint64_t h = list[i].array ^ (uint64_t)list[i].subresource << 56; \
			for (int k = 0; k < (list[i].subresource == 0 ? 4 : 3); k++) \
				h = (h ^ list[i].where[k]) * 0x9e3779b97f4a7c15u, h ^= h >> 31; \
			each.addr = h; \
			each.pool = list[i].array; \
			each.handle = list[i].operation == OPERATION_MAP ? list[i].handle : 0; \
			each.extra = list[i].operation == OPERATION_MAP; \
			each.stream = (uintptr_t)stream; \
			finish(&each, r); \
		} \
		return r; \
	}
MAP_ARRAY(cuMemMapArrayAsync)
MAP_ARRAY(cuMemMapArrayAsync_ptsz)

// Sharing.

static int my_cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags) {
	BEGIN(MEM_EXPORT_TO_SHAREABLE_HANDLE)
	int r = REAL(cuMemExportToShareableHandle, void *, uint64_t, int, unsigned long long)(out, handle, type, flags);
	e.handle = handle;
	finish(&e, r);
	return r;
}

static int my_cuMemImportFromShareableHandle(uint64_t *handle, void *from, int type) {
	BEGIN(MEM_IMPORT_FROM_SHAREABLE_HANDLE)
	int r = REAL(cuMemImportFromShareableHandle, uint64_t *, void *, int)(handle, from, type);
	e.handle = r == 0 ? *handle : 0;
	finish(&e, r);
	return r;
}

static int my_cuIpcGetMemHandle(ipc_handle *handle, dptr p) {
	BEGIN(IPC_GET_MEM_HANDLE)
	int r = REAL(cuIpcGetMemHandle, ipc_handle *, dptr)(handle, p);
	e.addr = p;
	finish(&e, r);
	return r;
}

#define IPC_OPEN(name) \
	static int my_##name(dptr *p, ipc_handle handle, unsigned flags) { \
		BEGIN(IPC_OPEN_MEM_HANDLE) \
		int r = REAL(name, dptr *, ipc_handle, unsigned)(p, handle, flags); \
		e.addr = r == 0 ? *p : 0; \
		finish(&e, r); \
		return r; \
	}
IPC_OPEN(cuIpcOpenMemHandle_v2)
IPC_OPEN(cuIpcOpenMemHandle)

static int my_cuImportExternalMemory(void **memory, const struct external *desc) {
	BEGIN(IMPORT_EXTERNAL_MEMORY)
	int r = REAL(cuImportExternalMemory, void **, const struct external *)(memory, desc);
	e.handle = r == 0 ? (uintptr_t)*memory : 0;
	e.size = desc != NULL ? desc->size : 0;
	finish(&e, r);
	return r;
}

// Arrays. Their sizes are those of their elements; what the driver adds for its layout is not known. Sparse arrays, and those
// that are mapped later, have no memory of their own.

static size_t element(int format, unsigned channels) {
	switch (format) {
	case 0x01: case 0x08: return channels;     // 8 bits
	case 0x02: case 0x09: case 0x10: return 2 * (size_t)channels;
	default: return 4 * (size_t)channels;
	}
}

static size_t at_least(size_t n) { return n == 0 ? 1 : n; }

static size_t bytes_3d(const struct array_3d *d) {
	return d == NULL || d->flags & (ARRAY_SPARSE | ARRAY_DEFERRED) ? 0 : d->width * at_least(d->height) * at_least(d->depth) * element(d->format, d->channels);
}

static int my_cuArrayCreate_v2(void **array, const struct array *desc) {
	BEGIN(ARRAY_CREATE)
	int r = REAL(cuArrayCreate_v2, void **, const struct array *)(array, desc);
	e.handle = r == 0 ? (uintptr_t)*array : 0;
	e.size = desc == NULL ? 0 : desc->width * at_least(desc->height) * element(desc->format, desc->channels);
	finish(&e, r);
	return r;
}

static int my_cuArray3DCreate_v2(void **array, const struct array_3d *desc) {
	BEGIN(ARRAY_3D_CREATE)
	int r = REAL(cuArray3DCreate_v2, void **, const struct array_3d *)(array, desc);
	e.handle = r == 0 ? (uintptr_t)*array : 0;
	e.size = bytes_3d(desc);
	finish(&e, r);
	return r;
}

static int my_cuMipmappedArrayCreate(void **array, const struct array_3d *desc, unsigned levels) {
	BEGIN(MIPMAPPED_ARRAY_CREATE)
	int r = REAL(cuMipmappedArrayCreate, void **, const struct array_3d *, unsigned)(array, desc, levels);
	e.handle = r == 0 ? (uintptr_t)*array : 0;
	size_t size = bytes_3d(desc), each = size;
	for (unsigned i = 1; i < levels && i < 32; i++)
		size += each >>= desc->depth > 1 ? 3 : desc->height > 1 ? 2 : 1;
	e.size = size;
	finish(&e, r);
	return r;
}

// Ends of contexts, with which all their memory goes. extra is 1 where the context is gone.

#define PRIMARY(name, kind, always) \
	static int my_##name(int device) { \
		BEGIN(kind) \
		int r = REAL(name, int)(device), active = !(always); \
		unsigned flags; \
		e.device = device; \
		if (r == 0 && active && helpers.primary_ctx_get_state != NULL) \
			helpers.primary_ctx_get_state(device, &flags, &active); \
		e.extra = !active; \
		finish(&e, r); \
		return r; \
	}
PRIMARY(cuDevicePrimaryCtxReset_v2, DEVICE_PRIMARY_CTX_RESET, 1)
PRIMARY(cuDevicePrimaryCtxReset, DEVICE_PRIMARY_CTX_RESET, 1)
PRIMARY(cuDevicePrimaryCtxRelease_v2, DEVICE_PRIMARY_CTX_RELEASE, 0)
PRIMARY(cuDevicePrimaryCtxRelease, DEVICE_PRIMARY_CTX_RELEASE, 0)

// What a context got has it as its extra.
FREE(cuCtxDestroy_v2, CTX_DESTROY, void *, handle)
FREE(cuCtxDestroy, CTX_DESTROY, void *, handle)

// The ways to more functions: the driver's answer is looked up among its own, and ours given instead. An address that is
// no exported function's is one of its own making for the name that was asked for: then ours calls that one from then on.
// All versions of a name from CUDA 3.2 to 13 take the same arguments, but for cuGetProcAddress; what is asked for as
// something later is left alone, and said not to be seen.

static void *instead(void *found, const char *name, int version, int per_thread);

#define PROC_V2(name) \
	static int my_##name(const char *symbol, void **fn, int version, uint64_t flags, int *status) { \
		int r = REAL(name, const char *, void **, int, uint64_t, int *)(symbol, fn, version, flags, status); \
		if (r == 0 && fn != NULL) \
			*fn = instead(*fn, symbol, version, (flags & PER_THREAD) != 0); \
		return r; \
	}
#define PROC_V1(name) \
	static int my_##name(const char *symbol, void **fn, int version, uint64_t flags) { \
		int r = REAL(name, const char *, void **, int, uint64_t)(symbol, fn, version, flags); \
		if (r == 0 && fn != NULL) \
			*fn = instead(*fn, symbol, version, (flags & PER_THREAD) != 0); \
		return r; \
	}
PROC_V2(cuGetProcAddress_v2)
PROC_V2(cuGetProcAddress_v2_ptsz)
PROC_V1(cuGetProcAddress)
PROC_V1(cuGetProcAddress_ptsz)

#define ENTRY(name) {#name, (void *)my_##name, NULL},
HIDDEN struct entry entries[] = {ENTRIES(ENTRY)};
HIDDEN const int entry_count = ENTRY_COUNT;

// names reports whether entry is name, or a version of it; one of the default stream of each thread where that is asked for
// and there is one, else not.
static int names(const char *entry, const char *name, int per_thread) {
	while (*name != 0 && *name == *entry)
		name++, entry++;
	if (*name != 0)
		return 0;
	if (per_thread)
		return entry[0] == '_' && entry[1] == 'p';
	return entry[0] == 0 || (entry[0] == '_' && entry[1] == 'v');
}

// versioned reports whether an entry has a version: what came before it has the name without.
static int versioned(const char *entry) {
	while (*entry != 0 && *entry != '_')
		entry++;
	return entry[0] == '_' && entry[1] == 'v';
}

static int is_way(int i) { return i >= AT_cuGetProcAddress_v2; }

static void *instead(void *found, const char *name, int version, int per_thread) {
	if (found == NULL || name == NULL)
		return found;
	for (int i = 0; i < entry_count; i++) {
		if (entries[i].real == found)
			return entries[i].wrapper;
		if (entries[i].wrapper == found)
			return found;
	}
	for (int pass = per_thread ? 1 : 0; pass >= 0; pass--) {
		for (int i = 0; i < entry_count; i++) {
			if (!names(entries[i].name, name, pass))
				continue;
			if (i == (version >= NODES_WITH_EDGES ? AT_cuGraphAddNode : AT_cuGraphAddNode_v2)) // which take other arguments
				continue;
			if (is_way(i) || version > LAST_VERSION || (version < FIRST_VERSION && versioned(entries[i].name))) {
				say(RECORD_UNKNOWN, name);
				return found;
			}
			__atomic_store_n(&entries[i].real, found, __ATOMIC_RELAXED);
			return entries[i].wrapper;
		}
	}
	return found;
}

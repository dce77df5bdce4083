// The part of the stand-in that nothing of Cistern's calls, but programs that are traced do: further kinds of
// allocation, and the driver's own way to its functions.

#include "standin.h"

struct pool;

CUresult cuCtxGetDevice(int *device) {
	if (!initialised)
		return NOT_INITIALIZED;
	if (current() == NULL)
		return INVALID_CONTEXT;
	*device = current()->device;
	return SUCCESS;
}

CUresult cuMemAlloc_v2(uint64_t *p, size_t size);
CUresult cuMemFree_v2(uint64_t p);
CUresult cuMemHostAlloc(void **p, size_t size, unsigned flags);
CUresult cuMemAllocFromPoolAsync(uint64_t *p, size_t size, struct pool *pool, struct stream *s);
CUresult cuMemFreeAsync(uint64_t p, struct stream *s);
CUresult cuDeviceGetDefaultMemPool(struct pool **pool, int device);

CUresult cuMemAllocPitch_v2(uint64_t *p, size_t *pitch, size_t width, size_t height, unsigned element) {
	(void)element;
	*pitch = (width + 511) / 512 * 512;
	return cuMemAlloc_v2(p, *pitch * height);
}

CUresult cuMemAllocHost_v2(void **p, size_t size) { return cuMemHostAlloc(p, size, 0); }

CUresult cuDeviceGetMemPool(struct pool **pool, int device) { return cuDeviceGetDefaultMemPool(pool, device); }

CUresult cuMemAllocAsync(uint64_t *p, size_t size, struct stream *s) {
	struct pool *pool = NULL;
	int device = 0;
	if ((uintptr_t)s > 2 && s->capture != 0) { // a node of the graph
		s->allocated += size;
		*p = graph_address(size);
		return SUCCESS;
	}
	CUresult r = cuCtxGetDevice(&device);
	if (r == SUCCESS)
		r = cuDeviceGetDefaultMemPool(&pool, device);
	return r == SUCCESS ? cuMemAllocFromPoolAsync(p, size, pool, s) : r;
}

CUresult cuMemAllocAsync_ptsz(uint64_t *p, size_t size, struct stream *s) { return cuMemAllocAsync(p, size, s); }
CUresult cuStreamIsCapturing(struct stream *s, int *status) {
	if (!initialised)
		return NOT_INITIALIZED;
	*status = (uintptr_t)s > 2 && s->capture != 0; // 2 is the default stream of the thread
	return SUCCESS;
}

CUresult cuMemFreeAsync_ptsz(uint64_t p, struct stream *s) { return cuMemFreeAsync(p, s); }

// Arrays are rows of bytes here.
struct array_format { size_t width, height; int format; unsigned channels; };

CUresult cuArrayCreate_v2(uint64_t *array, const struct array_format *f) {
	size_t bytes = f->width * (f->height == 0 ? 1 : f->height) * f->channels * 4;
	return cuMemAlloc_v2(array, bytes);
}

CUresult cuArrayDestroy(uint64_t array) { return cuMemFree_v2(array); }

// The functions that are asked for by name. Their addresses are the library's own, as it is linked with -Bsymbolic.
CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(struct context **context, int device);
CUresult cuCtxPushCurrent_v2(struct context *context);
CUresult cuMemCreate(uint64_t *handle, size_t size, const struct prop *prop, unsigned long long flags);
CUresult cuMemRelease(uint64_t handle);
struct alloc_node;
struct any_node;
struct array_map;
CUresult cuGraphAddMemAllocNode(void **node, struct graph *graph, void *const *after, size_t n, struct alloc_node *a);
CUresult cuGraphAddNode_v2(void **node, struct graph *graph, void *const *after, const void *edges, size_t n, struct any_node *a);
CUresult cuGraphUpload(struct graph *exec, struct stream *s);
CUresult cuGraphLaunch(struct graph *exec, struct stream *s);
CUresult cuDeviceGraphMemTrim(int device);
CUresult cuMemMapArrayAsync(struct array_map *list, unsigned n, struct stream *s);
CUresult cuGetProcAddress_v2(const char *name, void **fn, int version, uint64_t flags, int *status);
CUresult cuGetProcAddress(const char *name, void **fn, int version, uint64_t flags);

// With STANDIN_INNER=1 it gives out functions that no symbol names.
static CUresult inner_alloc(uint64_t *p, size_t size) { return cuMemAlloc_v2(p, size); }
static CUresult inner_free(uint64_t p) { return cuMemFree_v2(p); }
static CUresult inner_alloc_async(uint64_t *p, size_t size, struct stream *s) { return cuMemAllocAsync(p, size, s); }
static CUresult inner_free_async(uint64_t p, struct stream *s) { return cuMemFreeAsync(p, s); }

static CUresult inner_add_node(void **node, struct graph *graph, void *const *after, const void *edges, size_t n, struct any_node *a) {
	return cuGraphAddNode_v2(node, graph, after, edges, n, a);
}
static CUresult inner_launch(struct graph *exec, struct stream *s) { return cuGraphLaunch(exec, s); }

CUresult cuGetProcAddress_v2(const char *name, void **fn, int version, uint64_t flags, int *status) {
	static const struct { const char *name; void *fn; } inner[] = {{"cuMemAlloc", (void *)inner_alloc}, {"cuMemFree", (void *)inner_free},
		{"cuMemAllocAsync", (void *)inner_alloc_async}, {"cuMemFreeAsync", (void *)inner_free_async},
		{"cuGraphAddNode", (void *)inner_add_node}, {"cuGraphLaunch", (void *)inner_launch}};
	static const struct { const char *name; int since; void *plain, *per_thread; } table[] = {
		{"cuInit", 2000, (void *)cuInit, (void *)cuInit},
		{"cuDevicePrimaryCtxRetain", 7000, (void *)cuDevicePrimaryCtxRetain, (void *)cuDevicePrimaryCtxRetain},
		{"cuCtxPushCurrent", 4000, (void *)cuCtxPushCurrent_v2, (void *)cuCtxPushCurrent_v2},
		{"cuMemAlloc", 3020, (void *)cuMemAlloc_v2, (void *)cuMemAlloc_v2},
		{"cuMemFree", 3020, (void *)cuMemFree_v2, (void *)cuMemFree_v2},
		{"cuMemAllocAsync", 11020, (void *)cuMemAllocAsync, (void *)cuMemAllocAsync_ptsz},
		{"cuMemFreeAsync", 11020, (void *)cuMemFreeAsync, (void *)cuMemFreeAsync_ptsz},
		{"cuMemCreate", 10020, (void *)cuMemCreate, (void *)cuMemCreate},
		{"cuMemRelease", 10020, (void *)cuMemRelease, (void *)cuMemRelease},
		{"cuGraphAddMemAllocNode", 11040, (void *)cuGraphAddMemAllocNode, (void *)cuGraphAddMemAllocNode},
		{"cuGraphAddNode", 12030, (void *)cuGraphAddNode_v2, (void *)cuGraphAddNode_v2},
		{"cuGraphUpload", 11010, (void *)cuGraphUpload, (void *)cuGraphUpload},
		{"cuGraphLaunch", 10000, (void *)cuGraphLaunch, (void *)cuGraphLaunch},
		{"cuDeviceGraphMemTrim", 11040, (void *)cuDeviceGraphMemTrim, (void *)cuDeviceGraphMemTrim},
		{"cuMemMapArrayAsync", 11010, (void *)cuMemMapArrayAsync, (void *)cuMemMapArrayAsync},
		{"cuGetProcAddress", 12000, (void *)cuGetProcAddress_v2, (void *)cuGetProcAddress_v2},
		{"cuGetProcAddress", 11030, (void *)cuGetProcAddress, (void *)cuGetProcAddress},
	};
	*fn = NULL;
	if (status != NULL)
		*status = 1;
	for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
		if (strcmp(table[i].name, name) != 0 || version < table[i].since)
			continue;
		*fn = flags & 2 ? table[i].per_thread : table[i].plain;
		for (size_t k = 0; number("STANDIN_INNER", 0) && k < sizeof inner / sizeof *inner; k++)
			if (strcmp(inner[k].name, name) == 0)
				*fn = inner[k].fn;
		if (status != NULL)
			*status = 0;
		return SUCCESS;
	}
	return status != NULL ? SUCCESS : NOT_FOUND;
}

CUresult cuGetProcAddress(const char *name, void **fn, int version, uint64_t flags) {
	return cuGetProcAddress_v2(name, fn, version, flags, NULL);
}

// Memory that graphs allocate, sparse arrays, and contexts beside the primary ones: for programs that are traced.

#include "standin.h"

CUresult cuCtxPushCurrent_v2(struct context *context);
CUresult cuCtxPopCurrent_v2(struct context **context);
CUresult cuMemFree_v2(uint64_t p);

// What the graphs of a device have from it stays theirs when they are gone, until it is trimmed.
static struct { size_t held, idle; } memory[64];

uint64_t graph_address(size_t size) {
	static uint64_t next = (uint64_t)5 << 44;
	return __atomic_fetch_add(&next, (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY, __ATOMIC_RELAXED);
}

static size_t pages(const struct graph *g) { return (g->allocated + GRANULARITY - 1) / GRANULARITY * GRANULARITY; }

CUresult graph_launched(struct graph *exec) {
	size_t size = pages(exec);
	if (exec->launched || size == 0)
		return SUCCESS;
	size_t idle = memory[exec->device].idle < size ? memory[exec->device].idle : size;
	if (used + size - idle > CAPACITY)
		return OUT_OF_MEMORY;
	used += size - idle;
	memory[exec->device].held += size - idle;
	memory[exec->device].idle -= idle;
	exec->launched = 1;
	return SUCCESS;
}

void graph_destroyed(struct graph *exec) {
	if (exec->launched)
		memory[exec->device].idle += pages(exec);
}

CUresult cuGraphCreate(struct graph **graph, unsigned flags) {
	ENTER("cuGraphCreate")
	*graph = calloc(1, sizeof **graph);
	RETURN("flags %u", flags)
}

struct alloc_node { char pool[88]; const struct access *access; size_t accesses, size; uint64_t p; };

CUresult cuGraphAddMemAllocNode(void **node, struct graph *graph, void *const *after, size_t n, struct alloc_node *a) {
	ENTER("cuGraphAddMemAllocNode")
	(void)after, (void)n;
	graph->allocated += a->size;
	a->p = graph_address(a->size);
	*node = graph;
	RETURN("size %zu", a->size)
}

struct any_node { int type, reserved[3]; struct alloc_node alloc; };

CUresult cuGraphAddNode_v2(void **node, struct graph *graph, void *const *after, const void *edges, size_t n, struct any_node *a) {
	ENTER("cuGraphAddNode_v2")
	(void)after, (void)n, (void)edges;
	if (a->type != 10) {
		r = NOT_SUPPORTED;
	} else {
		graph->allocated += a->alloc.size;
		a->alloc.p = graph_address(a->alloc.size);
		*node = graph;
	}
	RETURN("type %d", a->type)
}

CUresult cuGraphUpload(struct graph *exec, struct stream *s) {
	ENTER("cuGraphUpload")
	(void)s;
	r = graph_launched(exec);
	RETURN("")
}

CUresult cuDeviceGetGraphMemAttribute(int device, int attribute, uint64_t *value) {
	BEGIN("cuDeviceGetGraphMemAttribute")
	if (attribute == 2)
		*value = memory[device].held;
	else
		r = INVALID_VALUE;
	RETURN("attribute %d", attribute)
}

CUresult cuDeviceGraphMemTrim(int device) {
	BEGIN("cuDeviceGraphMemTrim")
	memory[device].held -= memory[device].idle;
	used -= memory[device].idle;
	memory[device].idle = 0;
	RETURN("")
}

struct array_3d { size_t width, height, depth; int format; unsigned channels, flags; };

CUresult cuMemAlloc_v2(uint64_t *p, size_t size);

CUresult cuArray3DCreate_v2(uint64_t *array, const struct array_3d *a) {
	int sparse = (a->flags & 0xc0) != 0;
	return cuMemAlloc_v2(array, sparse ? 1 : a->width * (a->height == 0 ? 1 : a->height) * (a->depth == 0 ? 1 : a->depth) * a->channels * 4);
}

struct array_map { int resource; uint64_t array; int subresource; uint64_t where[4]; int operation, kind; uint64_t handle, offset; unsigned devices, flags, reserved[2]; };

CUresult cuMemMapArrayAsync(struct array_map *list, unsigned n, struct stream *s) {
	ENTER("cuMemMapArrayAsync")
	(void)s;
	for (unsigned i = 0; i < n; i++)
		if (list[i].operation == 1 && list[i].handle == 0)
			r = INVALID_VALUE;
	RETURN("count %u", n)
}

CUresult cuCtxCreate_v2(struct context **context, unsigned flags, int device) {
	static const char *const call = "cuCtxCreate";
	if (!initialised || device < 0 || device >= device_count())
		return report(call, initialised ? INVALID_DEVICE : NOT_INITIALIZED, "device %d", device);
	*context = calloc(1, sizeof **context);
	(*context)->device = device;
	(*context)->retained = 1;
	return report(call, cuCtxPushCurrent_v2(*context), "flags %u, device %d", flags, device);
}

CUresult cuCtxDestroy_v2(struct context *context) {
	static const char *const call = "cuCtxDestroy";
	struct context *popped;
	if (context == NULL)
		return report(call, INVALID_CONTEXT, "");
	if (current() == context)
		cuCtxPopCurrent_v2(&popped);
	free(context);
	return report(call, SUCCESS, "");
}

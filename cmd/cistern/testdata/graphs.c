// A program to be traced whose memory comes and goes by other ways than calls that allocate and free: with graphs, in
// sparse arrays, and with contexts. What is held after each step is said beside it.

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MiB = 1 << 20 };

struct alloc_node { int type, handles, location, id; char rest[72]; const void *access; size_t accesses, size; uint64_t p; };
struct any_node { int type, reserved[3]; struct alloc_node alloc; char more[160]; };
struct array_3d { size_t width, height, depth; int format; unsigned channels, flags; };
struct piece {
	int resource;
	uint64_t array;
	int subresource;
	union { struct { unsigned level, layer, x, y, z, width, height, depth; }; struct { unsigned layer_; unsigned long long offset_, size; }; };
	int operation, kind; uint64_t handle, offset; unsigned devices, flags, reserved[2];
};
_Static_assert(sizeof(struct piece) == 96, "CUarrayMapInfo");
struct prop { int type, handles, location, id; void *win32; unsigned char flags[8]; };

static void *lib;
static uint64_t flags; // for cuGetProcAddress; 1 where it is not used

// find looks up a function, as a runtime does where there is an argument: through cuGetProcAddress as far as that knows it.
static void *find(const char *name) {
	int (*get)(const char *, void **, int, uint64_t, int *) = (int (*)(const char *, void **, int, uint64_t, int *))dlsym(lib, "cuGetProcAddress_v2");
	char plain[64];
	void *f = NULL;
	int status = 1;
	snprintf(plain, sizeof plain, "%s", name);
	if (strlen(plain) > 3 && strncmp(plain + strlen(plain) - 3, "_v2", 3) == 0)
		plain[strlen(plain) - 3] = 0;
	if (flags != 1 && get(plain, &f, 13000, flags, &status) == 0 && status == 0)
		return f;
	return dlsym(lib, name);
}

#define CALL(name, types, ...) \
	do { \
		int (*f) types = (int (*) types)find(name); \
		int r = f == NULL ? -1 : f(__VA_ARGS__); \
		if (r != 0) { \
			fprintf(stderr, "%s: %d\n", name, r); \
			exit(1); \
		} \
	} while (0)

static void *instantiate(void *graph) {
	void *exec;
	CALL("cuGraphInstantiateWithFlags", (void **, void *, unsigned long long), &exec, graph, 0);
	return exec;
}

int main(int argc, char **argv) {
	flags = argc > 1 ? (uint64_t)atoi(argv[1]) : 1;
	void *context, *stream, *graph, *empty, *captured, *node, *exec, *second;
	uint64_t p;
	lib = dlopen(getenv("STANDIN"), RTLD_NOW);
	CALL("cuInit", (unsigned), 0);
	CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
	CALL("cuCtxPushCurrent_v2", (void *), context);
	CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
	CALL("cuMemAlloc_v2", (uint64_t *, size_t), &p, MiB); // 1 MiB, kept

	// Graphs: nothing is held before the first launch, and trimming ends it, not destroying.
	CALL("cuGraphCreate", (void **, unsigned), &empty, 0);
	exec = instantiate(empty);
	CALL("cuGraphLaunch", (void *, void *), exec, stream);
	CALL("cuGraphExecDestroy", (void *), exec);
	CALL("cuGraphCreate", (void **, unsigned), &graph, 0);
	struct alloc_node a = {1, 0, 1, 0, {0}, NULL, 0, 3 * MiB, 0};
	CALL("cuGraphAddMemAllocNode", (void **, void *, void *, size_t, struct alloc_node *), &node, graph, NULL, 0, &a);
	struct any_node any = {.type = 10, .alloc = {1, 0, 1, 0, {0}, NULL, 0, 5 * MiB, 0}};
	CALL("cuGraphAddNode_v2", (void **, void *, void *, void *, size_t, struct any_node *), &node, graph, NULL, NULL, 0, &any);
	exec = instantiate(graph);
	CALL("cuGraphUpload", (void *, void *), exec, stream); // 9 MiB
	for (int i = 0; i < 5; i++)
		CALL("cuGraphLaunch", (void *, void *), exec, stream); // the same
	CALL("cuStreamBeginCapture_v2", (void *, int), stream, 0);
	CALL("cuMemAllocAsync", (uint64_t *, size_t, void *), &p, 4 * MiB, stream);
	CALL("cuStreamEndCapture", (void *, void **), stream, &captured);
	second = instantiate(captured);
	CALL("cuGraphLaunch", (void *, void *), second, stream); // 13 MiB
	CALL("cuGraphExecDestroy", (void *), exec);
	CALL("cuDeviceGraphMemTrim", (int), 0); // 5 MiB
	CALL("cuGraphExecDestroy", (void *), second);
	CALL("cuDeviceGraphMemTrim", (int), 0); // 1 MiB

	// Sparse arrays have what is mapped into them.
	struct array_3d format = {1024, 1024, 0, 0x20, 4, 0x40};
	struct prop prop = {.type = 1, .location = 1};
	uint64_t array, first, other;
	CALL("cuArray3DCreate_v2", (uint64_t *, const struct array_3d *), &array, &format); // nothing
	CALL("cuMemCreate", (uint64_t *, size_t, const struct prop *, unsigned long long), &first, 2 * MiB, &prop, 0);
	CALL("cuMemCreate", (uint64_t *, size_t, const struct prop *, unsigned long long), &other, 4 * MiB, &prop, 0); // 7 MiB
	struct piece list[2] = {{.array = array, .width = 64, .operation = 1, .handle = first}, {.array = array, .x = 64, .width = 64, .operation = 1, .handle = other}};
	CALL("cuMemMapArrayAsync", (struct piece *, unsigned, void *), list, 2, stream);
	CALL("cuMemRelease", (uint64_t), first);
	CALL("cuMemRelease", (uint64_t), other); // still 7 MiB
	list[0].operation = 2;
	CALL("cuMemMapArrayAsync", (struct piece *, unsigned, void *), list, 1, stream); // 5 MiB
	CALL("cuArrayDestroy", (uint64_t), array); // 1 MiB

	// Contexts take with them what they got, and nothing of another's.
	void *own, *locked;
	CALL("cuCtxCreate_v2", (void **, unsigned, int), &own, 0, 0);
	CALL("cuMemAlloc_v2", (uint64_t *, size_t), &p, 20 * MiB); // 21 MiB
	CALL("cuMemHostAlloc", (void **, size_t, unsigned), &locked, 8192, 0);
	CALL("cuMemAllocManaged", (uint64_t *, size_t, unsigned), &p, MiB, 1);
	CALL("cuCtxDestroy_v2", (void *), own); // 1 MiB
	return 0;
}

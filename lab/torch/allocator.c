// A user's allocator, with the signatures of PyTorch's CUDAPluggableAllocator. Its memory is cuMemAlloc's of the library that
// ALLOCATOR_CUDA names; without one it is addresses that nothing lies at, for the simulated device.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/types.h>

// What the program reads and sets.
struct allocator {
	uint64_t allocs, frees; // calls, those that return NULL among them
	uint64_t out;           // bytes
	uint64_t wrong;         // frees of what is not out, with another size, device or stream
	uint64_t capacity;      // bytes that may be out; 0: no limit
	uint64_t fail_after;    // calls until one returns NULL, 0: none
	int device;             // of the last call
	void *stream;
} allocator_state;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

enum { MANY = 1 << 16 };
static struct {
	char *p;
	ssize_t size;
	int device;
	void *stream;
} out[MANY];

static void *driver_alloc(size_t size) {
	const char *path = getenv("ALLOCATOR_CUDA");
	if (path == NULL) { // aligned as cuMemAlloc's is: to 2 MiB
		char *p = mmap(NULL, size + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (p == MAP_FAILED)
			return NULL;
		return (void *)(((uintptr_t)p + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1)); // never unmapped: no address comes twice
	}
	uint64_t p = 0;
	int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(dlopen(path, RTLD_NOW), "cuMemAlloc_v2");
	return alloc(&p, size) == 0 ? (void *)(uintptr_t)p : NULL;
}

static void driver_free(void *p) {
	const char *path = getenv("ALLOCATOR_CUDA");
	if (path == NULL)
		return;
	int (*release)(uint64_t) = (int (*)(uint64_t))dlsym(dlopen(path, RTLD_NOW), "cuMemFree_v2");
	if (release((uintptr_t)p) != 0)
		allocator_state.wrong++;
}

void *my_alloc(ssize_t size, int device, void *stream) {
	pthread_mutex_lock(&mu);
	struct allocator *a = &allocator_state;
	a->allocs++;
	a->device = device;
	a->stream = stream;
	void *p = NULL;
	int fails = a->fail_after > 0 && --a->fail_after == 0;
	if (!fails && (a->capacity == 0 || a->out + (uint64_t)size <= a->capacity) && (p = driver_alloc((size_t)size)) != NULL) {
		for (int i = 0; i < MANY; i++)
			if (out[i].p == NULL) {
				out[i].p = p;
				out[i].size = size;
				out[i].device = device;
				out[i].stream = stream;
				break;
			}
		a->out += (uint64_t)size;
	}
	pthread_mutex_unlock(&mu);
	return p;
}

void my_free(void *p, ssize_t size, int device, void *stream) {
	pthread_mutex_lock(&mu);
	struct allocator *a = &allocator_state;
	a->frees++;
	int i = 0;
	while (i < MANY && out[i].p != p)
		i++;
	if (p == NULL || i == MANY || out[i].size != size || out[i].device != device || out[i].stream != stream)
		a->wrong++;
	else {
		out[i].p = NULL;
		a->out -= (uint64_t)size;
		driver_free(p);
	}
	pthread_mutex_unlock(&mu);
}

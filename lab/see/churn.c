// A program to be traced and killed: it allocates and frees through the CUDA driver for as long as it lives, and writes
// each call down, once it has returned, in a file that is mapped into memory, where it stays when the program is killed.
//
//     churn LOG [DEVICE]
//
// It is linked with nothing but the C library; the driver is libcuda.so.1, or what STANDIN names.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t dptr;
struct prop { int type, handles, location, id; void *win32; unsigned char flags[8]; };
struct access { int location, id, flags; };

// The file: THREADS of these, as kill.py reads them.
enum { THREADS = 2, ENTRIES = 1 << 15 };
enum op { OP_ALLOC = 1, OP_FREE, OP_CREATE, OP_MAP, OP_UNMAP, OP_RELEASE };
struct entry {
	uint32_t op;
	int32_t result;
	uint64_t addr, size, ns; // ns since 1970, when the call had returned
};
struct log {
	uint32_t pid, tid;
	_Atomic uint64_t count;
	uint64_t pad[6];
	struct entry entry[ENTRIES];
};
static struct log *logs;
static int device;

#define FUNCTIONS(X) \
	X(cuInit, "cuInit", unsigned) X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", void **, int) X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", void *) \
	X(cuMemAlloc, "cuMemAlloc_v2", dptr *, size_t) X(cuMemFree, "cuMemFree_v2", dptr) \
	X(cuMemAddressReserve, "cuMemAddressReserve", dptr *, size_t, size_t, dptr, unsigned long long) \
	X(cuMemCreate, "cuMemCreate", uint64_t *, size_t, const struct prop *, unsigned long long) \
	X(cuMemMap, "cuMemMap", dptr, size_t, size_t, uint64_t, unsigned long long) X(cuMemSetAccess, "cuMemSetAccess", dptr, size_t, const struct access *, size_t) \
	X(cuMemUnmap, "cuMemUnmap", dptr, size_t) X(cuMemRelease, "cuMemRelease", uint64_t)
#define DECLARE(name, symbol, ...) static int (*name)(__VA_ARGS__);
FUNCTIONS(DECLARE)

static void fail(const char *what, int code) {
	fprintf(stderr, "churn: %s: %d\n", what, code);
	_exit(9);
}

static void reach(void) {
	const char *named = getenv("STANDIN");
	void *lib = dlopen(named ? named : "libcuda.so.1", RTLD_NOW);
	if (lib == NULL) {
		fprintf(stderr, "churn: %s\n", dlerror());
		_exit(9);
	}
#define LOOK(name, symbol, ...) \
	if ((name = (int (*)(__VA_ARGS__))dlsym(lib, symbol)) == NULL) \
		fail("there is no " symbol, 0);
	FUNCTIONS(LOOK)
}

// Writes one call down; counts it only when it stands there.
static void note(struct log *l, enum op op, int result, uint64_t addr, uint64_t size) {
	uint64_t n = atomic_load_explicit(&l->count, memory_order_relaxed);
	while (n == ENTRIES)
		pause();
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	l->entry[n] = (struct entry){op, result, addr, size, (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec};
	atomic_store_explicit(&l->count, n + 1, memory_order_release);
}

static uint64_t next(uint64_t *state) { // xorshift
	*state ^= *state << 13;
	*state ^= *state >> 7;
	return *state ^= *state << 17;
}

static void *work(void *mine) {
	enum { LIVE = 16, PAGE = 2 << 20 };
	struct log *l = mine;
	void *context;
	int r = cuDevicePrimaryCtxRetain(&context, device);
	if (r != 0 || (r = cuCtxPushCurrent(context)) != 0)
		fail("the device's context", r);
	dptr live[LIVE] = {0}, range;
	if ((r = cuMemAddressReserve(&range, (size_t)LIVE * PAGE, 0, 0, 0)) != 0)
		fail("cuMemAddressReserve", r);
	l->tid = (uint32_t)syscall(SYS_gettid);
	uint64_t random = 88172645463325252u + (uint64_t)(l - logs);
	for (;;) { // until it is killed
		uint64_t x = next(&random);
		dptr *slot = &live[x % LIVE];
		if (x >> 60 == 0) { // now and then a handle from its making to its end
			struct prop prop = {.type = 1, .location = 1, .id = device};
			struct access access = {1, device, 3};
			uint64_t handle = 0;
			note(l, OP_CREATE, r = cuMemCreate(&handle, PAGE, &prop, 0), 0, PAGE);
			if (r != 0)
				continue;
			dptr at = range + x % LIVE * PAGE;
			note(l, OP_MAP, r = cuMemMap(at, PAGE, 0, handle, 0), at, PAGE);
			int mapped = r == 0;
			if (mapped)
				cuMemSetAccess(at, PAGE, &access, 1);
			if (mapped)
				note(l, OP_UNMAP, cuMemUnmap(at, PAGE), at, PAGE);
			note(l, OP_RELEASE, cuMemRelease(handle), 0, 0);
		} else if (*slot != 0) {
			dptr p = *slot;
			*slot = 0;
			note(l, OP_FREE, cuMemFree(p), p, 0);
		} else {
			size_t size = (size_t)512 << (x >> 32) % 16;
			dptr p = 0;
			r = cuMemAlloc(&p, size);
			note(l, OP_ALLOC, r, r == 0 ? p : 0, size);
			if (r == 0)
				*slot = p;
		}
		usleep(20);
	}
	return NULL;
}

int main(int argc, char **argv) {
	if (argc < 2) {
		fprintf(stderr, "usage: churn LOG [DEVICE]\n");
		return 2;
	}
	device = argc > 2 ? atoi(argv[2]) : 0;
	int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
	if (fd < 0 || ftruncate(fd, THREADS * (off_t)sizeof *logs) != 0 ||
	    (logs = mmap(NULL, THREADS * sizeof *logs, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED) {
		perror(argv[1]);
		return 9;
	}
	for (int i = 0; i < THREADS; i++)
		logs[i].pid = (uint32_t)getpid();
	reach();
	int r = cuInit(0);
	if (r != 0)
		fail("cuInit", r);
	pthread_t thread;
	if (pthread_create(&thread, NULL, work, &logs[1]) != 0)
		fail("pthread_create", 0);
	work(&logs[0]);
}

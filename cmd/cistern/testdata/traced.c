// A program to be traced: what it asks of the driver is known, and the stand-in driver logs it. The first argument says
// how it reaches the driver's functions, the second what it does with them.
//
//	linked    the functions are linked (compiled with -DLINKED, against the stand-in)
//	dlsym     looked up in libcuda.so.1, which STANDIN names
//	proc      through cuGetProcAddress_v2, looked up alike, as a static CUDA runtime does
//	proc1     through the first version of cuGetProcAddress, reached through itself
//	ptsz      like proc, with a default stream for each thread

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t dptr;
struct prop { int type, handles, location, id; void *win32; unsigned char flags[8]; };
struct access { int location, id, flags; };
typedef struct { char bytes[64]; } ipc;

#define FUNCTIONS(X) \
	X(cuInit, "cuInit", unsigned) X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", void **, int) \
	X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", void *) X(cuMemAlloc, "cuMemAlloc_v2", dptr *, size_t) X(cuMemFree, "cuMemFree_v2", dptr) \
	X(cuMemAllocAsync, "cuMemAllocAsync", dptr *, size_t, void *) X(cuMemFreeAsync, "cuMemFreeAsync", dptr, void *) \
	X(cuMemCreate, "cuMemCreate", uint64_t *, size_t, const struct prop *, unsigned long long) X(cuMemRelease, "cuMemRelease", uint64_t)
// These the stand-in's cuGetProcAddress does not know.
#define MORE(X) \
	X(cuMemAllocPitch, "cuMemAllocPitch_v2", dptr *, size_t *, size_t, size_t, unsigned) X(cuMemAllocManaged, "cuMemAllocManaged", dptr *, size_t, unsigned) \
	X(cuMemAllocHost, "cuMemAllocHost_v2", void **, size_t) X(cuMemHostAlloc, "cuMemHostAlloc", void **, size_t, unsigned) X(cuMemFreeHost, "cuMemFreeHost", void *) \
	X(cuMemHostRegister, "cuMemHostRegister_v2", void *, size_t, unsigned) X(cuMemHostUnregister, "cuMemHostUnregister", void *) \
	X(cuMemPoolCreate, "cuMemPoolCreate", void **, const void *) X(cuMemPoolDestroy, "cuMemPoolDestroy", void *) X(cuMemPoolTrimTo, "cuMemPoolTrimTo", void *, size_t) \
	X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", dptr *, size_t, void *, void *) \
	X(cuMemAddressReserve, "cuMemAddressReserve", dptr *, size_t, size_t, dptr, unsigned long long) X(cuMemAddressFree, "cuMemAddressFree", dptr, size_t) \
	X(cuMemMap, "cuMemMap", dptr, size_t, size_t, uint64_t, unsigned long long) X(cuMemUnmap, "cuMemUnmap", dptr, size_t) \
	X(cuMemSetAccess, "cuMemSetAccess", dptr, size_t, const struct access *, size_t) \
	X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", void *, uint64_t, int, unsigned long long) \
	X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", uint64_t *, void *, int) X(cuIpcGetMemHandle, "cuIpcGetMemHandle", ipc *, dptr) \
	X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", dptr *, ipc, unsigned) X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", dptr) \
	X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", int)

#ifdef LINKED
#define DECLARE(name, symbol, ...) int real_##name(__VA_ARGS__) __asm__(symbol);
FUNCTIONS(DECLARE) MORE(DECLARE)
#define CALLS(name, symbol, ...) static int (*const name)(__VA_ARGS__) = real_##name;
// Called directly, through the PLT or with -fno-plt the GOT.
#define cuMemAlloc real_cuMemAlloc
#define cuMemFree real_cuMemFree
#define cuInit real_cuInit
#define cuDevicePrimaryCtxRetain real_cuDevicePrimaryCtxRetain
#define cuCtxPushCurrent real_cuCtxPushCurrent
#define cuMemAllocAsync real_cuMemAllocAsync
#define cuMemFreeAsync real_cuMemFreeAsync
#define cuMemCreate real_cuMemCreate
#define cuMemRelease real_cuMemRelease
MORE(CALLS)
static void reach(const char *how) { (void)how; }
#else
#define DECLARE(name, symbol, ...) static int (*name)(__VA_ARGS__);
FUNCTIONS(DECLARE) MORE(DECLARE)
static void reach(const char *how) {
	void *lib = dlopen(getenv("STANDIN"), RTLD_NOW);
	if (lib == NULL) {
		fprintf(stderr, "%s\n", dlerror());
		exit(9);
	}
#define LOOK(name, symbol, ...) name = (int (*)(__VA_ARGS__))dlsym(lib, symbol);
	FUNCTIONS(LOOK) MORE(LOOK)
	if (strcmp(how, "dlsym") == 0)
		return;
	int (*get2)(const char *, void **, int, uint64_t, int *) = (int (*)(const char *, void **, int, uint64_t, int *))dlsym(lib, "cuGetProcAddress_v2");
	int (*get1)(const char *, void **, int, uint64_t) = NULL, status;
	get2("cuGetProcAddress", (void **)&get1, 11030, 0, &status);
	uint64_t flags = strcmp(how, "ptsz") == 0 ? 2 : 0;
#define ASK(name, symbol, ...) \
	if (strcmp(how, "proc1") == 0) \
		get1(#name, (void **)&name, 13000, flags); \
	else \
		get2(#name, (void **)&name, 13000, flags, &status);
	FUNCTIONS(ASK)
}
#endif

static void current(void) {
	void *context;
	if (cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0 || cuCtxPushCurrent(context) != 0)
		exit(8);
}

enum { MiB = 1 << 20 };

// Some of everything; 13 MiB of plain memory, 4 of pools' and 2 of virtual memory at the peak; 4 + 1 MiB are kept.
static __attribute__((noinline)) void everything(void) {
	dptr a, b, c, pitched, managed, range, kept;
	size_t pitch;
	cuMemAlloc(&a, 3 * MiB);
	cuMemAlloc(&b, 60 << 10);
	cuMemAllocPitch(&pitched, &pitch, 1000, 2048, 4);
	cuMemAlloc(&c, (size_t)1 << 45); // too much
	cuMemFree(b);
	cuMemAllocManaged(&managed, MiB, 1);
	cuMemFree(managed);
	void *host, *locked;
	cuMemAllocHost(&host, 4096);
	cuMemHostAlloc(&locked, 8192, 0);
	cuMemFreeHost(host);
	cuMemFreeHost(locked);
	static char buffer[8192] __attribute__((aligned(4096)));
	cuMemHostRegister(buffer, sizeof buffer, 0);
	cuMemHostUnregister(buffer);
	cuMemAllocAsync(&c, 4 * MiB, NULL);
	cuMemFreeAsync(c, NULL);
	struct { int type, handles, location, id; void *security; size_t max; char rest[56]; } props = {1, 0, 1, 0, NULL, 0, {0}};
	void *pool;
	if (cuMemPoolCreate(&pool, &props) == 0) {
		cuMemAllocFromPoolAsync(&c, MiB, pool, NULL);
		cuMemFreeAsync(c, NULL);
		cuMemPoolTrimTo(pool, 0);
		cuMemPoolDestroy(pool);
	}
	uint64_t handle, other;
	struct prop prop = {.type = 1, .handles = 1, .location = 1};
	struct access access = {1, 0, 3};
	cuMemAddressReserve(&range, 64 * MiB, 0, 0, 0);
	cuMemCreate(&handle, 2 * MiB, &prop, 0);
	cuMemMap(range, 2 * MiB, 0, handle, 0);
	cuMemSetAccess(range, 2 * MiB, &access, 1);
	int fd = -1;
	if (cuMemExportToShareableHandle(&fd, handle, 1, 0) == 0 && cuMemImportFromShareableHandle(&other, (void *)(intptr_t)fd, 1) == 0)
		cuMemRelease(other);
	cuMemRelease(handle); // its mapping keeps it
	cuMemUnmap(range, 2 * MiB);
	cuMemAddressFree(range, 64 * MiB);
	cuMemFree(a);
	cuMemFree(pitched);
	cuMemAlloc(&kept, 4 * MiB);
	cuMemAlloc(&kept, 1 * MiB);
	ipc name;
	cuIpcGetMemHandle(&name, kept);
}

static void churn(long n) {
	for (long i = 0; i < n; i++) {
		dptr p = 0;
		if (cuMemAlloc(&p, (size_t)(1 + i % 7) << 12) != 0 || cuMemFree(p) != 0)
			_exit(7);
	}
}

static void *many(void *count) {
	current();
	churn((long)(intptr_t)count);
	return NULL;
}

static void *later(void *ms) {
	dptr p;
	current();
	usleep((useconds_t)(intptr_t)ms * 1000);
	cuMemAlloc(&p, 2 * MiB);
	cuMemFree(p);
	return NULL;
}

// seconds of the processor's time that this thread has had: a busy machine stops it for longer than anything here takes.
static double seconds(void) {
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// hold returns when a file is gone, or after ten minutes, where no process is left to remove it.
static void hold(const char *file) {
	for (int i = 0; i < 60000 && access(file, F_OK) == 0; i++)
		usleep(10000);
}

// turns starts n processes, each with 1 GiB: one after the other, waited for, or left as zombies; or each after the one before has
// its memory and until the one after has.
static void turns(const char *what, long n) {
	pid_t last = 0;
	int over = -1;
	for (long i = 0; i < n; i++) {
		int ready[2], go[2];
		char c;
		if (pipe(ready) != 0 || pipe(go) != 0)
			exit(7);
		pid_t child = fork();
		if (child < 0)
			exit(8);
		if (child == 0) {
			dptr p;
			current();
			close(go[1]);
			if (over >= 0)
				close(over);
			if (cuMemAlloc(&p, 1024 * MiB) != 0)
				_exit(1);
			close(ready[1]);
			if (strcmp(what, "overlap") == 0 && read(go[0], &c, 1) != 0)
				_exit(1);
			_exit(0);
		}
		close(ready[1]);
		close(go[0]);
		if (read(ready[0], &c, 1) != 0)
			exit(9);
		close(ready[0]);
		if (over >= 0)
			close(over); // the one before may end
		over = go[1];
		siginfo_t info;
		pid_t of = strcmp(what, "overlap") == 0 ? last : child;
		if (of != 0 && waitid(P_PID, of, &info, WEXITED | (strcmp(what, "zombies") == 0 ? WNOWAIT : 0)) != 0)
			exit(10);
		last = child;
	}
}

int main(int argc, char **argv) {
	const char *how = argc > 1 ? argv[1] : "", *what = argc > 2 ? argv[2] : "";
	long n = argc > 3 ? atol(argv[3]) : 1000;
	if (strcmp(what, "nothing") == 0)
		return 0;
	if (strcmp(what, "look") == 0) { // at the library, as long as there is a file
		int fd = open(getenv("STANDIN"), O_RDONLY);
		if (fd < 0 || mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED)
			return 4;
		hold(argv[3]);
		return 0;
	}
	reach(how);
	if (strcmp(what, "load") == 0)
		return 0;
	if (strcmp(what, "time") == 0) { // of a call that the stand-in refuses at once, as nothing has called cuInit
		double t = seconds();
		for (long i = 0; i < n; i++)
			cuMemFree(0);
		printf("%.0f\n", (seconds() - t) / (double)n * 1e9);
		return 0;
	}
	if (strcmp(what, "turns") == 0 || strcmp(what, "zombies") == 0 || strcmp(what, "overlap") == 0) {
		turns(what, n);
		return 0;
	}
	current();
	if (strcmp(what, "everything") == 0) {
		everything();
	} else if (strcmp(what, "many") == 0) {
		many((void *)(intptr_t)n);
	} else if (strcmp(what, "threads") == 0) {
		pthread_t t[8];
		for (int i = 0; i < 8; i++)
			pthread_create(&t[i], NULL, many, (void *)(intptr_t)n);
		for (int i = 0; i < 8; i++)
			pthread_join(t[i], NULL);
	} else if (strcmp(what, "fork") == 0) {
		dptr p;
		cuMemAlloc(&p, 4 * MiB);
		for (int i = 0; i < 3; i++)
			if (fork() == 0) {
				many((void *)(intptr_t)n);
				_exit(0);
			}
		while (wait(NULL) > 0) {
		}
	} else if (strcmp(what, "exec") == 0) {
		dptr p;
		cuMemAlloc(&p, 4 * MiB);
		for (int fd = 3; fd < 256; fd++)
			close(fd); // as Python's subprocess does
		execl(argv[0], argv[0], how, "everything", (char *)NULL);
		return 6;
	} else if (strcmp(what, "forever") == 0) {
		churn(1);
		printf("ready\n");
		fflush(stdout);
		alarm(600); // where no process is left to end it
		for (;;)
			churn(1000);
	} else if (strcmp(what, "leave") == 0) { // a process that goes on, with n pairs of calls or for ever
		int ready[2];
		char c;
		if (pipe(ready) != 0)
			return 5;
		pid_t child = fork();
		if (child == 0) {
			churn(1);
			close(1);
			close(2);
			if (write(ready[1], "x", 1) != 1)
				_exit(5);
			usleep(200000);
			alarm(600);
			if (n == 0)
				for (;;)
					churn(1000);
			churn(n);
			_exit(0);
		}
		printf("%d\n", (int)child);
		fflush(stdout);
		return read(ready[0], &c, 1) == 1 ? 3 : 5;
	} else if (strcmp(what, "exit") == 0) {
		dptr p;
		cuMemAlloc(&p, 2 * MiB);
		return (int)n;
	} else if (strcmp(what, "stay") == 0) { // for n ms, with memory
		dptr p;
		cuMemAlloc(&p, 2 * MiB);
		usleep((useconds_t)n * 1000);
	} else if (strcmp(what, "hold") == 0) { // as long as there is a file, with memory, and with so many children
		dptr p;
		cuMemAlloc(&p, 2 * MiB);
		for (int i = argc > 4 ? atoi(argv[4]) : 0; i > 0; i--)
			if (fork() == 0) {
				hold(argv[3]);
				_exit(0);
			}
		hold(argv[3]);
		while (wait(NULL) > 0) {
		}
	} else if (strcmp(what, "become") == 0) { // the same, and then another program that does it
		dptr p;
		cuMemAlloc(&p, 2 * MiB);
		usleep((useconds_t)n * 1000);
		execl(argv[0], argv[0], how, "stay", argv[3], (char *)NULL);
		return 6;
	} else if (strcmp(what, "outlive") == 0) { // another thread goes on after the first one has ended
		dptr p;
		pthread_t t;
		cuMemAlloc(&p, 2 * MiB);
		pthread_create(&t, NULL, later, (void *)(intptr_t)n);
		pthread_exit(NULL);
	} else if (strcmp(what, "signal") == 0) {
		dptr p;
		cuMemAlloc(&p, 2 * MiB);
		kill(getpid(), (int)n);
	}
	return 0;
}

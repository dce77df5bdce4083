// A program that asks the driver for memory from stacks of every kind, and writes down what the C library says of each: a
// line of return addresses, the innermost first, behind the function that asked. Its arguments are libraries that it loads
// one after the other, asks from and unloads.

#define _GNU_SOURCE
#include <alloca.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

static int (*cuMemAlloc)(uint64_t *, size_t), (*push)(void *);
static void *context;
static const char *volatile kind; // by the compiler's knowledge raise calls nothing of this file

__attribute__((noinline)) void ask(void) {
	void *at[256];
	uint64_t p = 0;
	int n = backtrace(at, 256);
	if (cuMemAlloc(&p, 1 << 20) != 0)
		_Exit(3);
	printf("%s", kind);
	for (int i = 1; i < n; i++)
		printf(" %lx", (unsigned long)at[i]);
	printf("\n");
}

volatile int zero;
volatile char sink;

__attribute__((noinline)) int deep(int n) {
	volatile char local[24] = {(char)n};
	if (n == 0)
		ask();
	else
		sink = (char)deep(n - 1);
	return local[0] + zero;
}

// A frame whose size is known when it runs only.
__attribute__((noinline)) int variable(int n) {
	volatile char *local = alloca((size_t)n * 16 + 1);
	local[0] = 1;
	int r = deep(3);
	return r + local[0];
}

// Frames that are aligned more than the stack is, with and without a size of their own.
__attribute__((noinline)) int aligned(int n) {
	volatile char local[192] __attribute__((aligned(64)));
	local[(unsigned)n % 192] = 1;
	int r = variable(n);
	return r + local[0];
}

__attribute__((noinline)) int aligned_variable(int n) {
	volatile char local[96] __attribute__((aligned(32)));
	volatile char *more = alloca((size_t)n + 40);
	local[(unsigned)n % 96] = more[0] = 1;
	int r = aligned(n + 1);
	return r + local[0] + more[0];
}

// A function that saves its registers late, and one with many of them.
__attribute__((noinline)) int late(int n) {
	if (n < 0)
		return 0;
	int a = aligned_variable(n), b = deep(a & 1), c = deep(b & 3);
	return a + b * c;
}

__attribute__((noinline)) long many(long a, long b, long c, long d, long e, long f, long g, long h) {
	long i = late((int)a), j = deep(2), k = deep(1);
	return a * i + b * j + c * k + d + e * i + f * j + g * k + h;
}

static int compare(const void *a, const void *b) {
	static int once;
	if (once++ == 0)
		sink = (char)many(1, 2, 3, 4, 5, 6, 7, 8);
	return *(const int *)a - *(const int *)b;
}

static void *thread(void *arg) {
	if (push(context) != 0)
		_Exit(2);
	kind = "thread";
	sink = (char)many(4, 3, 2, 1, 0, 1, 2, 3);
	return arg;
}

static void handler(int sig) {
	(void)sig;
	sink = (char)deep(1);
}

static ucontext_t here, there;

static void coroutine(void) {
	kind = "coroutine";
	sink = (char)aligned_variable(3);
}

int main(int argc, char **argv) {
	void *driver = dlopen(getenv("STANDIN"), RTLD_NOW);
	if (driver == NULL)
		return 2;
	int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
	int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
	push = (int (*)(void *))dlsym(driver, "cuCtxPushCurrent_v2");
	cuMemAlloc = (int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2");
	if (init(0) != 0 || retain(&context, 0) != 0 || push(context) != 0)
		return 2;

	kind = "plain";
	sink = (char)many(1, 2, 3, 4, 5, 6, 7, 8);
	kind = "deep";
	sink = (char)deep(100);
	kind = "callback";
	int numbers[] = {3, 1, 2};
	qsort(numbers, 3, sizeof *numbers, compare);

	pthread_t t;
	if (pthread_create(&t, NULL, thread, NULL) != 0)
		return 2;
	pthread_join(t, NULL);

	static char stack[1 << 18];
	getcontext(&there);
	there.uc_stack.ss_sp = stack;
	there.uc_stack.ss_size = sizeof stack;
	there.uc_link = &here;
	makecontext(&there, coroutine, 0);
	swapcontext(&here, &there);

	kind = "library";
	for (int i = 1; i < argc; i++) {
		void *lib = dlopen(argv[i], RTLD_NOW);
		void (*call)(void (*)(void)) = lib == NULL ? NULL : (void (*)(void (*)(void)))dlsym(lib, "call");
		if (call == NULL)
			return 2;
		call(ask);
		call(ask);
		dlclose(lib);
	}

	// From here on nothing says how to go on: where a signal came in, and in code that was made at run time.
	kind = "signal";
	stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
	struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
	for (int i = 0; i < 2; i++) {
		if (i == 1)
			sigaltstack(&other, NULL);
		sigaction(SIGUSR1, &action, NULL);
		raise(SIGUSR1);
	}
	kind = "made";
#if defined(__x86_64__)
	unsigned char code[] = {0x48, 0x83, 0xec, 0x48, 0xff, 0xd7, 0x48, 0x83, 0xc4, 0x48, 0xc3}; // sub $72,%rsp; call *%rdi; add $72,%rsp; ret
	void *made = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (made == MAP_FAILED)
		return 2;
	memcpy(made, code, sizeof code);
	((void (*)(void (*)(void)))made)(ask);
#endif
	return 0;
}

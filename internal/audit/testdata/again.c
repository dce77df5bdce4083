// Walks stacks twice with unwind.c, which is compiled into this program: as a thread does that walked another stack before, and
// by rules alone. Both have to come to the same frames and the same end.
//
//	again N       N calls from stacks that have some of their functions in common, in threads and coroutines, with libraries
//	              that come and go, and handlers of signals in between
//	again cost    what a walk of 40 frames takes, by rules and as a walk after another, with other work between: medians, in ns

#define _GNU_SOURCE
#include "../../../audit/unwind.c"

#include <alloca.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

int read_word(uint32_t pid, uintptr_t at, uint64_t *to) {
	struct iovec a = {to, 8}, b = {(void *)at, 8};
	return process_vm_readv(getpid(), &a, 1, &b, 1, 0) == 8;
}

int is_return(uint32_t pid, uint64_t p) {
	struct object o;
	return object_of(p - 1, &o);
}

static int add(struct dl_phdr_info *info, size_t size, void *only) {
	const unsigned char *head = NULL;
	uintptr_t from = 0, to = 0, low = (uintptr_t)-1, high = 0;
	if (only != NULL && info->dlpi_addr != ((struct link_map *)only)->l_addr)
		return 0;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *h = &info->dlpi_phdr[i];
		uintptr_t begin = info->dlpi_addr + h->p_vaddr, end = begin + h->p_memsz;
		if (h->p_type == PT_GNU_EH_FRAME)
			head = (const unsigned char *)begin;
		if (h->p_type != PT_LOAD)
			continue;
		if (h->p_flags & PF_X)
			from = begin, to = end;
		low = begin < low ? begin : low;
		high = end > high ? end : high;
	}
	if (head != NULL)
		has_tables((void *)info->dlpi_addr, from, to, low, high, head);
	return 0;
}

static _Thread_local uint64_t state;

static uint64_t chance(uint64_t below) {
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % below;
}

static long wrong, walks, frames_in_all;
static uint32_t pid;
volatile int zero;

// by_rules is unwind without a last walk.
static int by_rules(struct place *p, uint64_t *frames, int cap) {
	struct walk w;
	w.last = NULL;
	w.k = w.fresh = 0;
	w.in_common = w.outermost = 0;
	int n = go(&w, pid, p, frames, cap);
	if (w.outermost || n == cap)
		p->pc = 0;
	return n;
}

__attribute__((noinline)) static void look(void) {
	uint64_t a[48], b[48];
	int cap = chance(4) == 0 ? (int)chance(48) : 47;
	struct place p = {(uintptr_t)__builtin_return_address(0), (uintptr_t)__builtin_dwarf_cfa(), *(const uintptr_t *)__builtin_frame_address(0), 0}, q = p;
	int n = unwind(pid, &p, a, cap), m = by_rules(&q, b, cap);
	if (n != m || p.pc != q.pc || p.sp != q.sp || memcmp(a, b, (size_t)n * 8) != 0)
		__atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&walks, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&frames_in_all, n, __ATOMIC_RELAXED);
}

// Functions with frames of every kind. Each calls one or two others, or looks.
static int (*functions[])(int);
enum { FUNCTIONS = 12 };

static int next(int depth) {
	if (depth <= 0) {
		look();
		return 0;
	}
	int r = functions[chance(FUNCTIONS)](depth - 1);
	while (chance(3) == 0)
		r += functions[chance(FUNCTIONS)](depth - 1 - (int)chance((uint64_t)depth));
	return r;
}

#define PLAIN(name, size) \
	__attribute__((noinline)) static int name(int d) { \
		volatile char local[size] = {1}; \
		int r = next(d); \
		return r + local[size / 2] + zero; \
	}
PLAIN(f0, 8)
PLAIN(f1, 40)
PLAIN(f2, 200)
PLAIN(f3, 3000)

__attribute__((noinline)) static int f4(int d) {
	volatile char *local = alloca(chance(9) * 16 + 1); // as large as it happens to be
	local[0] = 1;
	return next(d) + local[0];
}
__attribute__((noinline)) static int f5(int d) {
	volatile char local[192] __attribute__((aligned(64)));
	local[(unsigned)d % 192] = 1;
	return next(d) + local[0];
}
__attribute__((noinline)) static int f6(int d) {
	volatile char local[96] __attribute__((aligned(32))), *more = alloca(chance(200) + 40);
	local[(unsigned)d % 96] = more[0] = 1;
	return next(d) + local[0] + more[0];
}
__attribute__((noinline)) static int f7(int d) {
	int r = d < 0 ? 0 : next(d);
	return r * 3 + next(d / 3);
}
__attribute__((noinline)) static int f8(int d) {
	long a = d, b = zero, c = d + zero, e = 3 * d;
	a += next(d), b += next(d / 4), c += a * b;
	return (int)(a + b * c + e);
}
static int compare(const void *a, const void *b) {
	int depth = *(const int *)a;
	if (depth < 0)
		look();
	return depth - *(const int *)b;
}
__attribute__((noinline)) static int f9(int d) {
	int numbers[] = {-1, -3, -2};
	qsort(numbers, 3, sizeof *numbers, compare);
	return next(d) + numbers[0];
}
static int again_with(int d) { return next(d); }
__attribute__((noinline)) static int f10(int d) {
	volatile int r = again_with(d); // not a call that ends the function
	return r;
}

static _Thread_local ucontext_t here, there;
static _Thread_local int coroutine_depth, in_coroutine;

static void coroutine(void) { next(coroutine_depth); }

// A coroutine's stack is of some size, and where another one's was before, or nothing.
__attribute__((noinline)) static int f11(int d) {
	if (in_coroutine)
		return next(d);
	size_t size = (16 + chance(4) * 16) << 10 << 2;
	void *stack = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (stack == MAP_FAILED)
		return 0;
	in_coroutine = 1;
	coroutine_depth = d < 8 ? d : 8;
	getcontext(&there);
	there.uc_stack.ss_sp = stack;
	there.uc_stack.ss_size = size;
	there.uc_link = &here;
	makecontext(&there, coroutine, 0);
	swapcontext(&here, &there);
	in_coroutine = 0;
	munmap(stack, size);
	return 1;
}

static int (*functions[FUNCTIONS])(int) = {f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11};

static long each;
static char **libraries;
static int library_count;

static void *thread(void *seed) {
	state = 88172645463325252u + (uintptr_t)seed * 7919;
	while (__atomic_load_n(&walks, __ATOMIC_RELAXED) < each)
		next((int)chance(14));
	return NULL;
}

static void *loader(void *arg) {
	state = 5;
	while (__atomic_load_n(&walks, __ATOMIC_RELAXED) < each) {
		void *lib = dlopen(libraries[chance((uint64_t)library_count)], RTLD_NOW);
		void (*call)(void (*)(void)) = lib == NULL ? NULL : (void (*)(void (*)(void)))dlsym(lib, "call");
		if (call == NULL)
			exit(2);
		struct link_map *map = lib;
		dl_iterate_phdr(add, map);
		for (int i = 0; i < 50; i++)
			call(look);
		for (uint32_t i = 0; i < object_count; i++) // as when this thread is kept from running while it changes something
			if (objects[i].of == (void *)map->l_addr) {
				begin_change(&objects[i]);
				usleep(2000);
				end_change(&objects[i]);
			}
		forget_tables((void *)map->l_addr);
		dlclose(lib);
	}
	return arg;
}

static void handler(int sig) {
	uint64_t before = state; // of a step that may be under way
	look();
	state = before;
}

static char other_work[1 << 21];

__attribute__((noinline)) static void sweep(void) {
	for (size_t i = 0; i < sizeof other_work; i += 64)
		other_work[i]++;
}

enum { TIMES = 2001 };
static double spent[2][TIMES];
static int timed_so_far;

__attribute__((noinline)) static void timed(void) {
	uint64_t a[48];
	for (int way = 0; way < 2; way++) {
		struct place p = {(uintptr_t)__builtin_return_address(0), (uintptr_t)__builtin_dwarf_cfa(), *(const uintptr_t *)__builtin_frame_address(0), 0};
		struct timespec from, to;
		sweep();
		clock_gettime(CLOCK_MONOTONIC, &from);
		if (way == 0)
			by_rules(&p, a, 40);
		else
			unwind(pid, &p, a, 40);
		clock_gettime(CLOCK_MONOTONIC, &to);
		spent[way][timed_so_far] = (double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec);
	}
	timed_so_far++;
}

// As many functions as there are frames, as in programs that have their work in many places.
#define DOWN(n, below) \
	__attribute__((noinline)) static int down##n(int way) { \
		volatile char local[24 + 16 * (n % 7)] = {1}; \
		int r = below; \
		return r + local[0]; \
	}
DOWN(0, (timed(), way))
DOWN(1, down0(way)) DOWN(2, down1(way)) DOWN(3, down2(way)) DOWN(4, down3(way)) DOWN(5, down4(way)) DOWN(6, down5(way)) DOWN(7, down6(way))
DOWN(8, down7(way)) DOWN(9, down8(way)) DOWN(10, way & 1 ? down9(way) : down8(way)) DOWN(11, way & 2 ? down10(way) : down9(way)) DOWN(12, down11(way)) DOWN(13, down12(way)) DOWN(14, down13(way)) DOWN(15, down14(way))
DOWN(16, down15(way)) DOWN(17, down16(way)) DOWN(18, down17(way)) DOWN(19, down18(way)) DOWN(20, down19(way)) DOWN(21, down20(way)) DOWN(22, down21(way)) DOWN(23, down22(way))
DOWN(24, down23(way)) DOWN(25, down24(way)) DOWN(26, down25(way)) DOWN(27, down26(way)) DOWN(28, down27(way)) DOWN(29, down28(way)) DOWN(30, down29(way)) DOWN(31, down30(way))
DOWN(32, down31(way)) DOWN(33, down32(way)) DOWN(34, down33(way)) DOWN(35, down34(way)) DOWN(36, down35(way)) DOWN(37, down36(way)) DOWN(38, down37(way)) DOWN(39, down38(way))
DOWN(40, down39(way)) DOWN(41, down40(way)) DOWN(42, down41(way)) DOWN(43, down42(way))

static int larger(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

int main(int argc, char **argv) {
	pid = (uint32_t)getpid();
	dl_iterate_phdr(add, NULL);
	if (argc > 1 && strcmp(argv[1], "cost") == 0) {
		while (timed_so_far < TIMES)
			down43(timed_so_far);
		for (int way = 0; way < 2; way++)
			qsort(spent[way], TIMES, sizeof(double), larger);
		printf("%.0f %.0f\n", spent[0][TIMES / 2], spent[1][TIMES / 2]);
		return 0;
	}
	each = argc > 1 ? atol(argv[1]) : 1000;
	libraries = argv + 2;
	library_count = argc - 2;
	pthread_t t[4];
	for (uintptr_t i = 0; i < 4; i++)
		if (pthread_create(&t[i], NULL, i == 3 && library_count > 0 ? loader : thread, (void *)i) != 0)
			return 2;
	struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
	sigaction(SIGUSR1, &action, NULL);
	while (__atomic_load_n(&walks, __ATOMIC_RELAXED) < each) {
		pthread_kill(t[0], SIGUSR1);
		usleep(50);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
	printf("%ld walks of %ld frames, %ld wrong\n", walks, frames_in_all, wrong);
	return wrong != 0;
}

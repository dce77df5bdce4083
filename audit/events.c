// Events: from a call to a slot of the ring.

#include "audit.h"
#include "sys.h"

HIDDEN struct ring *ring;
extern int (*vdso_clock)(int, void *);

static uint32_t mask, bits; // of slot numbers
static uint32_t announced;  // the process that has said its name; another one after a fork

// What the kernel would have to be asked for at every call. The page is emptied in the child of a fork; where that
// is not possible there is none.
static struct { uint32_t pid; } *known;
static uint32_t pid_now(void) {
	if (known == NULL)
		return (uint32_t)sys0(SYS_getpid);
	uint32_t pid = __atomic_load_n(&known->pid, __ATOMIC_RELAXED);
	if (pid == 0) {
		pid = (uint32_t)sys0(SYS_getpid);
		__atomic_store_n(&known->pid, pid, __ATOMIC_RELAXED);
	}
	return pid;
}

#if defined(__x86_64__)
// The C library keeps a thread's number where it has for many versions: 1 once that was seen to be so, -1 where it is not.
static int tid_known;

enum { TID_OFFSET = 720 };

static uint32_t tid_there(void) {
	uint32_t tid;
	__asm__ volatile("movl %%fs:%c1, %0" : "=r"(tid) : "i"(TID_OFFSET));
	return tid;
}

static uint32_t tid_now(void) {
	int known = __atomic_load_n(&tid_known, __ATOMIC_RELAXED);
	if (known > 0)
		return tid_there();
	uint32_t tid = (uint32_t)sys0(SYS_gettid);
	if (known == 0)
		__atomic_store_n(&tid_known, tid_there() == tid ? 1 : -1, __ATOMIC_RELAXED);
	return tid;
}
#else
static uint32_t tid_now(void) { return (uint32_t)sys0(SYS_gettid); }
#endif

// now is the time in a function that the program called. While the linker is at work the program's C library may not be
// relocated yet: kernel_now is for then.
static uint64_t kernel_now(void) {
	struct { long s, ns; } t = {0, 0};
	sys2(SYS_clock_gettime, 1, &t); // CLOCK_MONOTONIC
	return (uint64_t)t.s * 1000000000u + (uint64_t)t.ns;
}

static uint64_t now(void) {
	struct { long s, ns; } t = {0, 0};
	if (vdso_clock == NULL || vdso_clock(1, &t) != 0)
		return kernel_now();
	return (uint64_t)t.s * 1000000000u + (uint64_t)t.ns;
}

// The compiler calls these for large structs.
#if defined(__x86_64__)
HIDDEN void *memset(void *p, int c, size_t n) {
	void *q = p;
	__asm__ volatile("rep stosb" : "+D"(q), "+c"(n) : "a"(c) : "memory");
	return p;
}

HIDDEN void *memcpy(void *restrict to, const void *restrict from, size_t n) {
	void *t = to;
	__asm__ volatile("rep movsb" : "+D"(t), "+S"(from), "+c"(n) : : "memory");
	return to;
}

#else
HIDDEN void *memset(void *p, int c, size_t n) {
	for (volatile char *q = p; n > 0; n--)
		*q++ = (char)c;
	return p;
}

HIDDEN void *memcpy(void *restrict to, const void *restrict from, size_t n) {
	const char *f = from;
	for (volatile char *t = to; n > 0; n--)
		*t++ = *f++;
	return to;
}
#endif

static uint64_t checksum(const struct slot *s, uint64_t number) {
	const uint64_t *w = &s->time;
	uint64_t h = number * 0x9e3779b97f4a7c15u;
	for (size_t i = 0; i < (sizeof *s - offsetof(struct slot, time)) / 8; i++)
		h = (h ^ w[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
	return h;
}

// put publishes a copy of s, or counts it as dropped and returns 0.
HIDDEN int put(struct slot *s) {
	struct ring *r = ring;
	if (r == NULL || __atomic_load_n(&r->closed, __ATOMIC_RELAXED))
		return 0;
	uint64_t number = __atomic_load_n(&r->head, __ATOMIC_RELAXED);
	for (;;) {
		struct slot *at = &r->slot[number & mask];
		uint64_t turn = number >> bits << 1;
		int64_t ahead = (int64_t)(__atomic_load_n(&at->turn, __ATOMIC_ACQUIRE) - turn);
		if (ahead < 0) {
			__atomic_fetch_add(&r->dropped, 1, __ATOMIC_RELAXED);
			return 0;
		}
		if (ahead > 0) { // taken by another producer, which moved head on before; or else some program wrote over the ring
			uint64_t next = __atomic_load_n(&r->head, __ATOMIC_RELAXED);
			if (next == number)
				return 0;
			number = next;
			continue;
		}
		if (!__atomic_compare_exchange_n(&r->head, &number, number + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			continue;
		s->check = checksum(s, number);
		uint64_t *to = &at->check, *from = &s->check;
		for (size_t i = 0; i < (sizeof *s - offsetof(struct slot, check)) / 8; i++)
			__atomic_store_n(&to[i], from[i], __ATOMIC_RELAXED);
		if (__atomic_compare_exchange_n(&at->turn, &turn, turn + 1, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
			return 1;
		return 0; // the reader waited for it no longer, and has counted it as lost
	}
}

// text puts a string into a record: its end, where it is too long, as that names a file best.
static void text(struct slot *s, const char *string, size_t n) {
	if (n > RING_PAYLOAD) {
		string += n - RING_PAYLOAD;
		n = RING_PAYLOAD;
	}
	s->count = (uint16_t)n;
	memcpy(s->payload, string, n);
}

HIDDEN size_t length(const char *s) {
	size_t n = 0;
	while (s[n] != 0)
		n++;
	return n;
}

HIDDEN void fill(struct slot *s, int type) {
	memset(s, 0, sizeof *s);
	s->type = (uint8_t)type;
	s->time = kernel_now();
	s->pid = (uint32_t)sys0(SYS_getpid);
	s->tid = (uint32_t)sys0(SYS_gettid);
	s->device = -1;
}

// name_space is the number of the PID namespace that this process is in, 0 where it is not known; *shown says whether /proc
// shows processes by their numbers there.
static uint64_t name_space(uint32_t pid, int *shown) {
	char link[32];
	uint64_t number = 0, self = 0;
	long n = sys6(SYS_readlinkat, -100, (long)"/proc/self/ns/pid", (long)link, sizeof link, 0, 0);
	for (long i = 0; i < n; i++)
		if (link[i] >= '0' && link[i] <= '9')
			number = number * 10 + (uint64_t)(link[i] - '0');
	n = sys6(SYS_readlinkat, -100, (long)"/proc/self", (long)link, sizeof link, 0, 0);
	for (long i = 0; i < n; i++)
		self = self * 10 + (uint64_t)(link[i] - '0');
	*shown = self == pid;
	return number & UINT32_MAX;
}

// has_ended reports whether a process has ended; a zombie has.
static int has_ended(uint32_t pid, int shown) {
	long e = sys2(SYS_kill, pid, 0);
	if (e == -3) // ESRCH
		return 1;
	if (e != 0 || !shown)
		return 0;
	char path[24] = "/proc/", text[512];
	size_t n = 6, digits = 1;
	for (uint32_t p = pid; p >= 10; p /= 10)
		digits++;
	for (size_t i = digits; i-- > 0; pid /= 10)
		path[n + i] = (char)('0' + pid % 10);
	memcpy(path + n + digits, "/stat", 6);
	long fd = sys3(SYS_openat, -100, path, 02000000); // O_CLOEXEC
	if (fd < 0)
		return 0;
	long got = sys3(SYS_read, fd, text, sizeof text), at = got;
	sys1(SYS_close, fd);
	while (at > 0 && text[at - 1] != ')')
		at--;
	if (at == 0 || at + 1 >= got || (text[at + 1] != 'Z' && text[at + 1] != 'X'))
		return 0;
	// One whose first thread has ended looks the same as long as others go on: their count is the 17th field behind the state.
	for (int field = 0; at < got && field < 18; at++)
		field += text[at] == ' ';
	return at + 1 < got && text[at] <= '1' && text[at + 1] == ' ';
}

// look_for_ends says which processes have ended, and puts this one among those that are there.
static void look_for_ends(uint32_t pid) {
	int shown;
	uint64_t space = name_space(pid, &shown), self = space << 32 | pid;
	if (ring == NULL || space == 0)
		return;
	int there = 0;
	for (int i = 0; i < RING_ALIVE; i++) {
		uint64_t other = __atomic_load_n(&ring->alive[i], __ATOMIC_RELAXED);
		there |= other == self; // it has become another program
		if (other >> 32 != space || other == self)
			continue;
		struct slot s;
		fill(&s, RECORD_ENDED); // with the time before the look: a process with the same number later began later
		s.addr = (uint32_t)other;
		if (has_ended((uint32_t)other, shown) && __atomic_compare_exchange_n(&ring->alive[i], &other, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			put(&s);
	}
	for (int i = 0; i < RING_ALIVE && !there; i++) {
		uint64_t none = 0;
		there = __atomic_compare_exchange_n(&ring->alive[i], &none, self, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
	}
}

// announce says which process this is: one that has just loaded the driver, or the child of a fork, which has its
// parent's memory and modules.
static void announce(uint32_t pid, int fresh) {
	uint32_t before = __atomic_exchange_n(&announced, pid, __ATOMIC_RELAXED);
	if (before == pid)
		return;
	look_for_ends(pid);
	struct slot s;
	char path[1024];
	fill(&s, RECORD_PROCESS);
	s.flags = (uint32_t)fresh;
	s.handle = (uint64_t)sys0(SYS_getppid);
	s.extra = before;
	long n = sys6(SYS_readlinkat, -100, (long)"/proc/self/exe", (long)path, sizeof path, 0, 0);
	text(&s, path, n > 0 ? (size_t)n : 0);
	put(&s);
}

HIDDEN void module(uintptr_t base, uintptr_t from, uintptr_t to, const char *path, int python) {
	struct slot s;
	fill(&s, RECORD_MODULE);
	s.flags = python ? MODULE_PYTHON : 0;
	s.addr = base;
	s.handle = from;
	s.size = to - from;
	text(&s, path, length(path));
	put(&s);
}

HIDDEN void say(int record, const char *name) {
	struct slot s;
	fill(&s, record);
	text(&s, name, length(name));
	put(&s);
}

HIDDEN int current_device(void) {
	int device = -1;
	return helpers.ctx_get_device != NULL && helpers.ctx_get_device(&device) == 0 ? device : -1;
}

HIDDEN void begin(struct event *e, int call, void *caller, void *frame, void *cfa) {
	uint32_t pid = pid_now();
	if (pid != __atomic_load_n(&announced, __ATOMIC_RELAXED))
		announce(pid, 0); // before the call gets memory, which those that have ended do not hold together with it
	memset(e, 0, sizeof *e);
	e->call = call;
	e->caller = caller;
	e->frame = frame;
	e->cfa = cfa;
	e->device = -2; // not known yet
	e->time = now();
}

// of_context reports whether what a call gets is a context's, and ends with it.
static int of_context(int call) {
	switch (call) {
	case MEM_ALLOC: case MEM_ALLOC_PITCH: case MEM_ALLOC_MANAGED: case MEM_ALLOC_HOST: case MEM_HOST_ALLOC: case MEM_HOST_REGISTER:
	case IPC_OPEN_MEM_HANDLE: case ARRAY_CREATE: case ARRAY_3D_CREATE: case MIPMAPPED_ARRAY_CREATE: case IMPORT_EXTERNAL_MEMORY:
		return 1;
	}
	return 0;
}

// The devices whose records were sent in this process. The number of a device differs from process to process.
static uint8_t sent[MOST_DEVICES];

// send_device says which device a number means, before the first call that has it: so that the record was sent is noted last, and
// two threads may send it twice.
static void send_device(int device) {
	unsigned char what[16 + 100];
	size_t total = 0, name = 0;
	if (device < 0 || device >= MOST_DEVICES || __atomic_load_n(&sent[device], __ATOMIC_RELAXED) || helpers.device_get_uuid == NULL)
		return;
	memset(what, 0, sizeof what);
	if (helpers.device_get_uuid(what, device) != 0)
		return;
	if (helpers.device_get_name != NULL && helpers.device_get_name((char *)what + 16, sizeof what - 17, device) == 0)
		name = length((char *)what + 16);
	if (helpers.device_total_mem != NULL)
		helpers.device_total_mem(&total, device);
	struct slot s;
	fill(&s, RECORD_DEVICE);
	s.device = device;
	s.size = total;
	text(&s, (char *)what, 16 + name);
	if (put(&s))
		__atomic_store_n(&sent[device], 1, __ATOMIC_RELEASE);
}

HIDDEN void finish(struct event *e, int result) {
	uint64_t end = now();
	struct slot s;
	memset(&s, 0, sizeof s);
	s.type = RECORD_CALL;
	s.call = (uint8_t)e->call;
	s.pid = pid_now();
	s.tid = tid_now();
	s.time = e->time;
	s.took = end - e->time;
	s.addr = e->addr;
	s.size = e->size;
	s.stream = e->stream;
	s.handle = e->handle;
	s.pool = e->pool;
	s.extra = e->extra;
	s.result = result;
	s.device = e->device != -2 ? e->device : current_device();
	send_device(s.device);
	if (result == 2 && e->extra == 0 && helpers.mem_get_info != NULL) {
		size_t free = 0, total = 0;
		if (helpers.mem_get_info(&free, &total) == 0)
			s.extra = free;
	}
	if (result == 0 && e->extra == 0 && of_context(e->call) && helpers.ctx_get_current != NULL) {
		void *context = NULL;
		if (helpers.ctx_get_current(&context) == 0)
			s.extra = (uintptr_t)context;
	}
	s.count = 1;
	s.payload[0] = (uintptr_t)e->caller;
	if (ring != NULL && ring->flags & (RING_NATIVE | RING_PYTHON)) {
		s.flags = CALL_STACK;
		s.count = 2;
		s.payload[1] = stack(e, s.pid, ring->flags);
	}
	put(&s);
	if (ring != NULL)
		__atomic_fetch_add(&ring->spent, now() - end, __ATOMIC_RELAXED);
}

// The ring is a file that the environment names, as it was when the program was started: CISTERN_AUDIT=nonce:path. The kernel
// shows the place where that environment was, which programs that give themselves a title write over (setproctitle): so it is
// read before they begin.

static char named[512]; // nonce:path, empty where there is none
static int was_read;

static int variable(char *value, size_t size) {
	static const char key[] = "CISTERN_AUDIT=";
	long fd = sys3(SYS_openat, -100, "/proc/self/environ", 02000000); // O_CLOEXEC
	if (fd < 0)
		return 0;
	char buffer[2048];
	size_t at = 0, n = 0; // how much of the key, and of the value, was there
	int found = 0, elsewhere = 0;
	long got;
	while (!found && (got = sys3(SYS_read, fd, buffer, sizeof buffer)) > 0) {
		for (long i = 0; i < got && !found; i++) {
			char c = buffer[i];
			if (c == 0) {
				found = at == sizeof key - 1;
				if (!found)
					at = 0, elsewhere = 0;
			} else if (at == sizeof key - 1) {
				if (n + 1 < size)
					value[n++] = c;
			} else if (!elsewhere && c == key[at]) {
				at++;
			} else {
				elsewhere = 1, at = 0;
			}
		}
	}
	sys1(SYS_close, fd);
	value[n] = 0;
	return found || at == sizeof key - 1;
}

HIDDEN void read_name(void) {
	if (was_read)
		return;
	was_read = 1;
	if (!variable(named, sizeof named))
		named[0] = 0;
}

HIDDEN void open_ring(void) {
	if (ring != NULL)
		return;
	read_name(); // where the driver is among the libraries that the program is linked to
	uint64_t nonce = 0;
	const char *path = named;
	for (; *path != 0 && *path != ':'; path++)
		nonce = nonce << 4 | (uint64_t)(*path <= '9' ? *path - '0' : *path - 'a' + 10);
	if (*path == 0)
		return;
	path++;
	// Once the reader is gone another process may have its number, and anything under that of the file: a pipe to be read
	// from, or a device that does something when it is opened.
	static const char name[] = "/memfd:" RING_NAME;
	char link[sizeof name];
	long n = sys6(SYS_readlinkat, -100, (long)path, (long)link, sizeof link - 1, 0, 0);
	if (n != sizeof link - 1)
		return;
	for (size_t i = 0; i < sizeof link - 1; i++)
		if (link[i] != name[i])
			return;
	long fd = sys3(SYS_openat, -100, path, 02 | 02000000 | 04000 | 0400); // O_RDWR, O_CLOEXEC, O_NONBLOCK, O_NOCTTY
	if (fd < 0)
		return;
	// The file may be another one by now, if the reader is gone.
	uint64_t head[3];
	long got = sys3(SYS_read, fd, head, sizeof head);
	uint32_t slots = (uint32_t)head[2];
	if (got == sizeof head && head[0] == RING_MAGIC && head[1] == nonce && slots > 0 && (slots & (slots - 1)) == 0 && slots <= 1u << 24) {
		long p = sys6(SYS_mmap, 0, (long)(sizeof(struct ring) + (size_t)slots * sizeof(struct slot)), 3, 1, fd, 0);
		if (p > 0 || p < -4095) {
			mask = slots - 1;
			bits = (uint32_t)__builtin_ctz(slots);
			ring = (struct ring *)p;
		}
	}
	sys1(SYS_close, fd);
	if (ring == NULL)
		return;
	long page = sys6(SYS_mmap, 0, 4096, 3, 0x22, -1, 0); // private, anonymous
	if ((page > 0 || page < -4095) && sys3(SYS_madvise, page, 4096, 18) == 0) // MADV_WIPEONFORK
		__atomic_store_n(&known, (void *)page, __ATOMIC_RELEASE);
	announce((uint32_t)sys0(SYS_getpid), 1);
}

// Stacks: of return addresses, and of Python's frames. Each is sent once, and has a number from then on.

#include "audit.h"
#include "pystack.h"
#include "sys.h"
#include "unwind.h"

// What was sent, by number: stacks and code objects. A place is given to what came last, and what lost its
// place is sent again, so that nothing is ever full.
enum { SENT = 1 << 14, PLACES = 4 };

static uint64_t sent[SENT];

static int was_sent(uint64_t number) {
	for (uint64_t i = 0; i < PLACES; i++)
		if (__atomic_load_n(&sent[(number + i) % SENT], __ATOMIC_RELAXED) == number)
			return 1;
	return 0;
}

static void set_sent(uint64_t number) {
	for (uint64_t i = 0; i < PLACES; i++) {
		uint64_t none = 0;
		if (__atomic_compare_exchange_n(&sent[(number + i) % SENT], &none, number, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return;
	}
	__atomic_store_n(&sent[(number + (number >> 32) % PLACES) % SENT], number, __ATOMIC_RELAXED);
}

// tell puts what is longer than a payload into as many records as it takes. It returns 0 if one of them found no room.
static int tell(int record, uint64_t number, uint64_t size, const void *what, size_t n, size_t unit) {
	for (size_t at = 0; at < n;) {
		struct slot s;
		fill(&s, record);
		size_t piece = n - at < RING_PAYLOAD / unit ? n - at : RING_PAYLOAD / unit;
		s.addr = number;
		s.size = size;
		s.handle = n;
		s.extra = at;
		s.count = (uint16_t)piece;
		memcpy(s.payload, (const char *)what + at * unit, piece * unit);
		if (!put(&s))
			return 0;
		at += piece;
	}
	return 1;
}

// Return addresses: by the tables of the objects that the functions are in (unwind.c). Where they end, as they do at code that
// was made at run time, the words of the stack from there on are looked through, and those are kept that point right behind
// an instruction that calls: they are the addresses that functions return to, and, now and then, one that an earlier call
// has left behind. The stack is read by the kernel then, page by page, which stops where it ends.
enum { STACK_WORDS = 1024, STACK_PAGES = 3, STACK_CANDIDATES = 96, STACK_NATIVE = 48, STACK_PYTHON = 96 };

struct iovec { const void *p; size_t n; };

// read_own reads pieces of this process's memory, and returns how many bytes it got before one that is not there.
static long read_own(uint32_t pid, void *to, size_t n, const struct iovec *from, int pieces) {
	struct iovec local = {to, n};
	long got = sys6(SYS_process_vm_readv, (long)pid, (long)&local, 1, (long)from, pieces, 0);
	return got > 0 ? got : 0;
}

// Where modules have their code, by the megabyte: a bit of a hash for each, so that most words are distinguished at once.
static uint64_t code[1024];

static inline uint32_t megabyte(uint64_t p) { return (uint32_t)((p >> 20) * 0x9e3779b97f4a7c15u >> 48); }

HIDDEN void has_code(uintptr_t from, uintptr_t to) {
	for (uintptr_t p = from >> 20; p <= to >> 20; p++) {
		uint32_t bit = megabyte(p << 20);
		__atomic_fetch_or(&code[bit / 64], (uint64_t)1 << bit % 64, __ATOMIC_RELAXED);
	}
}

static int in_code(uint64_t p) {
	uint32_t bit = megabyte(p);
	return p >= 65536 && p >> ADDRESS_BITS == 0 && (__atomic_load_n(&code[bit / 64], __ATOMIC_RELAXED) >> bit % 64 & 1);
}

#if defined(__x86_64__)
// called reports whether the seven bytes before an address end with a call: direct, or through a register or memory.
static int called(const unsigned char *b) {
	if (b[2] == 0xe8)
		return 1;
	for (int i = 0; i <= 5; i++)
		if (i != 2 && b[i] == 0xff && (b[i + 1] & 0x38) == 0x10)
			return 1;
	return 0;
}

#else
// called reports whether the instruction before an address is a call: BL, or BLR of a register.
static int called(const unsigned char *b) {
	uint32_t i = (uint32_t)b[3] | (uint32_t)b[4] << 8 | (uint32_t)b[5] << 16 | (uint32_t)b[6] << 24;
	return i >> 26 == 0x25 || (i & 0xfffffc1f) == 0xd63f0000;
}
#endif

// Which addresses in code stand behind a call, as far as they were looked at: reading code through the kernel costs more
// than all the rest. What an address is ends with its module.
enum { KNOWN = 1 << 12, KNOWN_NOTHING = 0, KNOWN_NOT, KNOWN_RETURN };

static uint64_t addresses_known[KNOWN];

static uint64_t *place(uint64_t p) { return &addresses_known[p * 0x9e3779b97f4a7c15u >> 52]; }

static int known(uint64_t p) {
	uint64_t k = __atomic_load_n(place(p), __ATOMIC_RELAXED);
	return k >> 2 == p ? (int)(k & 3) : KNOWN_NOTHING;
}

static void know(uint64_t p, int is_return) {
	__atomic_store_n(place(p), p << 2 | (is_return ? KNOWN_RETURN : KNOWN_NOT), __ATOMIC_RELAXED);
}

HIDDEN void forget_code(void) {
	for (int i = 0; i < KNOWN; i++)
		__atomic_store_n(&addresses_known[i], 0, __ATOMIC_RELAXED);
}

HIDDEN int read_word(uint32_t pid, uintptr_t at, uint64_t *to) {
	struct iovec from = {(const void *)at, sizeof *to};
	return read_own(pid, to, sizeof *to, &from, 1) == sizeof *to;
}

HIDDEN int is_return(uint32_t pid, uint64_t p) {
	unsigned char before[7];
	struct iovec from = {(const void *)(p - sizeof before), sizeof before};
	return in_code(p) && read_own(pid, before, sizeof before, &from, 1) == sizeof before && called(before);
}

// scanned finds return addresses in the words from sp on. words and at are too large for the stack of functions called from here.
static __attribute__((noinline)) int scanned(uint32_t pid, uintptr_t sp, uint64_t *frames, int cap) {
	uint64_t words[STACK_WORDS], word[STACK_CANDIDATES];
	struct iovec at[STACK_CANDIDATES], pages[STACK_PAGES];
	unsigned char before[STACK_CANDIDATES][7], whose[STACK_CANDIDATES]; // asked for, by their place among the candidates
	int n = 0, candidates = 0, asked = 0, p = 0;
	const char *from = (const char *)sp;
	for (size_t left = sizeof words; left > 0 && p < STACK_PAGES; p++) {
		size_t piece = 4096 - ((uintptr_t)from & 4095);
		piece = piece < left ? piece : left;
		pages[p] = (struct iovec){from, piece};
		from += piece;
		left -= piece;
	}
	long got = read_own(pid, words, sizeof words, pages, p) / 8;
	for (long i = 0; i < got && candidates < STACK_CANDIDATES; i++) {
		if (!in_code(words[i]))
			continue;
		int is = known(words[i]);
		if (is == KNOWN_NOT)
			continue;
		if (is == KNOWN_NOTHING) {
			whose[asked] = (unsigned char)candidates;
			at[asked++] = (struct iovec){(char *)words[i] - 7, 7};
		}
		word[candidates++] = words[i];
	}
	for (int i = 0; i < asked; i++) {
		// As many as can be read at once; the one at which that ends is no code.
		int good = (int)(read_own(pid, before, sizeof before, &at[i], asked - i) / 7);
		for (int k = 0; k <= good && i + k < asked; k++) {
			int is_return = k < good && called(before[k]);
			know((uintptr_t)at[i + k].p + 7, is_return);
			if (!is_return)
				word[whose[i + k]] = 0;
		}
		i += good;
	}
	for (int i = 0; i < candidates && n < cap; i++)
		if (word[i] != 0)
			frames[n++] = word[i];
	return n;
}

// native finds return addresses behind the caller's.
static int native(const struct event *e, uint32_t pid, uint64_t *frames, int cap) {
	struct place p = {(uintptr_t)e->caller, (uintptr_t)e->cfa, *(const uintptr_t *)e->frame, 0};
	int n = unwind(pid, &p, frames, cap);
	return p.pc == 0 ? n : n + scanned(pid, p.sp, frames + n, cap - n);
}

// Python. It is looked at when a call is made after it was loaded, as it cannot be used while it is being loaded. Threads
// whose first calls come at the same time look each for itself, so that none of them goes without its frames; one of them,
// whose process's number stands in the state, as a fork may leave it behind, keeps what it found for all.
static struct pystack python;
static struct pystack_learned python_learned;
static void *(*python_lookup)(const char *, void *);
static void *python_object;
static uint64_t python_state; // one of these, and a process from bit 8 on
enum { PYTHON_NONE, PYTHON_LOADED, PYTHON_KEEPING, PYTHON_KEPT, PYTHON_REFUSED };

HIDDEN void python_loaded(void *(*lookup)(const char *, void *), void *object) {
	python_lookup = lookup;
	python_object = object;
	memset(&python_learned, 0, sizeof python_learned);
	__atomic_store_n(&python_state, lookup != NULL ? PYTHON_LOADED : PYTHON_NONE, __ATOMIC_RELEASE);
}

// python_refused ends what the state was, and says why.
static void python_refused(uint64_t state, int why) {
	if (__atomic_compare_exchange_n(&python_state, &state, PYTHON_REFUSED, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		say(RECORD_PYTHON, pystack_why(why));
}

// python_there is the interpreter, which may be found into own, or NULL.
static const struct pystack *python_there(uint32_t pid, struct pystack *own) {
	uint64_t state = __atomic_load_n(&python_state, __ATOMIC_ACQUIRE), keeping = PYTHON_KEEPING | (uint64_t)pid << 8;
	if (state == PYTHON_KEPT)
		return &python;
	if (state == PYTHON_NONE || state == PYTHON_REFUSED)
		return NULL;
	int found = pystack_find(own, &python_learned, python_lookup, python_object);
	if (found == PYSTACK_EARLY)
		return NULL;
	if (found != PYSTACK_FOUND) {
		python_refused(state, found);
		return NULL;
	}
	if (state != keeping && __atomic_compare_exchange_n(&python_state, &state, keeping, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
		python = *own;
		__atomic_compare_exchange_n(&python_state, &keeping, PYTHON_KEPT, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
	}
	return own;
}

// names tells of a code object.
static __attribute__((noinline)) int names(const struct pystack *p, const struct pyframe *f) {
	char text[1024];
	enum { FILE = 640 };
	if (!pystack_names(p, f, text, FILE, text + FILE, sizeof text - FILE)) // strings of a kind of the program's own
		text[0] = text[FILE] = '?', text[1] = text[FILE + 1] = 0;
	size_t file = length(text), func = length(text + FILE);
	memcpy(text + file + 1, text + FILE, func); // forwards, and to before it
	if (!tell(RECORD_CODE, f->id, f->first_line, text, file + 1 + func, 1))
		return 0;
	set_sent(f->id);
	return 1;
}

// frames adds Python's frames to words, two for each, and clears whole where one of them cannot be sent now.
static __attribute__((noinline)) int frames(uint32_t pid, uint64_t *words, int *whole) {
	struct pystack own;
	const struct pystack *p = python_there(pid, &own);
	if (p == NULL)
		return 0;
	struct pyframe f[STACK_PYTHON];
	int n = pystack_walk(p, f, STACK_PYTHON);
	for (int i = 0; i < n; i++) {
		words[2 * i] = f[i].id;
		words[2 * i + 1] = f[i].line;
		if (!was_sent(f[i].id) && !names(p, &f[i]))
			*whole = 0;
	}
	if (n == 0 && pystack_state(p) != PYSTACK_FOUND)
		python_refused(PYTHON_KEPT, pystack_state(p));
	return n;
}

// number_of is a number for words, of four parts that do not wait for one another.
static uint64_t number_of(const uint64_t *words, int n) {
	uint64_t part[4] = {1, 2, 3, 4};
	int i = 0;
	for (; i + 4 <= n; i += 4)
		for (int k = 0; k < 4; k++)
			part[k] = (part[k] ^ words[i + k]) * 0x9e3779b97f4a7c15u, part[k] ^= part[k] >> 29;
	for (; i < n; i++)
		part[0] = (part[0] ^ words[i]) * 0x9e3779b97f4a7c15u, part[0] ^= part[0] >> 29;
	for (int k = 1; k < 4; k++)
		part[0] = (part[0] ^ part[k]) * 0x9e3779b97f4a7c15u, part[0] ^= part[0] >> 29;
	return part[0];
}

HIDDEN uint64_t stack(const struct event *e, uint32_t pid, uint32_t kinds) {
	uint64_t words[STACK_NATIVE + 2 * STACK_PYTHON];
	int addresses = 1, whole = 1;
	words[0] = (uintptr_t)e->caller;
	if (kinds & RING_NATIVE)
		addresses += native(e, pid, words + 1, STACK_NATIVE - 1);
	int n = addresses;
	if (kinds & RING_PYTHON)
		n += 2 * frames(pid, words + n, &whole);
	uint64_t number = (number_of(words, n) + (uint64_t)addresses * 0xd1342543de82ef94u) | 1;
	if (!was_sent(number) && whole && tell(RECORD_STACK, number, (uint64_t)addresses, words, (size_t)n, 8))
		set_sent(number);
	return number;
}

// Native stacks by the tables that compilers write for exceptions: the call frame information of .eh_frame, found through
// .eh_frame_hdr (Linux Standard Base Core 5.0, 10.6; DWARF 4, 6.4.2). What they say of an address that a function returns to
// is worked out once and kept as a rule of one word; from then on a frame costs a look at the rule and two loads, or less
// where the thread's last stack had it too.
//
// Only what return addresses need is followed: the stack pointer and the frame pointer. Where a function's frame is found
// through any other register, or where there are no tables, the way ends, and the caller goes on as well as it can.
//
// A rule is tried before it is kept, by reading what it leads to through the kernel: it has to be there, and to be an
// address behind a call, or the beginning of a function, as at the bottom of the stacks that coroutines have. So tables
// that are wrong lead to no memory that is not there.

#include "audit.h"
#include "unwind.h"

#if defined(__x86_64__)
enum { FP = 6, SP = 7, RA = 16, BREG_FP = 0x70 + FP };
#else
enum { FP = 29, SP = 31, RA = 30, BREG_FP = 0x70 + FP };
#endif

// What a rule says. CFA is DWARF's name for what the stack pointer was before the call.
enum { NONE, UNKNOWN, OUTERMOST, BY_SP, BY_FP, BEHIND_FP }; // where the CFA is: sp or fp and an offset, or in memory there
enum { FP_SAME, FP_AT_CFA, FP_AT_FP };                      // where the caller's frame pointer is

struct rule {
	int cfa, fp;
	int64_t cfa_offset, ra_offset, fp_offset; // bytes; the return address lies at the CFA and ra_offset
};

// A rule in a word: 3 bits, 2 bits, and offsets in words of 21, 14 and 14 bits; UNKNOWN where it does not fit.
static uint64_t packed(const struct rule *r) {
	int64_t a = r->cfa_offset, b = r->ra_offset, c = r->fp_offset;
	if (((a | b | c) & 7) != 0 || a >> 23 != a >> 63 || b >> 16 != b >> 63 || c >> 16 != c >> 63)
		return UNKNOWN;
	return (uint64_t)r->cfa | (uint64_t)r->fp << 3 | ((uint64_t)a >> 3 & 0x1fffff) << 5 | ((uint64_t)b >> 3 & 0x3fff) << 26 |
	       ((uint64_t)c >> 3 & 0x3fff) << 40;
}

static inline struct rule unpacked(uint64_t w) {
	return (struct rule){(int)(w & 7), (int)(w >> 3 & 3), ((int64_t)(w << 38) >> 43) * 8, ((int64_t)(w << 24) >> 50) * 8, ((int64_t)(w << 10) >> 50) * 8};
}

// The rules that are known, by address. The key has the rule in it, so that what two threads wrote half each is not found.
enum { RULES = 1 << 14 };

static struct { uint64_t key, rule; } rules[RULES];
static int some;           // rules are there
static uint32_t forgotten; // how often they were

static inline uint64_t mixed(uint64_t w) { return w * 0x9e3779b97f4a7c15u; }

static inline uint64_t kept(uint64_t pc) {
	uint64_t i = mixed(pc) >> 50, rule = __atomic_load_n(&rules[i].rule, __ATOMIC_RELAXED);
	return (__atomic_load_n(&rules[i].key, __ATOMIC_RELAXED) ^ mixed(rule)) == pc ? rule : NONE;
}

static void keep(uint64_t pc, uint64_t rule) {
	uint64_t i = mixed(pc) >> 50;
	__atomic_store_n(&some, 1, __ATOMIC_RELAXED);
	__atomic_store_n(&rules[i].rule, rule, __ATOMIC_RELAXED);
	__atomic_store_n(&rules[i].key, pc ^ mixed(rule), __ATOMIC_RELAXED);
}

// The objects that have tables. They come and go under the linker's lock; readers take a copy and check whether it was
// changed meanwhile. No thread runs code of an object that is being loaded or unloaded: so it is skipped, and no change is
// waited for, as that may take long on a busy machine.
struct object {
	const void *of;            // whose this is
	uintptr_t from, to;        // its code
	uintptr_t low, high;       // all of it
	const unsigned char *head; // its .eh_frame_hdr
	uint32_t changes;          // odd while it is changed
};

enum { OBJECTS = 2048 };

static struct object objects[OBJECTS];
static uint32_t object_count;

static void begin_change(struct object *o) {
	__atomic_store_n(&o->changes, o->changes + 1, __ATOMIC_RELAXED);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void end_change(struct object *o) { __atomic_store_n(&o->changes, o->changes + 1, __ATOMIC_RELEASE); }

static void change(struct object *o, const struct object *to) {
	begin_change(o);
	o->of = to->of;
	o->from = to->from;
	o->to = to->to;
	o->low = to->low;
	o->high = to->high;
	o->head = to->head;
	end_change(o);
}

HIDDEN void has_tables(const void *of, uintptr_t from, uintptr_t to, uintptr_t low, uintptr_t high, const void *head) {
	struct object new = {of, from, to, low, high, head, 0};
	uint32_t i = 0;
	while (i < object_count && objects[i].to != 0)
		i++;
	if (i == OBJECTS)
		return;
	change(&objects[i], &new);
	if (i == object_count)
		__atomic_store_n(&object_count, i + 1, __ATOMIC_RELEASE);
}

HIDDEN void forget_tables(const void *of) {
	static const struct object nothing;
	for (uint32_t i = 0; i < object_count; i++)
		if (objects[i].to != 0 && objects[i].of == of)
			change(&objects[i], &nothing);
	__atomic_fetch_add(&forgotten, 1, __ATOMIC_ACQ_REL);
	if (!__atomic_exchange_n(&some, 0, __ATOMIC_RELAXED))
		return;
	for (int i = 0; i < RULES; i++) // a rule's own key does not fit to none
		__atomic_store_n(&rules[i].rule, NONE, __ATOMIC_RELAXED);
}

// object_of finds the object that an address is in.
static int object_of(uintptr_t pc, struct object *o) {
	uint32_t n = __atomic_load_n(&object_count, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; i < n; i++) {
		const struct object *at = &objects[i];
		if (pc - __atomic_load_n(&at->from, __ATOMIC_RELAXED) >= __atomic_load_n(&at->to, __ATOMIC_RELAXED) - __atomic_load_n(&at->from, __ATOMIC_RELAXED))
			continue;
		uint32_t before = __atomic_load_n(&at->changes, __ATOMIC_ACQUIRE);
		*o = *at;
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		if (!(before & 1) && __atomic_load_n(&at->changes, __ATOMIC_RELAXED) == before && pc - o->from < o->to - o->from)
			return 1;
	}
	return 0;
}

// Bytes of the tables, never beyond an end.
struct bytes {
	const unsigned char *p, *end;
	int bad;
};

static uint64_t number(struct bytes *b, size_t n) {
	if ((size_t)(b->end - b->p) < n) {
		b->bad = 1;
		b->p = b->end;
		return 0;
	}
	uint64_t v = 0;
	for (size_t i = 0; i < n; i++)
		v |= (uint64_t)b->p[i] << 8 * i;
	b->p += n;
	return v;
}

static uint64_t leb(struct bytes *b, int with_sign) {
	uint64_t v = 0;
	for (int shift = 0;; shift += 7) {
		uint64_t c = number(b, 1);
		if (shift < 64)
			v |= (c & 0x7f) << shift;
		if (!(c & 0x80)) {
			if (with_sign && c & 0x40 && shift + 7 < 64)
				v |= ~(uint64_t)0 << (shift + 7);
			return v;
		}
	}
}

static uint64_t uleb(struct bytes *b) { return leb(b, 0); }
static int64_t sleb(struct bytes *b) { return (int64_t)leb(b, 1); }

// size_of is that of what is encoded so (DW_EH_PE_...), 0 for what is not known here.
static size_t size_of(int encoding) {
	switch (encoding & 7) {
	case 0: case 4: return 8;
	case 2: return 2;
	case 3: return 4;
	}
	return 0;
}

// encoded is an address, or with 0 in place of 0x10 for relative ones a length.
static uint64_t encoded(struct bytes *b, int encoding) {
	const unsigned char *at = b->p;
	size_t n = size_of(encoding);
	if (n == 0 || (encoding & 0xf0) > 0x10)
		b->bad = 1;
	uint64_t v = number(b, n);
	if (encoding & 8 && n != 0 && n < 8 && v >> (8 * n - 1) & 1)
		v |= ~(uint64_t)0 << 8 * n;
	return (encoding & 0x70) == 0x10 ? v + (uintptr_t)at : v;
}

// entry is what one of .eh_frame holds from at on, behind its length.
static struct bytes entry(const struct object *o, uintptr_t at) {
	struct bytes b = {(const unsigned char *)at, (const unsigned char *)o->high, at < o->low || at >= o->high};
	if (b.bad)
		b.p = b.end;
	uint64_t n = number(&b, 4);
	if (n == 0 || n > (uint64_t)(b.end - b.p)) { // ends here, or is one of 64 bits, which is not in use
		b.bad = 1;
		n = 0;
	}
	b.end = b.p + n;
	return b;
}

// search finds the entry of the function that pc is in. The table is one of pairs in order: where a function begins, and
// where its entry is, both counted from the table's head.
static uintptr_t search(const struct object *o, uintptr_t pc) {
	uintptr_t head = (uintptr_t)o->head;
	struct bytes b = {o->head, (const unsigned char *)o->high, head < o->low || head >= o->high};
	if (b.bad || number(&b, 1) != 1)
		return 0;
	int eh_frame = (int)number(&b, 1), count = (int)number(&b, 1), table = (int)number(&b, 1);
	number(&b, size_of(eh_frame));
	uint64_t n = encoded(&b, count);
	if (b.bad || table != 0x3b || n > (uint64_t)(b.end - b.p) / 8)
		return 0;
	const unsigned char *pairs = b.p;
	uint64_t low = 0, high = n; // the first of those that begin behind pc is in [low, high]
	while (low < high) {
		uint64_t middle = low + (high - low) / 2;
		struct bytes at = {pairs + 8 * middle, b.end, 0};
		if (head + (uint64_t)(int64_t)(int32_t)number(&at, 4) <= pc)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == 0)
		return 0;
	struct bytes at = {pairs + 8 * (low - 1) + 4, b.end, 0};
	return head + (uint64_t)(int64_t)(int32_t)number(&at, 4);
}

// A row of the tables, as far as it matters.
enum { WHERE_SAME, WHERE_AT_CFA, WHERE_AT_FP, WHERE_UNDEFINED, WHERE_ELSE };

struct where {
	int how;
	int64_t offset;
};

struct row {
	int cfa; // as in a rule; UNKNOWN for what is not followed
	int64_t offset;
	struct where fp, ra;
};

struct common { // of a CIE
	uint64_t code_align;
	int64_t data_align;
	int encoding, augmented, signal;
	struct bytes instructions;
};

static int common_of(const struct object *o, uintptr_t at, struct common *c) {
	struct bytes b = entry(o, at);
	if (number(&b, 4) != 0)
		return 0;
	uint64_t version = number(&b, 1);
	struct bytes names = b;
	while (number(&b, 1) != 0)
		;
	if (version == 4)
		number(&b, 2); // sizes of an address and of a segment
	else if (version != 1 && version != 3)
		return 0;
	c->code_align = uleb(&b);
	c->data_align = sleb(&b);
	if ((version == 1 ? number(&b, 1) : uleb(&b)) != RA || b.bad)
		return 0;
	c->encoding = 0;
	c->augmented = c->signal = 0;
	uint64_t name = number(&names, 1);
	if (name == 'z') {
		uint64_t n = uleb(&b);
		if (n > (uint64_t)(b.end - b.p))
			return 0;
		struct bytes data = {b.p, b.p + n, 0};
		b.p += n;
		c->augmented = 1;
		while ((name = number(&names, 1)) != 0) {
			switch (name) {
			case 'R': c->encoding = (int)number(&data, 1); break;
			case 'L': number(&data, 1); break;
			case 'P': { // not read, only passed
				size_t n = size_of((int)number(&data, 1));
				number(&data, n);
				data.bad |= n == 0;
				break;
			}
			case 'S': c->signal = 1; break;
			case 'B': case 'G': break; // keys of pointers, tags of memory
			default: return 0;
			}
		}
		if (data.bad)
			return 0;
	} else if (name != 0) {
		return 0;
	}
	c->instructions = b;
	return !b.bad;
}

static struct where *register_of(struct row *r, uint64_t reg, struct where *other) {
	return reg == FP ? &r->fp : reg == RA ? &r->ra : other;
}

static void cfa_register(struct row *r, uint64_t reg) { r->cfa = reg == SP ? BY_SP : reg == FP ? BY_FP : UNKNOWN; }

// block is an expression, of which those are known that compilers write where they align the stack: fp and an offset, and
// what lies there.
static struct bytes block(struct bytes *b) {
	uint64_t n = uleb(b);
	if (n > (uint64_t)(b->end - b->p)) {
		b->bad = 1;
		n = 0;
	}
	struct bytes in = {b->p, b->p + n, 0};
	b->p += n;
	return in;
}

static int by_fp(struct bytes *in, int64_t *offset) {
	if (number(in, 1) != BREG_FP)
		return 0;
	*offset = sleb(in);
	return !in->bad;
}

// run follows instructions up to the row of pc. from is where the function begins; first is the row to which registers are
// restored.
static int run(struct bytes b, const struct common *c, uint64_t from, uint64_t pc, const struct row *first, struct row *r) {
	enum { DEPTH = 8 };
	struct row saved[DEPTH];
	int depth = 0;
	uint64_t at = from, align = (uint64_t)c->data_align; // without overflow, whatever a table says
	while (b.p < b.end && !b.bad) {
		struct where other, *w;
		struct bytes in;
		uint64_t op = number(&b, 1), low = op & 0x3f;
		switch (op >> 6) {
		case 1: // advance_loc
			at += low * c->code_align;
			if (at > pc)
				return 1;
			continue;
		case 2: // offset
			*register_of(r, low, &other) = (struct where){WHERE_AT_CFA, (int64_t)(uleb(&b) * align)};
			continue;
		case 3: // restore
			if (low == FP || low == RA)
				*register_of(r, low, &other) = low == FP ? first->fp : first->ra;
			continue;
		}
		switch (op) {
		case 0x00: break; // nop
		case 0x01: at = encoded(&b, c->encoding); break; // set_loc
		case 0x02: at += number(&b, 1) * c->code_align; break;
		case 0x03: at += number(&b, 2) * c->code_align; break;
		case 0x04: at += number(&b, 4) * c->code_align; break;
		case 0x05: // offset_extended
			w = register_of(r, uleb(&b), &other);
			*w = (struct where){WHERE_AT_CFA, (int64_t)(uleb(&b) * align)};
			break;
		case 0x06: // restore_extended
			low = uleb(&b);
			if (low == FP || low == RA)
				*register_of(r, low, &other) = low == FP ? first->fp : first->ra;
			break;
		case 0x07: register_of(r, uleb(&b), &other)->how = WHERE_UNDEFINED; break;
		case 0x08: register_of(r, uleb(&b), &other)->how = WHERE_SAME; break;
		case 0x09: // register
			register_of(r, uleb(&b), &other)->how = WHERE_ELSE;
			uleb(&b);
			break;
		case 0x0a: // remember_state
			if (depth == DEPTH)
				return 0;
			saved[depth++] = *r;
			break;
		case 0x0b: // restore_state
			if (depth == 0)
				return 0;
			*r = saved[--depth];
			break;
		case 0x0c: // def_cfa
			cfa_register(r, uleb(&b));
			r->offset = (int64_t)uleb(&b);
			break;
		case 0x0d: cfa_register(r, uleb(&b)); break;
		case 0x0e: r->offset = (int64_t)uleb(&b); break;
		case 0x0f: // def_cfa_expression
			in = block(&b);
			r->cfa = by_fp(&in, &r->offset) && number(&in, 1) == 0x06 && in.p == in.end && !in.bad ? BEHIND_FP : UNKNOWN; // DW_OP_deref
			break;
		case 0x10: // expression
			w = register_of(r, uleb(&b), &other);
			in = block(&b);
			w->how = by_fp(&in, &w->offset) && in.p == in.end ? WHERE_AT_FP : WHERE_ELSE;
			break;
		case 0x11: // offset_extended_sf
			w = register_of(r, uleb(&b), &other);
			*w = (struct where){WHERE_AT_CFA, (int64_t)((uint64_t)sleb(&b) * align)};
			break;
		case 0x12: // def_cfa_sf
			cfa_register(r, uleb(&b));
			r->offset = (int64_t)((uint64_t)sleb(&b) * align);
			break;
		case 0x13: r->offset = (int64_t)((uint64_t)sleb(&b) * align); break;
		case 0x14: case 0x15: // val_offset: the register's value, not where it lies
			register_of(r, uleb(&b), &other)->how = WHERE_ELSE;
			uleb(&b);
			break;
		case 0x16: // val_expression
			register_of(r, uleb(&b), &other)->how = WHERE_ELSE;
			block(&b);
			break;
		case 0x2d: break; // the return address is signed from here on, or no longer: bits that are taken off anyway
		case 0x2e: uleb(&b); break; // GNU_args_size
		case 0x2f: // GNU_negative_offset_extended
			w = register_of(r, uleb(&b), &other);
			*w = (struct where){WHERE_AT_CFA, (int64_t)-(uleb(&b) * align)};
			break;
		default: return 0;
		}
		if (at > pc)
			return 1;
	}
	return !b.bad;
}

// function is what the tables have of the function that pc is in: its CIE, and its instructions.
static int function(const struct object *o, uintptr_t pc, struct common *c, struct bytes *instructions, uint64_t *from) {
	uintptr_t at = search(o, pc);
	struct bytes b = entry(o, at);
	uintptr_t pointer = (uintptr_t)b.p;
	uint64_t back = number(&b, 4);
	if (at == 0 || b.bad || back == 0 || back > pointer || !common_of(o, pointer - back, c))
		return 0;
	*from = encoded(&b, c->encoding);
	uint64_t size = encoded(&b, c->encoding & 0x0f);
	if (c->augmented)
		block(&b);
	*instructions = b;
	return !b.bad && pc - *from < size;
}

// worked_out is what the tables say of an address that a function returns to: of the instruction before it, which calls.
static uint64_t worked_out(const struct object *o, uintptr_t pc) {
	struct common c;
	struct bytes b;
	uint64_t from;
	if (!function(o, pc - 1, &c, &b, &from)) // nothing has called what is begun at
		return function(o, pc, &c, &b, &from) && from == pc ? OUTERMOST : UNKNOWN;
	if (c.signal)
		return UNKNOWN;
	struct row first = {UNKNOWN, 0, {WHERE_SAME, 0}, {WHERE_ELSE, 0}};
	if (!run(c.instructions, &c, 0, UINTPTR_MAX, &first, &first))
		return UNKNOWN;
	struct row r = first;
	if (!run(b, &c, from, pc - 1, &first, &r))
		return UNKNOWN;
	if (r.ra.how == WHERE_UNDEFINED)
		return OUTERMOST;
	if (r.ra.how != WHERE_AT_CFA || r.cfa == UNKNOWN || r.fp.how == WHERE_UNDEFINED || r.fp.how == WHERE_ELSE)
		return UNKNOWN;
	struct rule rule = {r.cfa, r.fp.how == WHERE_AT_CFA ? FP_AT_CFA : r.fp.how == WHERE_AT_FP ? FP_AT_FP : FP_SAME, r.offset, r.ra.offset,
	                    r.fp.how == WHERE_SAME ? 0 : r.fp.offset};
	return packed(&rule);
}

// How far up a stack goes. The words of frames are read as they are, or, while a rule is tried, by the kernel; so what tables
// that are wrong make of a pointer must not lead out of the stack. A thread's own memory, which the thread pointer points
// to, lies at the end of the stack that a C library gives it; behind the first thread's stack are the program's strings.
enum { EXTENT = 1 << 20, FRAME = 1 << 17 }; // of what is looked at, and of a frame at most; beyond them something is wrong

static uintptr_t strings; // above the first thread's stack; 0 where that is not known

HIDDEN void has_strings(uintptr_t at) { strings = at; }

static uintptr_t thread_pointer(void) {
	uintptr_t p;
#if defined(__x86_64__)
	__asm__ volatile("movq %%fs:0, %0" : "=r"(p)); // which points to itself
#else
	__asm__ volatile("mrs %0, tpidr_el0" : "=r"(p));
#endif
	return p;
}

static uintptr_t end_of_stack(uintptr_t start) {
	uintptr_t end = start + EXTENT, thread = thread_pointer();
	if (thread > start && thread < end)
		end = thread;
	return strings > start && strings < end ? strings : end;
}

static inline uint64_t word(uintptr_t at) { return *(const uint64_t *)at; }

static int cfa_is_good(uintptr_t cfa, const struct place *p) {
	return cfa > p->sp && cfa <= p->end && cfa - p->sp <= FRAME && (cfa & 7) == 0;
}

// learned works the rule of p's address out and tries it.
static uint64_t learned(uint32_t pid, const struct place *p) {
	struct object o;
	if (!object_of(p->pc - 1, &o))
		return UNKNOWN;
	uint64_t w = worked_out(&o, p->pc), got = 0;
	struct rule r = unpacked(w);
	if (r.cfa >= BY_SP) {
		uintptr_t cfa = (r.cfa == BY_SP ? p->sp : p->fp) + (uintptr_t)r.cfa_offset;
		if (r.cfa == BEHIND_FP && (!read_word(pid, cfa, &got) || (cfa = got, 0)))
			return UNKNOWN;
		if (!cfa_is_good(cfa, p) || !read_word(pid, cfa + (uintptr_t)r.ra_offset, &got))
			return UNKNOWN;
		uint64_t fp;
		if (r.fp != FP_SAME && !read_word(pid, (r.fp == FP_AT_CFA ? cfa : p->fp) + (uintptr_t)r.fp_offset, &fp))
			return UNKNOWN;
		got &= ADDRESS_MASK;
		if (got != 0 && !is_return(pid, got) && (!object_of(got - 1, &o) || worked_out(&o, got) != OUTERMOST))
			return UNKNOWN; // not kept: it may be code that nothing is known of
	}
	keep(p->pc, w);
	return w;
}

// Two calls of a thread mostly have the outer part of their stacks in common. What a walk has read where is kept, so that the
// next one of the thread, once it comes to a place where that one was, only has to see that the same is still there: the
// way on follows from nothing else. It takes the same words from the same places as a walk by rules does, but need not wait
// for one of them to know where the next is, nor look at the rules, which are far from one another.
enum { FRESH = 48, STEPS = 64, WALKS = 64 };

struct step { // to the next one out
	uint64_t pc;
	uintptr_t sp, fp;
	int32_t ra_at, fp_at; // what was read, from sp on; -1: the frame pointer stays, or the way is not so simple
};

// The last walk of a thread: the outermost step has the lowest number, so that what two walks have in common stays where it
// is; at the bottom is where it ended. All of it is only believed once it is seen to be there. The thread pointer says
// whose it is, the process number which process works on it, as a fork may leave that behind. Where another walk works on it,
// as in the handler of a signal, walks are by rules.
static struct last {
	uint64_t thread;
	uint32_t taken, top, bottom, forgotten;
	struct step at[STEPS]; // by the last bits of their numbers
} lasts[WALKS];

// A walk under way: what it has in common with the last one, and its own steps, the innermost first.
struct walk {
	struct last *last; // NULL: by rules alone
	uint32_t k;        // the last one's step that is looked at next
	uint32_t from;     // the last one's steps from here on are in common, down to k at least
	uint32_t fresh;
	int in_common, outermost; // the walk has come to where the last one was; to where the tables say that there is no more
	struct step at[FRESH];
};

static inline struct step *step(struct last *l, uint32_t k) { return &l->at[k % STEPS]; }

static inline void note(struct walk *w, const struct step *s) {
	for (; w->in_common && w->from != w->k; w->from--) // and the rest of the last one is not
		if (w->fresh < FRESH)
			w->at[w->fresh++] = *step(w->last, w->from);
	w->in_common = 0;
	if (w->fresh < FRESH)
		w->at[w->fresh++] = *s;
}

// joins looks whether the last walk was at p.
static inline int joins(struct walk *w, const struct place *p) {
	struct last *l = w->last;
	while (w->k != l->bottom && step(l, w->k)->sp < p->sp)
		w->k--;
	const struct step *s = step(l, w->k);
	return w->k != l->bottom && s->sp == p->sp && s->pc == p->pc && s->fp == p->fp;
}

// repeated goes on from p as the last walk went on from there, as far as what that read is there, and returns how many frames.
static inline int repeated(struct walk *w, struct place *p, uint64_t *frames, int cap) {
	struct last *l = w->last;
	int n = 0, same = 1;
	w->in_common = 1;
	w->from = w->k;
	while (same && n < cap && w->k != l->bottom) {
		const struct step *s = step(l, w->k), *to = step(l, w->k - 1);
		uint64_t far = to->sp - p->sp; // both words lie in the stack
		if (s->ra_at < 0 || to->sp > p->end || far > FRAME || (uint64_t)s->ra_at >= far || s->fp_at >= (int64_t)far)
			break;
		p->pc = word(p->sp + (uintptr_t)s->ra_at) & ADDRESS_MASK;
		if (s->fp_at >= 0)
			p->fp = word(p->sp + (uintptr_t)s->fp_at);
		p->sp = to->sp;
		same = p->pc == to->pc && p->fp == to->fp;
		w->k--;
		if (p->pc == 0)
			break;
		frames[n++] = p->pc;
	}
	return n;
}

// go is the walk from p on, which moves.
static int go(struct walk *w, uint32_t pid, struct place *p, uint64_t *frames, int cap) {
	int n = 0;
	p->end = end_of_stack(p->sp);
	while (n < cap) {
		if (w->last != NULL && joins(w, p)) {
			n += repeated(w, p, frames + n, cap - n);
			if (p->pc == 0 || n == cap)
				return n;
		}
		uint64_t rule = kept(p->pc);
		struct rule r = unpacked(rule != NONE ? rule : learned(pid, p));
		if (r.cfa < BY_SP) {
			w->outermost = r.cfa == OUTERMOST;
			return n;
		}
		struct step s = {p->pc, p->sp, p->fp, -1, -1};
		uintptr_t cfa = (r.cfa == BY_SP ? p->sp : p->fp) + (uintptr_t)r.cfa_offset;
		if (r.cfa == BEHIND_FP) {
			if (cfa < p->sp || cfa >= p->end || (cfa & 7) != 0)
				return n;
			cfa = word(cfa);
		}
		if (!cfa_is_good(cfa, p))
			return n;
		if (r.cfa != BEHIND_FP && r.ra_offset < 0)
			s.ra_at = (int32_t)((int64_t)(cfa - p->sp) + r.ra_offset);
		uint64_t ra = word(cfa + (uintptr_t)r.ra_offset) & ADDRESS_MASK;
		if (r.fp != FP_SAME) {
			uintptr_t at = (r.fp == FP_AT_CFA ? cfa : p->fp) + (uintptr_t)r.fp_offset;
			if (at < p->sp || at >= cfa || (at & 7) != 0)
				return n;
			s.fp_at = (int32_t)(at - p->sp);
			p->fp = word(at);
		}
		note(w, &s);
		p->pc = ra;
		p->sp = cfa;
		if (ra == 0)
			return n;
		frames[n++] = ra;
	}
	return n;
}

HIDDEN int unwind(uint32_t pid, struct place *p, uint64_t *frames, int cap) {
	uint64_t thread = thread_pointer();
	struct last *l = &lasts[mixed(thread) >> 58];
	uint32_t taken = __atomic_load_n(&l->taken, __ATOMIC_RELAXED), now = __atomic_load_n(&forgotten, __ATOMIC_ACQUIRE);
	struct walk w;
	w.last = taken != pid && __atomic_compare_exchange_n(&l->taken, &taken, pid, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED) ? l : NULL;
	if (w.last != NULL && (l->thread != thread || l->forgotten != now || taken != 0)) { // 0: no walk was stopped in the middle
		l->thread = thread;
		l->forgotten = now;
		l->top = l->bottom = 0;
	}
	w.k = w.from = l->top;
	w.fresh = 0;
	w.in_common = w.outermost = 0;
	int n = go(&w, pid, p, frames, cap);
	if (w.last != NULL) {
		if (!w.in_common) {
			w.from = l->bottom = 0;
			*step(l, 0) = (struct step){p->pc, p->sp, p->fp, -1, -1};
		}
		l->top = w.from + w.fresh;
		for (uint32_t i = 0; i < w.fresh; i++)
			*step(l, l->top - i) = w.at[i];
		if (l->top - l->bottom >= STEPS)
			l->bottom = l->top - (STEPS - 1);
		__atomic_store_n(&l->taken, 0, __ATOMIC_RELEASE);
	}
	if (w.outermost || n == cap) // all there are, or as many as are wanted
		p->pc = 0;
	return n;
}

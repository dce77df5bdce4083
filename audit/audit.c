// The audit library: what the dynamic linker loads into a process because LD_AUDIT names it. It sees the CUDA driver
// being loaded and has its functions of memory lead to those in calls.c; events.c makes events of the calls and puts
// them into memory that `cistern trace` reads.
//
// How a function is replaced: the linker tells of every object once it is mapped and before anything is bound to it.
// When that object is libcuda.so.1, the addresses in its table of symbols are changed to ours. So whatever asks the
// linker for one of them, a PLT, a GOT, dlsym or dlvsym, finds ours, and nothing has to be looked at at every binding of
// every other object: a program that never loads the driver costs a call of la_objopen per library. The rest, and that
// is most, comes through the driver's own cuGetProcAddress, whose answers are replaced alike.
//
// In here there is no C library, no thread-local storage, no constructor, no memory of the program's heap, and nothing
// is printed: the library lives in a namespace of its own, where all of these would be second copies, or the program's
// business. Without the reader's memory nothing is replaced at all. The environment says where that memory is; it is read
// before the program begins, because some programs write over it.
//
// A wrapper calls the driver and then fills one slot of a ring (ring.h). If no slot is free, it counts the lost event and goes
// on. A stack's number follows from its content, and its frames are written once, before the call that has it (stacks.c).

#define _GNU_SOURCE
#include <elf.h>
#include <link.h>

#include "audit.h"
#include "sys.h"

void open_ring(void); // events.c
void read_name(void);
void module(uintptr_t base, uintptr_t from, uintptr_t to, const char *path, int python);
extern struct ring *ring;

HIDDEN struct helpers helpers;
HIDDEN int (*vdso_clock)(int, void *); // the program's C library's clock_gettime

static struct link_map *driver; // the libcuda whose functions are replaced

// What the dynamic section of an object says, as far as looking up a symbol needs it.
struct table {
	uintptr_t base;
	const char *strings;
	const Elf64_Sym *symbols;
	const uint32_t *gnu, *sysv;
};

static int table_of(const struct link_map *map, struct table *t) {
	*t = (struct table){.base = map->l_addr};
	for (const Elf64_Dyn *d = map->l_ld; d != NULL && d->d_tag != DT_NULL; d++) {
		// The linker has relocated these, unless the section is read-only.
		uintptr_t p = d->d_un.d_ptr;
		if (p < map->l_addr)
			p += map->l_addr;
		switch (d->d_tag) {
		case DT_STRTAB: t->strings = (const char *)p; break;
		case DT_SYMTAB: t->symbols = (const Elf64_Sym *)p; break;
		case DT_GNU_HASH: t->gnu = (const uint32_t *)p; break;
		case DT_HASH: t->sysv = (const uint32_t *)p; break;
		}
	}
	return t->strings != NULL && t->symbols != NULL && (t->gnu != NULL || t->sysv != NULL);
}

static int equal(const char *a, const char *b) {
	while (*a != 0 && *a == *b)
		a++, b++;
	return *a == *b;
}

static const Elf64_Sym *usable(const struct table *t, uint32_t i, const char *name) {
	const Elf64_Sym *s = &t->symbols[i];
	int type = ELF64_ST_TYPE(s->st_info);
	return s->st_value != 0 && s->st_shndx != SHN_UNDEF && (type == STT_FUNC || type == STT_OBJECT) && equal(t->strings + s->st_name, name) ? s : NULL;
}

static const Elf64_Sym *look_up(const struct table *t, const char *name) {
	if (t->gnu != NULL) {
		uint32_t h = 5381;
		for (const char *c = name; *c != 0; c++)
			h = h * 33 + (unsigned char)*c;
		uint32_t count = t->gnu[0], first = t->gnu[1];
		const uint32_t *buckets = t->gnu + 4 + 2 * (size_t)t->gnu[2], *chain = buckets + count;
		uint32_t i = count == 0 ? 0 : buckets[h % count];
		for (; i >= first && i != 0; i++) {
			const Elf64_Sym *s;
			if ((chain[i - first] | 1) == (h | 1) && (s = usable(t, i, name)) != NULL)
				return s;
			if (chain[i - first] & 1)
				break;
		}
		return NULL;
	}
	uint32_t h = 0;
	for (const char *c = name; *c != 0; c++) {
		h = (h << 4) + (unsigned char)*c;
		h = (h ^ (h >> 24 & 0xf0)) & 0x0fffffff;
	}
	for (uint32_t i = t->sysv[0] == 0 ? 0 : t->sysv[2 + h % t->sysv[0]]; i != 0; i = t->sysv[2 + t->sysv[0] + i]) {
		const Elf64_Sym *s = usable(t, i, name);
		if (s != NULL)
			return s;
	}
	return NULL;
}

static void *address(const struct table *t, const char *name) {
	const Elf64_Sym *s = look_up(t, name);
	return s == NULL ? NULL : (void *)(t->base + s->st_value);
}

// headers are the program headers of an object, which begins with them. One that was linked to other addresses than those
// from 0 on, as programs and prelinked libraries may be, does not begin at l_addr, where anything or
// nothing may be: it has none here.
HIDDEN const Elf64_Phdr *headers(const struct link_map *map, int *n) {
	Elf64_Ehdr head;
	if (map->l_addr == 0 || !read_self((const void *)map->l_addr, &head, sizeof head))
		return NULL;
	if (head.e_ident[0] != 0x7f || head.e_ident[1] != 'E' || head.e_phentsize != sizeof(Elf64_Phdr))
		return NULL;
	const Elf64_Phdr *h = (const Elf64_Phdr *)(map->l_addr + head.e_phoff);
	for (int i = 0; i < head.e_phnum; i++)
		if (h[i].p_type == PT_DYNAMIC && map->l_addr + h[i].p_vaddr == (uintptr_t)map->l_ld) {
			*n = head.e_phnum;
			return h;
		}
	return NULL; // another object's
}

// protection is that of the segment that holds p, as the file asks for it; 0 where that is not known.
static int protection(const struct link_map *map, uintptr_t p) {
	int n = 0;
	const Elf64_Phdr *h = headers(map, &n);
	for (int i = 0; h != NULL && i < n; i++) {
		uintptr_t from = map->l_addr + h[i].p_vaddr;
		if (h[i].p_type == PT_LOAD && p >= from && p < from + h[i].p_memsz)
			return (h[i].p_flags & PF_R ? 1 : 0) | (h[i].p_flags & PF_W ? 2 : 0) | (h[i].p_flags & PF_X ? 4 : 0);
	}
	return 0;
}

// replace changes the table of symbols. Pages that are executable stay so throughout: losing that and asking for it back
// is what some systems refuse, and that must not happen half-way.
static int replace(const struct link_map *map, const struct table *t) {
	uintptr_t low = (uintptr_t)-1, high = 0;
	for (int i = 0; i < entry_count; i++) {
		const Elf64_Sym *s = look_up(t, entries[i].name);
		if (s == NULL)
			continue;
		low = (uintptr_t)s < low ? (uintptr_t)s : low;
		high = (uintptr_t)(s + 1) > high ? (uintptr_t)(s + 1) : high;
		entries[i].real = (void *)(t->base + s->st_value);
	}
	if (high == 0)
		return 0;
	int prot = protection(map, low);
	if (prot == 0)
		return 0;
	uintptr_t page = 4096, from;
	do { // the kernel's pages may be larger than that, on aarch64
		from = low & ~(page - 1);
	} while (sys3(SYS_mprotect, from, high - from, prot | 2) != 0 && (page *= 4) <= 65536);
	if (page > 65536)
		return 0;
	low = from;
	for (int i = 0; i < entry_count; i++) {
		Elf64_Sym *s = (Elf64_Sym *)look_up(t, entries[i].name);
		if (s != NULL)
			s->st_value = (uintptr_t)entries[i].wrapper - t->base;
	}
	if (!(prot & 2))
		sys3(SYS_mprotect, low, high - low, prot);
	return 1;
}

// Python is in the first object that has its functions: a program, or a library.
static struct table python;
static const struct link_map *python_map;

static void *in_python(const char *name, void *object) { return address(object, name); }

static int is_python(const struct link_map *map) {
	struct table t;
	if (map == python_map)
		return 1;
	if (!(ring->flags & RING_PYTHON) || python_map != NULL || !table_of(map, &t) || address(&t, "PyGILState_GetThisThreadState") == NULL)
		return 0;
	python = t;
	python_map = map;
	python_loaded(in_python, &python);
	return 1;
}

// auxiliary is what the kernel told the program at its start: so many pairs of a key and a value.
static long auxiliary(uint64_t *pairs, size_t size) {
	long fd = sys3(SYS_openat, -100, "/proc/self/auxv", 02000000); // O_CLOEXEC
	if (fd < 0)
		return 0;
	long got = sys3(SYS_read, fd, pairs, size);
	sys1(SYS_close, fd);
	return got > 0 ? got / 16 : 0;
}

// program_headers are those of the program, where the kernel says that they are, as it says where its strings are.
static const Elf64_Phdr *program_headers(int *n) {
	uint64_t v[2 * 64];
	long got = auxiliary(v, sizeof v);
	const Elf64_Phdr *h = NULL;
	int count = 0;
	for (long i = 0; i < got; i++) {
		if (v[2 * i] == AT_PHDR)
			h = (const Elf64_Phdr *)v[2 * i + 1];
		else if (v[2 * i] == AT_PHNUM)
			count = (int)v[2 * i + 1];
		else if (v[2 * i] == AT_EXECFN)
			has_strings(v[2 * i + 1]);
		else if (v[2 * i] == AT_PHENT && v[2 * i + 1] != sizeof(Elf64_Phdr))
			return NULL;
	}
	*n = count;
	return h;
}

// tell puts an object into the ring, so that addresses in stacks get names: where its code is, and from where it counts.
static void tell(const struct link_map *map) {
	uintptr_t from = (uintptr_t)-1, to = 0, low = (uintptr_t)-1, high = 0;
	const void *tables = NULL;
	int n = 0;
	const Elf64_Phdr *h = headers(map, &n);
	if (map->l_prev == NULL) { // the program itself
		int own = 0;
		const Elf64_Phdr *its = program_headers(&own);
		if (h == NULL && map->l_addr == 0)
			h = its, n = own;
	}
	for (int i = 0; h != NULL && i < n; i++) {
		uintptr_t begin = map->l_addr + h[i].p_vaddr, end = begin + h[i].p_memsz;
		if (h[i].p_type == PT_GNU_EH_FRAME)
			tables = (const void *)begin;
		if (h[i].p_type != PT_LOAD)
			continue;
		if (h[i].p_flags & PF_R) {
			low = begin < low ? begin : low;
			high = begin + h[i].p_filesz > high ? begin + h[i].p_filesz : high;
		}
		if (!(h[i].p_flags & PF_X))
			continue;
		from = begin < from ? begin : from;
		to = end > to ? end : to;
	}
	if (h == NULL && map->l_addr == 0 && map->l_prev == NULL) // from where such programs are linked to by habit
		from = 0x400000, to = (uintptr_t)map->l_ld;
	if (to <= from)
		return;
	has_code(from, to);
	if (tables != NULL)
		has_tables(map, from, to, low, high, tables);
	module(map->l_addr, from, to, map->l_name == NULL ? "" : map->l_name, is_python(map));
}

static void modules(struct link_map *map) {
	while (map->l_prev != NULL)
		map = map->l_prev;
	for (; map != NULL; map = map->l_next)
		if (map->l_ld != NULL)
			tell(map);
}

static void found_driver(struct link_map *map) {
	struct table t;
	if (!table_of(map, &t))
		return;
	open_ring();
	if (ring == NULL)
		return;
	helpers.ctx_get_device = (int (*)(int *))address(&t, "cuCtxGetDevice");
	helpers.mem_get_info = (int (*)(size_t *, size_t *))address(&t, "cuMemGetInfo_v2");
	helpers.device_get_mem_pool = (int (*)(void **, int))address(&t, "cuDeviceGetMemPool");
	helpers.mem_pool_get_attribute = (int (*)(void *, int, void *))address(&t, "cuMemPoolGetAttribute");
	helpers.primary_ctx_get_state = (int (*)(int, unsigned *, int *))address(&t, "cuDevicePrimaryCtxGetState");
	helpers.ctx_get_current = (int (*)(void **))address(&t, "cuCtxGetCurrent");
	helpers.device_get_graph_mem_attribute = (int (*)(int, int, void *))address(&t, "cuDeviceGetGraphMemAttribute");
	helpers.stream_is_capturing = (int (*)(void *, int *))address(&t, "cuStreamIsCapturing");
	helpers.device_get_uuid = (int (*)(unsigned char *, int))address(&t, "cuDeviceGetUuid_v2");
	if (helpers.device_get_uuid == NULL) // before CUDA 11.4
		helpers.device_get_uuid = (int (*)(unsigned char *, int))address(&t, "cuDeviceGetUuid");
	helpers.device_get_name = (int (*)(char *, int, int))address(&t, "cuDeviceGetName");
	helpers.device_total_mem = (int (*)(size_t *, int))address(&t, "cuDeviceTotalMem_v2");
	modules(map);
	if (replace(map, &t))
		driver = map;
	else
		say(RECORD_UNKNOWN, "libcuda.so.1: its table of symbols cannot be changed");
}

// is reports whether path names a file that begins so.
static int is(const char *path, const char *begin) {
	const char *name = path;
	for (const char *c = path; *c != 0; c++)
		if (*c == '/')
			name = c + 1;
	while (*begin != 0 && *name == *begin)
		name++, begin++;
	return *begin == 0;
}

// with_rights reports whether the program has more rights than its user, who also named the ring: then nothing is
// traced. Where that cannot be known, neither.
static int with_rights(void) {
	uint64_t v[2 * 64];
	long got = auxiliary(v, sizeof v);
	for (long i = 0; i < got; i++)
		if (v[2 * i] == AT_SECURE)
			return v[2 * i + 1] != 0;
	return 1;
}

unsigned la_version(unsigned version) {
	if (with_rights())
		return 0; // and the dynamic linker goes on without this library
	return version < LAV_CURRENT ? version : LAV_CURRENT;
}

unsigned la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie) {
	*cookie = (uintptr_t)map;
	if (map->l_name == NULL)
		return 0;
	if (namespace == LM_ID_BASE)
		reserve_thread_storage(map);
	if (namespace == LM_ID_BASE && vdso_clock == NULL && is(map->l_name, "libc.so.6")) {
		struct table t;
		if (table_of(map, &t))
			vdso_clock = (int (*)(int, void *))address(&t, "clock_gettime");
	} else if (driver == NULL && is(map->l_name, "libcuda.so")) {
		found_driver(map);
	} else if (ring != NULL) {
		struct table t;
		if (is(map->l_name, "libcuda.so") && table_of(map, &t) && address(&t, "cuMemAlloc_v2") != NULL)
			say(RECORD_UNKNOWN, "all of a second libcuda.so.1 in one process"); // its calls would lead to the first one
		forget_code(); // what was seen of these addresses while nothing was there
		tell(map);
	}
	return 0; // nothing needs to be looked at when it is bound
}

void la_preinit(uintptr_t *cookie) {
	(void)cookie;
	has_started();
	read_name();
}

unsigned la_objclose(uintptr_t *cookie) {
	if (driver != NULL && *cookie == (uintptr_t)driver)
		driver = NULL;
	if (ring != NULL) {
		forget_code();
		forget_tables((const void *)*cookie);
	}
	if (python_map != NULL && *cookie == (uintptr_t)python_map) {
		python_map = NULL;
		python_loaded(NULL, NULL);
	}
	return 0;
}

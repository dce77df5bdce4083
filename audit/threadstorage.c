// Space for what libraries keep for each thread. The C library's dynamic linker sets up a thread's memory before it knows
// which libraries a program is linked to, once it audits; what these keep then comes out of a reserve of 2 KiB, which is
// for libraries that are loaded later. rustc's library keeps 23 KiB: it does not start under any audit library. The
// reserve can be made larger, by the environment and before a program starts. So a program whose libraries want more than
// auditing adds to the reserve is started again, before anything of it has run, with a reserve that has what they want.

#include <elf.h>
#include <link.h>

#include "audit.h"
#include "sys.h"

// What auditing adds to the reserve, at least; the size of the part that can be set, by default; what is put in beyond what
// libraries were seen to keep; what no reserve is larger than; and the most bytes of arguments or of an environment.
enum { ADDED = 320, DEFAULT = 512, MORE = 1024, LARGEST = 1 << 26, MOST = 8 << 20 };

static const char tunables[] = "GLIBC_TUNABLES", reserve[] = "glibc.rtld.optional_static_tls=";

static int started;
static uint64_t fixed;         // bytes of libraries that must be in the reserve
static uint64_t spare = ADDED; // how many fit there

HIDDEN void has_started(void) { started = 1; }

static char *memory(size_t n) {
	long p = sys6(SYS_mmap, 0, (long)n, 3, 0x4022, -1, 0); // private, anonymous, only what is used is there
	return p > 0 || p < -4095 ? (char *)p : NULL;
}

// contents reads a file that is a list of strings, and returns its length with the last one's end, 0 where it cannot.
static size_t contents(const char *path, char *to, size_t cap) {
	long fd = sys3(SYS_openat, -100, path, 02000000), got = 0; // O_CLOEXEC
	size_t n = 0;
	if (fd < 0)
		return 0;
	while (n < cap && (got = sys3(SYS_read, fd, to + n, cap - n)) > 0)
		n += (size_t)got;
	sys1(SYS_close, fd);
	return got == 0 && n > 0 && to[n - 1] == 0 ? n : 0;
}

static size_t strings(char *text, size_t n, char **list) {
	size_t count = 0;
	for (size_t at = 0; at < n; at += length(text + at) + 1)
		list[count++] = text + at;
	list[count] = NULL;
	return count;
}

static int begins(const char *s, const char *with) {
	while (*with != 0 && *s == *with)
		s++, with++;
	return *with == 0;
}

static uint64_t number(const char *s) {
	uint64_t n = 0;
	for (; *s >= '0' && *s <= '9' && n < 1u << 30; s++)
		n = n * 10 + (uint64_t)(*s - '0');
	return n;
}

// again starts the program with its arguments and its environment, and a larger reserve, unless it has one. Where that
// cannot be, the linker goes on, and says what it lacks.
static void again(void) {
	spare = UINT64_MAX; // where this fails it does so once
	char exe[4096];
	long n = sys6(SYS_readlinkat, -100, (long)"/proc/self/exe", (long)exe, sizeof exe - 1, 0, 0);
	char *text = memory(2 * MOST);
	char **lists = (char **)memory(2 * (MOST + 2) * sizeof(char *));
	if (n <= 0 || text == NULL || lists == NULL)
		return;
	exe[n] = 0;
	char *environment = text + MOST, **variables = lists + MOST + 2, *others = NULL;
	size_t arguments = contents("/proc/self/cmdline", text, MOST), env = contents("/proc/self/environ", environment, MOST - 8192);
	if (arguments == 0 || env == 0)
		return;
	strings(text, arguments, lists);
	size_t count = strings(environment, env, variables), mine = count;
	// The largest that is named anywhere: what is started again has a larger one, so that this ends, whatever becomes of it.
	uint64_t size = 0;
	for (size_t i = 0; i + sizeof reserve <= env; i++)
		if (begins(environment + i, reserve) && number(environment + i + sizeof reserve - 1) > size)
			size = number(environment + i + sizeof reserve - 1);
	size = size > DEFAULT ? size : DEFAULT;
	for (size_t i = 0; i < count; i++) {
		if (!begins(variables[i], tunables) || variables[i][sizeof tunables - 1] != '=')
			continue;
		mine = i;
		others = variables[i] + sizeof tunables;
		// The linker ends each of the settings by a zero where it reads them.
		size_t rest = i + 1;
		for (; rest < count && begins(variables[rest], "glibc."); rest++)
			variables[rest][-1] = ':';
		for (size_t k = i + 1; rest <= count; k++) // the list's end as well
			variables[k] = variables[rest++];
		break;
	}
	if (fixed <= ADDED + size - DEFAULT) {
		spare = ADDED + size - DEFAULT; // what comes later may still be too much
		return;
	}
	if (size > LARGEST || (others != NULL && length(others) > 4096))
		return;
	size += fixed + MORE;
	char *value = environment + env, *to = value;
	for (const char *c = tunables; *c != 0;)
		*to++ = *c++;
	*to++ = '=';
	for (const char *c = others; c != NULL && *c != 0;)
		*to++ = *c++;
	if (others != NULL && *others != 0)
		*to++ = ':';
	for (const char *c = reserve; *c != 0;)
		*to++ = *c++;
	uint64_t unit = 1;
	while (size / unit >= 10)
		unit *= 10;
	for (; unit > 0; unit /= 10)
		*to++ = (char)('0' + size / unit % 10);
	*to = 0;
	variables[mine] = value;
	if (others == NULL)
		variables[mine + 1] = NULL;
	sys3(SYS_execve, exe, lists, variables);
	sys3(SYS_execve, "/proc/self/exe", lists, variables); // its file is gone, or elsewhere by now
}

HIDDEN void reserve_thread_storage(const struct link_map *map) {
	if (started || map->l_prev == NULL)
		return; // the program's own has its place with the first thread
	int n = 0, is_fixed = 0;
	for (const Elf64_Dyn *d = map->l_ld; d != NULL && d->d_tag != DT_NULL; d++)
		if (d->d_tag == DT_FLAGS && d->d_un.d_val & DF_STATIC_TLS)
			is_fixed = 1;
	const Elf64_Phdr *h = is_fixed ? headers(map, &n) : NULL;
	for (int i = 0; h != NULL && i < n; i++)
		if (h[i].p_type == PT_TLS)
			fixed += h[i].p_memsz + h[i].p_align;
	if (fixed > spare)
		again();
}

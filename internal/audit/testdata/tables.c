// Reads the unwinding tables of a library with unwind.c, which is compiled into this program.
//
//	tables LIBRARY        what they say of addresses in its functions: a line for each, counted from the library's beginning
//	tables LIBRARY N      of N copies of the tables with some bytes changed, in memory of their own size: nothing is read
//	                      beyond them, which the compiler's sanitizer sees, and nothing goes on for ever

#define _GNU_SOURCE
#include "../../../audit/unwind.c"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int read_word(uint32_t pid, uintptr_t at, uint64_t *to) { return 0; }
int is_return(uint32_t pid, uint64_t p) { return 0; }

static struct object found;
static uintptr_t base;
static const char *wanted;

static int look(struct dl_phdr_info *info, size_t size, void *arg) {
	if (strcmp(info->dlpi_name, wanted) != 0)
		return 0;
	base = info->dlpi_addr;
	found.low = (uintptr_t)-1;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *h = &info->dlpi_phdr[i];
		uintptr_t begin = base + h->p_vaddr, end = begin + h->p_filesz;
		if (h->p_type == PT_GNU_EH_FRAME)
			found.head = (const unsigned char *)begin;
		if (h->p_type != PT_LOAD)
			continue;
		if (h->p_flags & PF_X)
			found.from = begin, found.to = end;
		found.low = begin < found.low ? begin : found.low;
		found.high = end > found.high ? end : found.high;
	}
	return 1;
}

static const char *names[] = {"none", "unknown", "outermost", "sp", "fp", "*fp"}, *saved[] = {"u", "c", "fp"};

static void print(uintptr_t pc) {
	struct rule r = unpacked(worked_out(&found, pc + 1));
	printf("%lx %s", (unsigned long)(pc - base), names[r.cfa]);
	if (r.cfa >= BY_SP)
		printf("%+ld %s%+ld %+ld", (long)r.cfa_offset, saved[r.fp], (long)r.fp_offset, (long)r.ra_offset);
	printf("\n");
}

static uint64_t state = 1;

static uint64_t random_number(uint64_t below) {
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return below == 0 ? 0 : state % below;
}

int main(int argc, char **argv) {
	struct link_map *lib = argc < 2 ? NULL : dlopen(argv[1], RTLD_LAZY);
	if (lib == NULL) {
		fprintf(stderr, "%s\n", argc < 2 ? "expected a library" : dlerror());
		return 2;
	}
	wanted = lib->l_name;
	if (!dl_iterate_phdr(look, NULL) || found.head == NULL)
		return 2;
	const int32_t *table = (const int32_t *)(found.head + 12);
	uint32_t count = *(const uint32_t *)(found.head + 8);
	if (argc < 3) {
		for (uint32_t i = 0; i + 1 < count; i++) {
			uintptr_t from = (uintptr_t)found.head + (uintptr_t)(intptr_t)table[2 * i], to = (uintptr_t)found.head + (uintptr_t)(intptr_t)table[2 * i + 2];
			print(from);
			for (int k = 1; k < 6 && to > from; k++)
				print(from + (to - from) * (unsigned)k / 6);
		}
		return 0;
	}
	// The tables and what they point to of .eh_frame, which lies behind them, in a copy. Addresses of code are as far from it
	// as before.
	size_t size = 1 << 16;
	if (found.high - (uintptr_t)found.head < size)
		size = found.high - (uintptr_t)found.head;
	uint64_t known = 0;
	for (long n = atol(argv[2]); n > 0; n--) {
		size_t some = size - random_number(n % 2 ? 1 : size - 64);
		unsigned char *copy = malloc(some);
		memcpy(copy, found.head, some);
		*(uint32_t *)(copy + 8) = count < some / 32 ? count : (uint32_t)(some / 32); // pairs that are in it
		struct object o = {NULL, 0, UINTPTR_MAX, (uintptr_t)copy, (uintptr_t)copy + some, copy};
		for (int k = (int)random_number(64); k > 0; k--)
			copy[n % 3 ? random_number(some) : random_number(some < 4096 ? some : 4096)] = (unsigned char)random_number(256);
		for (int k = 0; k < 8; k++) {
			uint32_t pairs = (uint32_t)(some / 32);
			uintptr_t pc = (uintptr_t)copy + (uintptr_t)(intptr_t)table[2 * random_number(count < pairs ? count : pairs)] + random_number(64);
			known += worked_out(&o, pc + 1) > UNKNOWN;
		}
		free(copy);
	}
	printf("%lu\n", (unsigned long)known);
	return 0;
}

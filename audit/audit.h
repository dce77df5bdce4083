// What the files of the audit library share.

#ifndef CISTERN_AUDIT_H
#define CISTERN_AUDIT_H

#include <elf.h>
#include <stddef.h>
#include <stdint.h>

#include "ring.h"

// The calls that are recorded, by the driver's names without version. recording.CallKind numbers them alike.
enum call {
	CALL_NONE,
	MEM_ALLOC, MEM_ALLOC_PITCH, MEM_ALLOC_MANAGED, MEM_ALLOC_HOST, MEM_HOST_ALLOC, MEM_HOST_REGISTER, MEM_HOST_UNREGISTER, MEM_FREE, MEM_FREE_HOST,
	MEM_ALLOC_ASYNC, MEM_ALLOC_FROM_POOL_ASYNC, MEM_FREE_ASYNC, MEM_POOL_CREATE, MEM_POOL_DESTROY, MEM_POOL_TRIM_TO, MEM_POOL_IMPORT_POINTER,
	MEM_ADDRESS_RESERVE, MEM_ADDRESS_FREE, MEM_CREATE, MEM_RELEASE, MEM_MAP, MEM_UNMAP, MEM_SET_ACCESS, MEM_RETAIN_ALLOCATION_HANDLE,
	MEM_EXPORT_TO_SHAREABLE_HANDLE, MEM_IMPORT_FROM_SHAREABLE_HANDLE, IPC_GET_MEM_HANDLE, IPC_OPEN_MEM_HANDLE, IPC_CLOSE_MEM_HANDLE,
	ARRAY_CREATE, ARRAY_3D_CREATE, ARRAY_DESTROY, MIPMAPPED_ARRAY_CREATE, MIPMAPPED_ARRAY_DESTROY,
	IMPORT_EXTERNAL_MEMORY, DESTROY_EXTERNAL_MEMORY, DEVICE_PRIMARY_CTX_RESET, DEVICE_PRIMARY_CTX_RELEASE, CTX_DESTROY,
	GRAPH_ADD_MEM_ALLOC_NODE, GRAPH_LAUNCH, GRAPH_UPLOAD, DEVICE_GRAPH_MEM_TRIM, MEM_MAP_ARRAY_ASYNC,
};

enum { MOST_DEVICES = 64 }; // of a process

// A function of the driver that is seen: by the name of its symbol, what is called instead, and where the driver's is.
struct entry {
	const char *name;
	void *wrapper;
	void *real;
};

extern struct entry entries[];
extern const int entry_count;

// Functions of the driver that are used and not seen; any may be missing.
struct helpers {
	int (*ctx_get_device)(int *device);
	int (*mem_get_info)(size_t *free, size_t *total);
	int (*device_get_mem_pool)(void **pool, int device);
	int (*mem_pool_get_attribute)(void *pool, int attribute, void *value);
	int (*primary_ctx_get_state)(int device, unsigned *flags, int *active);
	int (*ctx_get_current)(void **context);
	int (*device_get_graph_mem_attribute)(int device, int attribute, void *value);
	int (*stream_is_capturing)(void *stream, int *status);
	int (*device_get_uuid)(unsigned char *uuid, int device); // of a part of a divided GPU the part's
	int (*device_get_name)(char *name, int size, int device);
	int (*device_total_mem)(size_t *bytes, int device);
};

extern struct helpers helpers;

// An event on its way: begin before the driver is called, finish after.
struct event {
	uint64_t time, addr, size, stream, handle, pool, extra;
	int device, call;
	void *caller, *frame, *cfa; // of the wrapper: where it returns to, its frame, and its caller's stack pointer before the call
};

void begin(struct event *e, int call, void *caller, void *frame, void *cfa);
void finish(struct event *e, int result);
void say(int record, const char *text); // a record that is a text
int current_device(void);

// events.c
int put(struct slot *s);
void fill(struct slot *s, int type);
size_t length(const char *s);
void *memset(void *p, int c, size_t n);
void *memcpy(void *restrict to, const void *restrict from, size_t n);

// stacks.c
uint64_t stack(const struct event *e, uint32_t pid, uint32_t kinds);
void has_code(uintptr_t from, uintptr_t to);
void forget_code(void); // a module is gone

// unwind.c: the tables of an object, by whose this is: from where to where its code is, and all of it
void has_tables(const void *of, uintptr_t from, uintptr_t to, uintptr_t low, uintptr_t high, const void *head);
void forget_tables(const void *of);
void has_strings(uintptr_t at); // of the program, above the first thread's stack

// stacks.c
void python_loaded(void *(*lookup)(const char *name, void *object), void *object); // or is gone, where it is NULL

// audit.c: of <link.h>
struct link_map;
const Elf64_Phdr *headers(const struct link_map *map, int *n);

// threadstorage.c
void reserve_thread_storage(const struct link_map *map); // a library that the program is linked to
void has_started(void);                    // all of them are there

#define HIDDEN __attribute__((visibility("hidden")))

#endif

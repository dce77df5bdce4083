// What the files of the stand-in share.

#ifndef STANDIN_H
#define STANDIN_H

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef enum {
	SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201, PEER_UNSUPPORTED = 217, INVALID_PTX = 218, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, PEER_ENABLED = 704, REGISTERED = 712, NOT_REGISTERED = 713,
	 NOT_PERMITTED = 800,
	NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_IMPLICIT = 906,
	UNKNOWN = 999,
} CUresult;

struct location { int type, id; };
struct prop {
	int type, handles;
	struct location location;
	void *win32;
	unsigned char compression, rdma;
	unsigned short usage;
	unsigned char reserved[4];
};
struct access { struct location location; int flags; };

#define GRANULARITY ((size_t)2 << 20)
#define CAPACITY ((size_t)64 << 30)
#define MAX 8192
#define NODES 8 // of the host's memory

struct context { int device, retained; unsigned peers; };
struct chunk { int fd; size_t size; int references, handles, imported, node, device; }; // node: of the host, -1 on a device
struct mapping { char *p; size_t size; struct chunk *chunk; };
struct range { char *p; size_t size; int fd, device; }; // fd: of a large allocation, or what else it is to memory.c
struct ipc { char magic[8]; int pid, fd; uint64_t size; char rest[40]; };
struct node { struct node *after[4]; size_t n; }; // of a graph, or what a captured stream's next node will be
struct stream { struct context *context; int blocking; uint64_t id, capture; int invalidated; size_t allocated; struct node next; };
struct event { int recorded; uint64_t capture; struct node next; int shared; };
struct graph { uint64_t id; size_t allocated; int device, launched; }; // allocated: bytes of its nodes

extern struct range allocations[MAX];
extern pthread_mutex_t mu; // over all state but the thread-locals
extern int initialised;
extern uint64_t next_id;
extern size_t used;

struct context *current(void);
int device_count(void);
struct stream *resolve(struct stream *s);
CUresult implicit(struct stream *s, int invalidates);
void pools_after_wait(void);
uint64_t graph_address(size_t size); // for a node that allocates
CUresult graph_launched(struct graph *exec);
void graph_destroyed(struct graph *exec);
int other_free(char *p); // cuMemFree of what memory.c made: whether it was that
int device_of(char *p); // whose allocation or mapped chunk it is, -1 where it is none
struct range *find(struct range *table, char *p);
int add(struct range *table, char *p, size_t size);
int number(const char *name, int otherwise); // of an environment variable
int forced(const char *call);                // the code that STANDIN_FAIL gives a call, or 0
CUresult report(const char *call, CUresult r, const char *format, ...) __attribute__((format(printf, 3, 4)));

// A call begins with BEGIN, which may end it, and ends with RETURN, which writes its line. ENTER also wants a current
// context.
#define BEGIN(name) \
	static const char *const call = name; \
	CUresult r = SUCCESS; \
	int fail = forced(call); \
	if (fail != 0) \
		return report(call, fail, "forced"); \
	if (!initialised) \
		return report(call, NOT_INITIALIZED, "before cuInit"); \
	pthread_mutex_lock(&mu);
#define ENTER(name) \
	BEGIN(name) \
	if (current() == NULL) { \
		pthread_mutex_unlock(&mu); \
		return report(call, INVALID_CONTEXT, "no context"); \
	}
#define RETURN(...) \
	pthread_mutex_unlock(&mu); \
	return report(call, r, __VA_ARGS__);

#endif

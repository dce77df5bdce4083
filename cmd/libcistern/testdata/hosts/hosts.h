/* What the scenarios of hosts share: how long one lasts, checked memory, threads that allocate. */
#ifndef HOSTS_H
#define HOSTS_H

#include "../check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

/* How long a scenario goes on. */
extern double duration;

/* A worker allocates, fills, compares and frees until stop is set. Half of its blocks are host memory of a pool of its own,
 * whose contents the processor checks under every driver; of the others the addresses are checked. */
enum { WORKERS = 4 };
extern atomic_int stop;
extern atomic_long rounds; /* of all workers */
void *work(void *number);
void prepare(void); /* makes the workers' pools */

/* fill writes words that follow from one, and compare checks them. */
void fill(uint64_t *p, size_t bytes, uint64_t with);
void compare(const uint64_t *p, size_t bytes, uint64_t with);

/* turn makes one pass of a worker. */
void turn(uintptr_t number, unsigned *seed);

/* What needs more of a process than memory, one by one: each_op does all and counts those that fail (must: none may). No failure is
 * one of the library's own. */
int each_op(int must);
int one_op(const char *name);
void every_op(void (*f)(const char *name));

/* collected has collections of Go's run, of much garbage. */
void collected(void);

/* refuse_call has the kernel refuse a system call with an error, for the rest of the process. */
void refuse_call(int number, int error);

/* copy_library makes a copy of the library, whose name ends with XXXXXX. */
void copy_library(char *to);

/* again runs this program again, with a scenario and up to two arguments, and wants it to end well. */
void again(const char *scenario, const char *a, const char *b);
int status_of(const char *scenario, const char *a, const char *b);
extern char *argument[2]; /* those arguments, NULL where there are none */

/* The scenarios, each in the file of its subject. */
void descriptors(void), closeall(void), filesize(void), seccomp(void);
void threads(void), stacks(void), forks(void), execs(void), exits(void), setuids(void), elevated(void), copies(void);
void nproc(void), space(void), dlcloses(void);
void signals_plain(void), signals_collected(void), signals_changing(void), signals_onstack_deep(void),
     signals_onstack(void), signals_altstack(void), signals_deep(void), signals_profile(void);

#endif

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

/* turn makes one pass of a worker. */
void turn(uintptr_t number, unsigned *seed);

/* The scenarios, each in the file of its subject. */
void signals_plain(void), signals_collected(void), signals_changing(void), signals_onstack_deep(void),
     signals_onstack(void), signals_altstack(void), signals_deep(void), signals_profile(void);

#endif

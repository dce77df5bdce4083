// Command libcistern is the C library libcistern.so (go build -buildmode=c-shared): cistern.h over internal/engine. It has
// no logic that a Go program would want too. docs/host.md has its effects on the host process, with figures.
//
// # How it is made
//
// Every function of cistern.h is C (shim.c, shim_objects.c, shim_pools.c). It refuses in a child of fork, where Go would hang; the test is
// one word on a page that the kernel empties in children. It answers what needs no Go, and else calls a Go function core…
// that converts the arguments, calls the engine and converts the result. The version script libcistern.map hides everything
// but cistern_*. A thread's last failure and its tags are kept in C, behind one thread-local pointer (thread.c).
//
// magazine.c hands out and takes back blocks without Go; internal/magazine has the design.
//
// Handles and device addresses are numbers (uintptr_t) on the way in and out: to Go's collector a pointer that looks like
// one of its own is a bug.
//
// A stream is known by its context and id, which the driver is asked for at each request. A stream that is promised to last
// (cistern_stream_durable) and the legacy default stream are known by their handles.
//
// A panic in a core… function is a bug in Cistern. It becomes CISTERN_INTERNAL with words that say where. It may have left a
// lock or half of a change behind, so every later call fails with the same words.
//
// # Stacks of requests
//
// The stack of a request is taken in C, before any lock and before Go (stack.c). One word (stack_watch) says whether stacks
// are wanted. Frames are numbers, which get names when they are read. Python frames get their names when they are first seen
// (places.c). They are read without the interpreter's lock (pystack.c), because the calling thread may hold another lock
// that a holder of the interpreter's lock waits for. The library in audit compiles pystack.c as well, so it uses neither
// Python's headers nor a C library. A request that failed leaves a note with its thread; back in C, the thread has the
// report written with its stack.
//
// # What it does to its host
//
// Loading the library starts the Go runtime and nothing else. The first call opens the driver and starts threads (start).
// The environment is read through C's getenv, because Go's copy is as old as the library's loading.
//
// Garbage collection: the engine's metadata has no pointers, and requests met from cache make no garbage. So the collector
// runs only when the heap nears a limit that follows the live heap (limitHeap), or after calls that make garbage and are
// slow in any case (tidy).
//
// Descriptors: no function uses timers or files of Go's runtime. These open the runtime's poller, which ends the process
// where it gets no descriptor, or where the program closes the descriptors that it does not know. Files and waits are those
// of internal/nopoll, internal/deadline and internal/live; internal/share has a poller of its own for sockets; a lint test
// holds that. The runtime's scavenger would start a timer and is stopped (scavenger.go). Descriptors that stay open are
// known by device and inode, which are compared before each use (nopoll.Kept, internal/share, guard.c). Contents of paused
// memory in a file have checksums as well.
//
// Threads: the runtime ends the process where it cannot start a thread. The threads that it needs are started with the
// library and kept (threads.go): as many as there are processors, 16 at most, and 8 for calls that wait in the kernel.
// Whether the process may have them, and 1 GiB of addresses, is tested before the first call (ready.c). A library that is
// loaded while the process is at its limit still ends it. So may a collection that uses more than 16 processors, and more
// than 8 calls at a time that wait on threads of Go's own. A main thread that ends with pthread_exit leaves the process
// running, because Go's threads never end.
//
// Signals: all signals are blocked while Go starts, so that its threads have them blocked and the program's handlers run on
// the program's threads (signals.c). Go sends no signals to the program's threads (asyncpreemptoff, set at link time).
//
// Stacks of threads: a signal handler of the program may run on a thread that is within Go. A goroutine's stack has a few
// KiB below it, and the kernel puts a handler without SA_ONSTACK there. So before its first call into Go a thread is made
// ready (ready.c, ready.go): its goroutine gets 224 KiB of space (internal/stackspace), which stays (gcshrinkstackoff), and
// the thread gets an alternate stack of 256 KiB with a guard page unless it has one. Later calls cost one branch. To block
// signals around each call would cost 310 ns beside a call of 95 ns; to hand each call to another thread, 4 µs.
//
// Locks: except at the start, no lock of the library is held by a thread that waits for the dynamic linker's lock. Files do
// not grow beyond what the process may write.
package main

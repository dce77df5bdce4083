// A Go program to be traced: four threads allocate 3 MiB and 1 MiB each and free the first. The driver's functions are
// linked, or with -DLOOKED_UP found by dlsym in the library that STANDIN names.
package main

/*
#include <stdint.h>
#include <stdlib.h>

#ifdef LOOKED_UP
#include <dlfcn.h>
#define FIND(name, ...) ((int (*)(__VA_ARGS__))dlsym(dlopen(getenv("STANDIN"), RTLD_NOW), name))
static int init(unsigned flags) { return FIND("cuInit", unsigned)(flags); }
static int retain(void **context, int device) { return FIND("cuDevicePrimaryCtxRetain", void **, int)(context, device); }
static int push(void *context) { return FIND("cuCtxPushCurrent_v2", void *)(context); }
static int get(uint64_t *p, size_t size) { return FIND("cuMemAlloc_v2", uint64_t *, size_t)(p, size); }
static int give(uint64_t p) { return FIND("cuMemFree_v2", uint64_t)(p); }
#else
extern int init(unsigned flags) __asm__("cuInit");
extern int retain(void **context, int device) __asm__("cuDevicePrimaryCtxRetain");
extern int push(void *context) __asm__("cuCtxPushCurrent_v2");
extern int get(uint64_t *p, size_t size) __asm__("cuMemAlloc_v2");
extern int give(uint64_t p) __asm__("cuMemFree_v2");
#endif
#cgo linux LDFLAGS: -ldl
*/
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"unsafe"
)

func must(code C.int) {
	if code != 0 {
		panic(code)
	}
}

func work(context unsafe.Pointer) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var first, second C.uint64_t
	must(C.push(context))
	must(C.get(&first, 3<<20))
	must(C.get(&second, 1<<20))
	must(C.give(first))
}

func main() {
	var context unsafe.Pointer
	must(C.init(0))
	must(C.retain(&context, 0))
	var wg sync.WaitGroup
	var all sync.WaitGroup // so that each has a thread of its own
	all.Add(4)
	for range 4 {
		wg.Go(func() {
			runtime.LockOSThread()
			all.Done()
			all.Wait()
			work(context)
			runtime.GC()
		})
	}
	wg.Wait()
	fmt.Println("four threads")
	defer func() {
		recover()
		os.Exit(5)
	}()
	panic("unwinding")
}

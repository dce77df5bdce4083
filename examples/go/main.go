// Command squares is a Go program on Cistern: device memory on a stream of its own, a kernel that fills it, page-locked
// host memory from a pool with an upstream to read it back into, and what the engine says of all that.
//
//	go run .                                  on a machine with an NVIDIA GPU
//	CISTERN_CONF=driver:sim go run .          on any machine, where the host stands in for the kernel
package main

import (
	"fmt"
	"log"
	"os"
	"unsafe"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/resource"
)

// squares writes i*i to the i-th of n 64-bit words at p.
const squares = `
.version 7.0
.target sm_70
.address_size 64
.visible .entry squares(.param .u64 p, .param .u64 n)
{
	.reg .pred %end;
	.reg .b32 %block, %width, %thread;
	.reg .b64 %p, %n, %i, %at, %square;
	ld.param.u64 %p, [p];
	ld.param.u64 %n, [n];
	mov.u32 %block, %ctaid.x;
	mov.u32 %width, %ntid.x;
	mov.u32 %thread, %tid.x;
	cvt.u64.u32 %i, %thread;
	mad.wide.u32 %i, %block, %width, %i;
	setp.ge.u64 %end, %i, %n;
	@%end bra done;
	cvta.to.global.u64 %p, %p;
	shl.b64 %at, %i, 3;
	add.u64 %at, %p, %at;
	mul.lo.u64 %square, %i, %i;
	st.global.u64 [%at], %square;
done:
	ret;
}`

// kernels is what a driver of real GPUs does beside memory. A program with a CUDA library of its own launches with that.
type kernels interface {
	ModuleLoad(dev cuda.Device, ptx string) (module uintptr, err error)
	ModuleFunction(dev cuda.Device, module uintptr, name string) (function uintptr, err error)
	Launch(dev cuda.Device, function uintptr, grid, block int, s cuda.Stream, args ...uint64) error
}

func main() {
	const n, bytes = 1 << 20, 8 << 20
	opts, err := cistern.ParseOptions(os.Getenv("CISTERN_CONF"))
	check(err)
	drv, err := open.Open(opts.Driver)
	check(err)
	alloc, err := cistern.New(drv, opts)
	check(err)
	dev, err := alloc.Device(0)
	check(err)
	handle, err := drv.StreamCreate(0, false)
	check(err)
	stream, err := dev.Stream(handle)
	check(err)

	// A pool of page-locked host memory, of 64 MiB at most. Its blocks are cached and reused like the device's.
	pinned, err := dev.NewPoolWith(cistern.PoolID{0, 1}, cistern.PoolOptions{Upstream: resource.Pinned(drv, 0), Limit: 64 << 20})
	check(err)
	host, err := pinned.Alloc(bytes, stream)
	check(err)
	words := unsafe.Slice(*(**uint64)(unsafe.Pointer(&host)), n) // the host's own view: the address is the same

	p, err := dev.Alloc(bytes, stream) // usable at once by work queued on the stream
	check(err)
	if gpu, ok := drv.(kernels); ok {
		module, err := gpu.ModuleLoad(0, squares)
		check(err)
		kernel, err := gpu.ModuleFunction(0, module, "squares")
		check(err)
		check(gpu.Launch(0, kernel, n/256, 256, handle, uint64(p), n))
	} else {
		fmt.Println("kernels need a GPU: the host computes the squares")
		for i := range words {
			words[i] = uint64(i) * uint64(i)
		}
		check(drv.MemcpyAsync(0, p, host, bytes, handle))
		check(drv.StreamSynchronize(0, handle))
		clear(words)
	}
	check(drv.MemcpyAsync(0, host, p, bytes, handle))
	check(alloc.Free(p)) // in the stream's order: the copy still gets what the kernel wrote
	check(drv.StreamSynchronize(0, handle))
	for i, w := range words {
		if w != uint64(i)*uint64(i) {
			log.Fatalf("word %d is %d", i, w)
		}
	}
	fmt.Printf("%d squares on %s, read back and right\n", n, dev.Info().Name)

	before := dev.Stats().DeviceAllocs
	again, err := dev.Alloc(bytes, stream) // what was freed on the stream
	check(err)
	fmt.Printf("the freed memory is handed out again: %v; driver calls for memory: %d\n", again == p, dev.Stats().DeviceAllocs-before)
	s, ps := dev.Stats(), pinned.Stats()
	fmt.Printf("%d MiB are allocated, %d MiB of that from the pool, which holds %d MiB of the %d MiB that it may\n",
		s.Allocated.All.Current>>20, ps.Allocated>>20, ps.Reserved>>20, ps.Limit>>20)

	check(alloc.Free(again))
	check(alloc.Free(host))
	check(pinned.Release()) // it is not used again: its memory goes back to the host
	check(alloc.Trim())
	fmt.Printf("held after a trim: %d bytes\n", dev.Stats().Reserved.All.Current)
	check(alloc.Close())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

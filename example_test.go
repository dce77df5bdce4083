package cistern_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/resource"
)

// start makes an allocator with its first device and the device's default stream. The driver in the settings is a simulated
// GPU here. Without one it is that of NVIDIA.
func start(conf string) (*cistern.Allocator, cistern.Device, cistern.Stream) {
	opts, err := cistern.ParseOptions(conf)
	check(err)
	drv, err := open.Open(opts.Driver)
	check(err)
	a, err := cistern.New(drv, opts)
	check(err)
	dev, err := a.Device(0)
	check(err)
	st, err := dev.Stream(cuda.StreamNull)
	check(err)
	return a, dev, st
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Freed memory is reused on its stream at once, and extended where a larger request needs it.
func Example() {
	a, dev, stream := start("driver:sim:1GiB")

	p, err := dev.Alloc(64<<20, stream) // for work queued on the stream from now on
	check(err)
	check(a.Free(p)) // the GPU may still use it

	q, err := dev.Alloc(96<<20, stream) // the 64 MiB that are cached, and 32 MiB more
	check(err)
	s := dev.Stats()
	fmt.Printf("allocated %d MiB, reserved %d MiB\n", s.Allocated.All.Current>>20, s.Reserved.All.Current>>20)

	check(a.Free(q))
	check(a.Trim())
	fmt.Printf("reserved %d MiB after a trim\n", dev.Stats().Reserved.All.Current>>20)
	check(a.Close())
	// Output:
	// allocated 96 MiB, reserved 96 MiB
	// reserved 0 MiB after a trim
}

// The error of a request that fails says what was tried and what would help.
func Example_outOfMemory() {
	_, dev, stream := start("driver:sim:1GiB,limit:100MiB")
	_, err := dev.AllocTagged(96<<20, stream, 7)
	check(err)
	_, err = dev.Alloc(8<<20, stream)

	fmt.Println(errors.Is(err, cuda.ErrOutOfMemory))
	var oom *cistern.OutOfMemoryError
	if errors.As(err, &oom) {
		fmt.Printf("%d MiB are missing at a limit of %d MiB\n", oom.Need>>20, oom.Limit>>20)
		for _, use := range dev.TagUsage() {
			fmt.Printf("tag %d: %d MiB\n", use.Tag, use.Allocated>>20)
		}
	}
	// Output:
	// true
	// 8 MiB are missing at a limit of 100 MiB
	// tag 7: 96 MiB
}

// A pool caches the memory of any resource, here page-locked host memory.
func ExampleDevice_NewPoolWith() {
	a, dev, stream := start("driver:sim:1GiB")
	pinned, err := dev.NewPoolWith(cistern.PoolID{0, 1}, cistern.PoolOptions{Upstream: resource.Pinned(a.Driver(), 0), Limit: 64 << 20})
	check(err)

	p, err := pinned.Alloc(8<<20, stream)
	check(err)
	check(a.Free(p))
	again, err := pinned.Alloc(8<<20, stream)
	check(err)
	fmt.Println("the same memory again:", again == p)
	_, err = pinned.Alloc(128<<20, stream)
	fmt.Println("beyond the limit:", errors.Is(err, cuda.ErrOutOfMemory))

	check(a.Free(again))
	check(pinned.Release())
	// Output:
	// the same memory again: true
	// beyond the limit: true
}

// Memory that another stream uses is reused after that use.
func ExampleAllocator_RecordStream() {
	a, dev, stream := start("driver:sim:1GiB")
	handle, err := a.Driver().StreamCreate(0, true)
	check(err)
	other, err := dev.Stream(handle)
	check(err)

	p, err := dev.Alloc(64<<20, stream)
	check(err)
	// ... work on both streams uses p ...
	check(a.RecordStream(p, other))
	check(a.Free(p)) // no wait on the host
	// Output:
}

// Paused memory is available to others. Addresses and contents are there again after Resume.
func ExampleDevice_Pause() {
	_, dev, stream := start("driver:sim:1GiB")
	weights, err := dev.NewPool(cistern.PoolID{0, 1})
	check(err)
	_, err = weights.Alloc(512<<20, stream)
	check(err)

	r, err := dev.Pause(cistern.Selection{Pool: weights}, cistern.PauseOptions{Keep: cistern.KeepHost})
	check(err)
	fmt.Printf("paused %d MiB, reserved %d MiB\n", r.Bytes>>20, dev.Stats().Reserved.All.Current>>20)
	_, err = dev.Resume(cistern.Selection{Pool: weights})
	check(err)
	fmt.Printf("reserved %d MiB\n", dev.Stats().Reserved.All.Current>>20)
	// Output:
	// paused 512 MiB, reserved 0 MiB
	// reserved 512 MiB
}

// A cache outside the allocator is asked for memory before a request fails.
func ExampleDevice_OnOutOfMemory() {
	a, dev, stream := start("driver:sim:1GiB,limit:100MiB")
	cached, err := dev.Alloc(64<<20, stream)
	check(err)

	r := dev.OnOutOfMemory(func(need uint64) bool {
		if cached == 0 {
			return false
		}
		fmt.Println("the cache is given back")
		check(a.Free(cached))
		cached = 0
		return true
	})
	defer r.Remove()
	_, err = dev.Alloc(96<<20, stream)
	check(err)
	// Output: the cache is given back
}

// With stacks:native the allocator finds the functions that hold memory.
func ExampleDevice_StackUsage() {
	a, dev, stream := start("driver:sim:1GiB,stacks:native")
	loadWeights(dev, stream)

	for _, use := range dev.StackUsage() {
		fmt.Printf("%d MiB by %s\n", use.Allocated>>20, a.GoFrames(use.Stack)[0].Function)
	}
	// Output: 96 MiB by github.com/cistern-gpu/cistern_test.loadWeights
}

func loadWeights(dev cistern.Device, stream cistern.Stream) {
	for range 3 {
		_, err := dev.Alloc(32<<20, stream)
		check(err)
	}
}

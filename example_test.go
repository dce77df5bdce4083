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
func ExampleOutOfMemoryError() {
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

// With stacks:native the allocator finds the functions whose memory is allocated.
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

// A program keeps one allocator, for all its devices.
func ExampleAllocator() {
	drv, err := open.Open("sim:1GiBx2") // two simulated GPUs; "" is NVIDIA's driver
	check(err)
	a, err := cistern.New(drv, cistern.Options{Limit: 512 << 20})
	check(err)
	for d := range a.DeviceCount() {
		dev, err := a.Device(cuda.Device(d))
		check(err)
		fmt.Printf("device %d: at most %d MiB\n", dev.ID(), dev.Limit()>>20)
	}
	check(a.Close())
	// Output:
	// device 0: at most 512 MiB
	// device 1: at most 512 MiB
}

// Options have a text form, for settings that users write.
func ExampleOptions() {
	opts, err := cistern.ParseOptions("driver:sim:80GiB,limit:70GiB,spill:pinned")
	check(err)
	fmt.Println(opts.Limit>>30, opts.Spill == cistern.SpillPinned, opts.CrossStream)
	opts.Limit = 0
	fmt.Println(opts)

	_, err = cistern.ParseOptions("limits:70GiB")
	fmt.Println(err)
	// Output:
	// 70 true wait
	// driver:sim:80GiB,spill:pinned
	// unknown setting "limits": did you mean limit?
}

// A device answers how much memory is allocated and reserved, and by which tag.
func ExampleDevice() {
	const weights, cache = 1, 2
	_, dev, stream := start("driver:sim:1GiB")
	_, err := dev.AllocTagged(48<<20, stream, weights)
	check(err)
	_, err = dev.AllocWith(16<<20, stream, cistern.AllocOptions{Tag: cache})
	check(err)

	allocated, reserved := dev.Usage()
	fmt.Printf("allocated %d MiB, reserved %d MiB\n", allocated>>20, reserved>>20)
	for _, use := range dev.TagUsage() {
		fmt.Printf("tag %d: %d blocks, %d MiB\n", use.Tag, use.Blocks, use.Requested>>20)
	}
	// Output:
	// allocated 64 MiB, reserved 64 MiB
	// tag 1: 1 blocks, 48 MiB
	// tag 2: 1 blocks, 16 MiB
}

// A pool keeps the memory of one purpose apart, and bounds it.
func ExamplePool() {
	a, dev, stream := start("driver:sim:1GiB")
	cache, err := dev.NewPoolWith(cistern.PoolID{0, 1}, cistern.PoolOptions{Limit: 64 << 20})
	check(err)
	p, err := cache.Alloc(48<<20, stream)
	check(err)
	_, err = cache.Alloc(32<<20, stream)
	fmt.Println("beyond the limit:", errors.Is(err, cuda.ErrOutOfMemory))

	check(a.Free(p))
	check(cache.Trim())
	fmt.Printf("reserved %d MiB, at most %d MiB\n", cache.Stats().Reserved>>20, cache.Stats().PeakReserved>>20)
	check(cache.Release())
	// Output:
	// beyond the limit: true
	// reserved 0 MiB, at most 48 MiB
}

// Memory can be freed in the order of another stream than that of its request.
func ExampleStream() {
	a, dev, producer := start("driver:sim:1GiB,limit:64MiB")
	handle, err := a.Driver().StreamCreate(0, true)
	check(err)
	consumer, err := dev.Stream(handle)
	check(err)

	p, err := dev.Alloc(64<<20, producer)
	check(err)
	// ... work on consumer, behind an event of producer, is the last that uses p ...
	check(a.FreeOn(p, consumer))
	_, err = dev.Alloc(64<<20, consumer) // the same memory, without a wait on the host
	check(err)
	fmt.Printf("reserved %d MiB\n", dev.Stats().Reserved.All.Current>>20)
	// Output: reserved 64 MiB
}

// A process exports a block and sends its description and descriptors to another, which opens it.
func ExampleExport() {
	a, dev, stream := start("driver:sim:1GiB")
	p, err := dev.Alloc(8<<20, stream)
	check(err)
	export, err := a.Export(p)
	check(err)
	fmt.Printf("%d MiB in %d chunks\n", export.Shared().Size>>20, len(export.Shared().Chunks))

	check(a.Free(p))
	fmt.Println("after the free:", errors.Is(export.Live(), cistern.ErrNotExported))
	// Output:
	// 8 MiB in 4 chunks
	// after the free: true
}

// A program that registers memory with a network is notified of new memory and before memory is unmapped.
func ExampleDevice_OnMap() {
	a, dev, stream := start("driver:sim:1GiB")
	registered := uint64(0)
	dev.OnMap(func(_ cuda.Ptr, size uint64) { registered += size })
	dev.OnUnmap(func(_ cuda.Ptr, size uint64) { registered -= size })

	p, err := dev.Alloc(64<<20, stream)
	check(err)
	fmt.Printf("registered %d MiB\n", registered>>20)
	check(a.Free(p))
	check(dev.Trim())
	fmt.Printf("registered %d MiB\n", registered>>20)
	// Output:
	// registered 64 MiB
	// registered 0 MiB
}

// A snapshot lists physical memory and the blocks in it.
func ExampleDevice_Snapshot() {
	a, dev, stream := start("driver:sim:1GiB")
	p, err := dev.Alloc(4<<20, stream)
	check(err)
	_, err = dev.Alloc(12<<20, stream)
	check(err)
	check(a.Free(p))
	for _, segment := range dev.Snapshot() {
		for _, block := range segment.Blocks {
			fmt.Printf("%d MiB allocated: %t\n", block.Size>>20, block.State == cistern.BlockUsed)
		}
	}
	// Output:
	// 4 MiB allocated: false
	// 12 MiB allocated: true
}

// A registration ends the calls of its function.
func ExampleRegistration() {
	_, dev, stream := start("driver:sim:1GiB,limit:8MiB")
	calls := 0
	r := dev.OnOutOfMemory(func(uint64) bool { calls++; return false })
	_, err := dev.Alloc(16<<20, stream)
	fmt.Println(errors.Is(err, cuda.ErrOutOfMemory), calls)
	r.Remove()
	_, err = dev.Alloc(16<<20, stream)
	fmt.Println(errors.Is(err, cuda.ErrOutOfMemory), calls)
	// Output:
	// true 1
	// true 1
}

// Pause and Resume take memory by pool, by tag, or by both.
func ExampleSelection() {
	const weights, cache = 1, 2
	_, dev, stream := start("driver:sim:1GiB")
	for _, tag := range []uint32{weights, cache} {
		_, err := dev.AllocTagged(64<<20, stream, tag)
		check(err)
	}
	r, err := dev.Pause(cistern.Selection{Tag: cache}, cistern.PauseOptions{Keep: cistern.KeepNone})
	check(err)
	fmt.Printf("paused %d of %d MiB\n", r.Bytes>>20, dev.Stats().Allocated.All.Current>>20)
	// Output: paused 64 of 128 MiB
}

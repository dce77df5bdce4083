// Command gpuprobe measures on a real GPU what Cistern's engine and its simulated device rest on: how long the driver
// calls take, which of them wait for running kernels, which work without a context or beside a stream capture, how
// large address ranges may be, and whether bytes are right after a chunk was mapped at a second address behind a
// running kernel. It takes less than a minute and some gigabytes, and changes no setting of the GPU.
//
// A measurement is the time that one call of cuda/nvidia takes on the host, wrapper included. Those under load are
// made while a kernel is known to run for another 150 ms at least; a call that takes over 50 ms then has waited for it.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/internal/units"
)

func main() {
	library := flag.String("library", "", "driver `library` instead of the installed libcuda.so.1")
	device := flag.Int("device", 0, "`ordinal` of the GPU")
	csv := flag.String("csv", "", "also write the table to `FILE` as CSV")
	reps := flag.Int("reps", 20, "how often each call is measured")
	spin := flag.Duration("spin", 300*time.Millisecond, "how long the kernel runs behind which calls are measured")
	largest := flag.String("largest", "8GiB", "leave out chunks and allocations above this `size`")
	limit := flag.Duration("limit", 50*time.Second, "start no further measurement after this time")
	flag.Parse()
	if flag.NArg() != 0 || *reps < 1 || *spin < 200*time.Millisecond {
		fmt.Fprintln(os.Stderr, "gpuprobe: takes flags only; -reps is at least 1 and -spin at least 200ms")
		os.Exit(2)
	}
	bytes, err := units.ParseBytes(*largest)
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpuprobe: -largest:", err)
		os.Exit(2)
	}
	p := &probe{dev: cuda.Device(*device), reps: *reps, spin: *spin, largest: bytes, deadline: time.Now().Add(*limit)}
	if err := p.run(*library, *csv); err != nil {
		fmt.Fprintln(os.Stderr, "gpuprobe:", err)
		os.Exit(1)
	}
}

// probe is one run. Everything happens on one operating system thread, as in a program that calls CUDA.
type probe struct {
	*gpu.GPU
	dev      cuda.Device
	reps     int
	spin     time.Duration
	deadline time.Time
	info     cuda.DeviceInfo
	prop     cuda.MemProp
	work     cuda.Stream // non-blocking, idle: the stream that calls are about
	loads    []*load
	table    table
	largest  uint64 // bytes; no chunk or allocation is larger
	untested bool   // a content check found the GPU idle where it wanted it busy
	wrong    int    // content checks that failed
}

func (p *probe) run(library, csv string) error {
	runtime.LockOSThread()
	g, err := gpu.OpenLibrary(library)
	if err != nil {
		return err
	}
	p.GPU = g
	dev := p.dev
	if p.info, err = g.DeviceInfo(dev); err != nil {
		return err
	}
	count, err := g.DeviceCount()
	if err != nil {
		return err
	}
	fmt.Printf("%s (device %d of %d), %s, granularity %s, %d multiprocessors, driver CUDA %d.%d, VMM %v, RDMA %v, promises handles %d\n",
		p.info.Name, dev, count, units.FormatBytes(p.info.TotalBytes), units.FormatBytes(p.info.Granularity), p.info.Multiproc,
		g.Version()/1000, g.Version()%1000/10, p.info.VMM, p.info.RDMA, p.info.Handles)
	if !p.info.VMM || p.info.Granularity == 0 {
		return fmt.Errorf("device %d has no virtual memory management", dev)
	}
	p.prop = cuda.MemProp{Device: dev, RDMA: p.info.RDMA}

	p.withoutContext()
	start := time.Now()
	if err := p.Use(dev); err != nil {
		return err
	}
	took := time.Since(start)
	if p.prop.Handles, err = p.ProbeHandles(dev); err != nil {
		return err
	}
	fmt.Printf("handles granted %d; first context and kernels: %v\n\n", p.prop.Handles, took.Round(time.Millisecond))
	if p.work, err = p.StreamCreate(dev, false); err != nil {
		return err
	}
	side, err := p.StreamCreate(dev, false)
	if err != nil {
		return err
	}
	p.loads = []*load{{name: "idle", idle: true}, {name: "side", stream: side}, {name: "legacy", stream: cuda.StreamLegacy}}

	steps := []func() error{p.contents, p.order, p.handles, p.chunks, p.batches, p.malloc, p.addresses, p.beside, p.capture}
	for _, step := range steps {
		err := step()
		p.table.print(os.Stdout)
		if err != nil {
			return err
		}
		if err := p.ContextSynchronize(dev); err != nil {
			return fmt.Errorf("the context is lost: %w", err)
		}
	}
	if csv != "" {
		if err := p.table.writeCSV(csv); err != nil {
			return err
		}
	}
	if p.wrong > 0 {
		return fmt.Errorf("%d content checks failed", p.wrong)
	}
	return nil
}

// late reports whether the time is up; what is left out then is said in the table.
func (p *probe) late(section string) bool {
	if time.Now().Before(p.deadline) {
		return false
	}
	p.table.note(section, "left out: the time limit has passed")
	return true
}

// load is what the GPU does while calls are measured.
type load struct {
	name   string
	idle   bool
	stream cuda.Stream
	until  time.Time // when the kernel that runs now will end
}

// margin is how long the kernel still runs, at least, when a call is measured.
const margin = 150 * time.Millisecond

// keep makes sure that the load's kernel runs, for margin at least.
func (p *probe) keep(l *load) error {
	if l.idle || time.Until(l.until) > margin {
		return nil
	}
	if err := p.StreamSynchronize(p.dev, l.stream); err != nil {
		return err
	}
	if err := p.Spin(p.dev, l.stream, p.spin); err != nil {
		return err
	}
	l.until = time.Now().Add(p.spin)
	time.Sleep(time.Millisecond) // launched is not running
	return nil
}

// settle waits until the load's kernel is done.
func (p *probe) settle(l *load) error {
	l.until = time.Time{}
	return p.ContextSynchronize(p.dev)
}

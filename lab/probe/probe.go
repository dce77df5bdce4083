// Package probe measures on a real GPU what Cistern's engine and its simulated device rest on: how long the driver calls
// take, which of them wait for running kernels, which work without a context or beside a stream capture, how large address
// ranges may be, and whether bytes are right after a chunk was mapped at a second address behind a running kernel. It takes
// less than a minute and some gigabytes, and changes no setting of the GPU.
//
// A measurement is the time that one call of cuda/nvidia takes on the host, wrapper included. Those under load are
// made while a kernel is known to run for another 150 ms at least; a call that takes over 50 ms then has waited for it.
package probe

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/lab/cli"
)

// Run is the command.
func Run(args []string, out io.Writer) error {
	p := &probe{out: out}
	f := cli.NewFlags("probe")
	f.Device(&p.device)
	f.StringVar(&p.csv, "csv", "", "also write the table to `FILE` as CSV")
	f.IntVar(&p.reps, "reps", 20, "how often each call is measured")
	f.DurationVar(&p.spin, "spin", 300*time.Millisecond, "how long the kernel runs behind which calls are measured")
	f.Size(&p.largest, "largest", "8GiB", "leave out chunks and allocations above this `size`")
	limit := f.Duration("limit", 50*time.Second, "start no further measurement after this time")
	if err := f.Parse(args, out); err != nil {
		return err
	}
	if p.reps < 1 || p.spin < 200*time.Millisecond {
		return cli.Usage("-reps is at least 1 and -spin at least 200ms")
	}
	ctx, cancel := context.WithTimeout(context.Background(), *limit)
	defer cancel()
	return p.run(ctx)
}

// probe is one run. Everything happens on one operating system thread, as in a program that calls CUDA.
type probe struct {
	*gpu.GPU
	out      io.Writer
	device   cli.Device
	dev      cuda.Device
	csv      string
	reps     int
	spin     time.Duration
	ctx      context.Context // done when no further measurement starts
	info     cuda.DeviceInfo
	prop     cuda.MemProp
	work     cuda.Stream // non-blocking, idle: the stream that calls are about
	loads    []*load
	table    table
	largest  uint64 // bytes; no chunk or allocation is larger
	untested bool   // a content check found the GPU idle where it wanted it busy
	wrong    int    // content checks that failed
}

func (p *probe) run(ctx context.Context) error {
	runtime.LockOSThread()
	p.ctx, p.dev = ctx, p.device.ID
	drv, err := open.Open(p.device.Driver)
	if err != nil {
		return err
	}
	g, err := gpu.New(drv)
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
	fmt.Fprintf(p.out, "%s (device %d of %d), %s, granularity %s, %d multiprocessors, driver CUDA %d.%d, VMM %v, RDMA %v, promises handles %d\n",
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
	fmt.Fprintf(p.out, "handles granted %d; first context and kernels: %v\n\n", p.prop.Handles, took.Round(time.Millisecond))
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
		p.table.print(p.out)
		if err != nil {
			return err
		}
		if err := p.ContextSynchronize(dev); err != nil {
			return fmt.Errorf("the context is lost: %w", err)
		}
	}
	if p.csv != "" {
		if err := p.table.writeCSV(p.csv); err != nil {
			return err
		}
	}
	if p.wrong > 0 {
		return fmt.Errorf("%d content checks failed", p.wrong)
	}
	return nil
}

// late reports whether the time is up; the table names what is left out then.
func (p *probe) late(section string) bool {
	if p.ctx.Err() == nil {
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

// await waits until the load's kernel is done.
func (p *probe) await(l *load) error {
	l.until = time.Time{}
	return p.ContextSynchronize(p.dev)
}

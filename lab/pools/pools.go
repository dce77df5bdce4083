//go:build linux

// Package pools is the test of stream-ordered pools that two processes use. One process allocates blocks from an exported pool.
// It and the process that has imported the pool take turns with each block. In a turn a kernel compares the block with what the other
// process wrote, and a kernel writes it anew. Only events that both processes have open order the turns; no host waits for
// the GPU. Blocks are freed by both, and others take their place.
//
// With -unordered the waits for events are left out. Contents must be wrong then: else the test would prove nothing. Over the
// simulated driver its checker finds the missing order, as contents there are in the order of the calls.
package pools

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/lab/cli"
	"github.com/cistern-gpu/cistern/resource"
)

// timeout is how long a process waits for the other's next word.
const timeout = time.Minute

// options are the flags.
type options struct {
	device    cli.Device
	ops       int
	blocks    int
	streams   int
	largest   uint64
	load      uint64
	unordered bool
	seed      uint64
}

// Run is the command.
func Run(args []string, out io.Writer) error {
	var o options
	f := cli.NewFlags("pools")
	f.Device(&o.device)
	f.IntVar(&o.ops, "ops", 1_000_000, "how many turns the two processes take together")
	f.IntVar(&o.blocks, "blocks", 16, "how many blocks there are at a time")
	f.IntVar(&o.streams, "streams", 3, "how many streams each process has")
	f.Size(&o.largest, "largest", "1MiB", "largest `size` of a block")
	f.Size(&o.load, "load", "64MiB", "`size` of the private memory that some turns write first, so that the GPU is behind the hosts")
	f.BoolVar(&o.unordered, "unordered", false, "leave the order out, and expect that contents are wrong")
	f.Uint64Var(&o.seed, "seed", 1, "what the random choices begin with")
	child := f.Bool("child", false, "be the process that imports; the command starts it so")
	if err := f.Parse(args, out); err != nil {
		return err
	}
	if o.ops < 2 || o.blocks < 1 || o.streams < 1 || o.largest < 8 || o.load < 8 {
		return cli.Usage("-ops is at least 2, -blocks and -streams 1, -largest and -load 8 bytes")
	}
	if *child {
		return importer(o)
	}
	return o.export(out, args)
}

// process is what both processes have: a machine, streams, and private memory for each stream.
type process struct {
	options
	gpu.Machine
	dev cuda.Device
	st  []cuda.Stream
	own []cuda.Ptr
	rng *rand.Rand
}

func (o options) process(seed uint64) (*process, error) {
	m, err := o.device.Open(func(s sim.Options) gpu.Machine {
		s.Check, s.Handles, s.Lag = sim.CheckOrder, sim.Exportable, time.Millisecond
		return &gpu.Sim{Driver: sim.New(s), Contents: 4 << 10}
	})
	if err != nil {
		return nil, err
	}
	p := &process{options: o, Machine: m, dev: o.device.ID, rng: rand.New(rand.NewPCG(o.seed, seed))}
	if err := m.RetainContext(p.dev); err != nil {
		return nil, err
	}
	for range o.streams {
		s, err := m.StreamCreate(p.dev, false)
		if err != nil {
			return nil, err
		}
		ptr, err := m.MemAlloc(p.dev, o.load)
		if err != nil {
			return nil, err
		}
		p.st, p.own = append(p.st, s), append(p.own, ptr)
	}
	return p, nil
}

// behind sometimes queues work for the stream's private memory, so that what is queued next is late.
func (p *process) behind(stream int) error {
	if p.rng.IntN(8) != 0 {
		return nil
	}
	return p.Fill(p.dev, p.st[stream], p.own[stream], p.load, p.rng.Uint64())
}

// after makes the stream wait for the other process's last turn.
func (p *process) after(stream int, e cuda.Event) error {
	if p.unordered {
		return nil
	}
	return p.StreamWaitEvent(p.dev, p.st[stream], e)
}

// turn is what the exporter says of a block: the importer compares it with Seed, and then writes Next or frees it.
type turn struct {
	Block int
	Size  uint64
	Seed  uint64
	Next  uint64
	Free  bool
	Name  cuda.PoolPtr     // of a new block
	Event cuda.EventHandle // at the beginning, and nothing else: the exporter's event for the block
	End   bool             // the last word
}

// answer is the importer's.
type answer struct {
	Block int
	Event cuda.EventHandle
	Err   string
	Found bool // Err is what was expected of the control: wrong contents, or a use without order
}

// block is a block as the exporter knows it.
type block struct {
	p            cuda.Ptr
	size, seed   uint64
	freed        bool // by the importer
	mine, theirs cuda.Event
	began        bool // the importer has had a turn
}

// exporter is the process that allocates.
type exporter struct {
	*process
	pool    *resource.AsyncPool
	blocks  []block
	idle    []int
	say     *gob.Encoder
	answers chan answer
	gone    chan error // why no more answers come
	turns   int
	renewed int
}

// errFound is what the control is to find.
type errFound struct{ words string }

func (e errFound) Error() string { return e.words }

// export runs both processes and judges what they found.
func (o options) export(out io.Writer, args []string) (err error) {
	start := time.Now()
	p, err := o.process(0)
	if err != nil {
		return err
	}
	x := &exporter{process: p}
	if x.pool, err = resource.Async(x, x.dev, resource.AsyncOptions{Handles: cuda.HandlePosix, Threshold: resource.Unlimited}); err != nil {
		return err
	}
	err = x.run(args)
	var found errFound
	switch {
	case errors.As(err, &found) && o.unordered:
		fmt.Fprintf(out, "ok: without order, after %d turns in %v: %s\n", x.turns, time.Since(start).Round(time.Millisecond), found.words)
		return nil
	case err != nil:
		return fmt.Errorf("after %d turns, seed %d: %w", x.turns, o.seed, err)
	case o.unordered:
		return fmt.Errorf("%d turns without order, and nothing was wrong: the test would not find anything", x.turns)
	}
	fmt.Fprintf(out, "ok: %d turns of two processes in %v, %d blocks freed by both; all contents right\n", x.turns,
		time.Since(start).Round(time.Millisecond), x.renewed)
	return nil
}

// run starts the importer and takes turns with it.
func (x *exporter) run(args []string) (err error) {
	file, err := x.pool.Export()
	if err != nil {
		return err
	}
	pool := os.NewFile(uintptr(file), "pool")
	defer pool.Close()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	own, theirs := os.NewFile(uintptr(pair[0]), "socket"), os.NewFile(uintptr(pair[1]), "socket")
	conn, err := net.FileConn(own)
	own.Close()
	if err != nil {
		theirs.Close()
		return err
	}
	defer conn.Close()
	self, err := os.Executable()
	if err != nil {
		theirs.Close()
		return err
	}
	c := exec.Command(self, append([]string{"pools", "-child"}, args...)...)
	c.Env = append(os.Environ(), childMark+"=1")
	c.Stdout, c.Stderr = os.Stderr, os.Stderr
	c.ExtraFiles = []*os.File{theirs, pool} // 3 and 4
	err = c.Start()
	theirs.Close()
	if err != nil {
		return err
	}
	defer func() {
		conn.Close()
		if e := c.Wait(); e != nil && err == nil {
			err = fmt.Errorf("the importing process: %w", e)
		}
	}()
	x.say = gob.NewEncoder(conn)
	x.answers, x.gone = make(chan answer, x.options.blocks), make(chan error, 1)
	go func() {
		for d := gob.NewDecoder(conn); ; {
			var a answer
			if err := d.Decode(&a); err != nil {
				x.gone <- err
				return
			}
			x.answers <- a
		}
	}()
	if err := x.meet(); err != nil {
		return err
	}
	for x.turns+2 <= x.ops {
		if err := x.take(); err != nil {
			return err
		}
	}
	return x.end()
}

// childMark tells a test's program that it is the importer.
const childMark = "CISTERN_LAB_POOLS_CHILD"

// meet exchanges the events, one of each process for each block.
func (x *exporter) meet() error {
	for i := range x.options.blocks {
		e, err := x.EventCreateShared(x.dev)
		if err != nil {
			return err
		}
		h, err := x.EventExport(x.dev, e)
		if err != nil {
			return err
		}
		if err := x.say.Encode(turn{Block: i, Event: h}); err != nil {
			return x.why(err)
		}
		a, err := x.hear()
		if err != nil {
			return err
		}
		theirs, err := x.EventOpen(x.dev, a.Event)
		if err != nil {
			return err
		}
		x.blocks = append(x.blocks, block{mine: e, theirs: theirs})
		x.idle = append(x.idle, i)
	}
	return nil
}

// hear waits for an answer.
func (x *exporter) hear() (answer, error) {
	late := time.NewTimer(timeout)
	defer late.Stop()
	select {
	case a := <-x.answers:
		return a, a.error()
	case err := <-x.gone:
		return answer{}, fmt.Errorf("the importing process hung up: %w", err)
	case <-late.C:
		return answer{}, fmt.Errorf("the importing process did not answer for %v", timeout)
	}
}

func (a answer) error() error {
	switch {
	case a.Found:
		return errFound{"the importing process: " + a.Err}
	case a.Err != "":
		return errors.New("the importing process: " + a.Err)
	}
	return nil
}

// why is the answer that the importer hung up with, if there is one.
func (x *exporter) why(err error) error {
	select {
	case a := <-x.answers:
		if e := a.error(); e != nil {
			return e
		}
	case <-time.After(time.Second):
	}
	return err
}

// take is one turn of each process with a random block.
func (x *exporter) take() error {
	for len(x.idle) == 0 || len(x.answers) > 0 {
		a, err := x.hear()
		if err != nil {
			return err
		}
		x.idle = append(x.idle, a.Block)
	}
	k := x.rng.IntN(len(x.idle))
	i := x.idle[k]
	x.idle = append(x.idle[:k], x.idle[k+1:]...)
	b, s := &x.blocks[i], x.rng.IntN(len(x.st))
	t := turn{Block: i, Seed: x.rng.Uint64(), Next: x.rng.Uint64(), Free: !x.unordered && x.rng.IntN(4) == 0}
	if err := found(x.queue(b, s, &t)); err != nil {
		return err
	}
	if err := x.say.Encode(t); err != nil {
		return x.why(err)
	}
	b.seed, b.freed, b.began = t.Next, t.Free, true
	x.turns += 2
	return nil
}

// queue is the exporter's turn.
func (x *exporter) queue(b *block, s int, t *turn) error {
	st := x.st[s]
	if b.began {
		if err := x.after(s, b.theirs); err != nil {
			return err
		}
	}
	if b.freed {
		if err := x.pool.Free(b.p, b.size, 0, st); err != nil {
			return err
		}
		b.p, b.freed = 0, false
		x.renewed++
	}
	var err error
	if b.p == 0 {
		b.size = 8 + x.rng.Uint64N(x.largest-7)
		if b.p, err = x.pool.Alloc(b.size, 0, st); err != nil {
			return err
		}
		if t.Name, err = x.pool.ExportPtr(b.p); err != nil {
			return err
		}
	} else if err = x.Check(x.dev, st, b.p, b.size, b.seed); err != nil {
		return err
	}
	if err = x.behind(s); err != nil {
		return err
	}
	if err = x.Fill(x.dev, st, b.p, b.size, t.Seed); err != nil {
		return err
	}
	t.Size = b.size
	return x.EventRecord(x.dev, b.mine, st)
}

// found marks a use against the rules, which the simulated device reports where it is made.
func found(err error) error {
	var f *sim.Fault
	if errors.As(err, &f) {
		return errFound{cli.Line(err)}
	}
	return err
}

// end waits for the importer's last word, frees all blocks, and looks for what was wrong.
func (x *exporter) end() error {
	for len(x.idle) < x.options.blocks {
		a, err := x.hear()
		if err != nil {
			return err
		}
		x.idle = append(x.idle, a.Block)
	}
	if err := x.say.Encode(turn{End: true}); err != nil {
		return x.why(err)
	}
	if _, err := x.hear(); err != nil {
		return err
	}
	for _, b := range x.blocks {
		if b.p == 0 {
			continue
		}
		if err := x.StreamWaitEvent(x.dev, x.st[0], b.theirs); err != nil {
			return err
		}
		if err := x.pool.Free(b.p, b.size, 0, x.st[0]); err != nil {
			return found(err)
		}
	}
	if err := x.finish(); err != nil {
		return err
	}
	for _, b := range x.blocks {
		if err := errors.Join(x.EventDestroy(x.dev, b.mine), x.EventDestroy(x.dev, b.theirs)); err != nil {
			return err
		}
	}
	return x.pool.Close()
}

// finish waits for the GPU and returns what was wrong.
func (p *process) finish() error {
	for _, s := range p.st {
		if err := p.StreamSynchronize(p.dev, s); err != nil {
			return err
		}
	}
	if err := p.Wrong(p.dev); err != nil {
		return errFound{cli.Line(err)}
	}
	for i := range p.st {
		if err := errors.Join(p.MemFree(p.dev, p.own[i]), p.StreamDestroy(p.dev, p.st[i])); err != nil {
			return err
		}
	}
	return nil
}

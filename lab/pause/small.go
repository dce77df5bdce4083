package pause

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern"
)

// small cycles a small pool often, in all ways in turn, and looks at what is left over.
func (b *bench) small() error {
	pool, err := b.d.NewPool(cistern.PoolID{1, 0})
	if err != nil {
		return err
	}
	for _, each := range []uint64{4 << 10, 300 << 10, 5 << 20} {
		if err := b.alloc(pool, 4*each, each); err != nil {
			return err
		}
	}
	sel := cistern.Selection{Pool: pool}
	once := func(i int) error {
		o := cistern.PauseOptions{Dir: b.dir}
		switch {
		case i%50 == 49:
			o.Keep = cistern.KeepDisk
		case i%5 == 4:
			o.Keep = cistern.KeepNone
		}
		_, _, _, err := b.cycle(sel, o)
		if err == nil && o.Keep == cistern.KeepNone {
			err = b.fill()
		}
		if err == nil && i%100 == 0 {
			err = b.check()
		}
		return err
	}
	for i := range min(b.cycles, 100) { // so that what is kept for the next time is there
		if err := once(i); err != nil {
			return err
		}
	}
	before, err := b.look()
	if err != nil {
		return err
	}
	start := b.drv.Now()
	for i := range b.cycles {
		if err := once(i); err != nil {
			return fmt.Errorf("cycle %d: %w", i, err)
		}
	}
	took := b.drv.Now() - start
	if err := b.check(); err != nil {
		return err
	}
	after, err := b.look()
	if err != nil {
		return err
	}
	if b.cycles > 0 {
		b.r.CycleMS = took.Seconds() * 1e3 / float64(b.cycles)
	}
	b.r.DeviceGrown, b.r.HostGrown, b.r.FilesGrown = after.device-before.device, after.host-before.host, after.files-before.files
	if err := b.freeAll(); err != nil {
		return err
	}
	return errors.Join(pool.Release(), b.d.PauseBuffers(0))
}

// left is what a process holds.
type left struct {
	device, host int64 // bytes
	files        int
}

func (b *bench) look() (left, error) {
	runtime.GC()
	free, total, err := b.drv.MemInfo(b.dev)
	if err != nil {
		return left{}, err
	}
	l := left{device: int64(total - free)}
	if text, err := os.ReadFile("/proc/self/status"); err == nil {
		_, rest, _ := strings.Cut(string(text), "VmRSS:")
		if f := strings.Fields(rest); len(f) > 0 {
			kb, _ := strconv.ParseInt(f[0], 10, 64)
			l.host = kb << 10
		}
	}
	if names, err := os.ReadDir("/proc/self/fd"); err == nil {
		l.files = len(names)
	}
	return l, nil
}

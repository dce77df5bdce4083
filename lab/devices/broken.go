package devices

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
)

// broken breaks device 1 while both devices hold memory and device 0 works on: device 1 then refuses, by the error that
// broke it, and takes back what was allocated; device 0 goes on as if nothing were, where the driver lets it. NVIDIA's
// driver 580 does not: after a kernel faulted on one device every call on the process's other devices fails with the same
// error, without any allocator too. Then device 0 has to refuse and to take back as device 1 does.
func broken(m *machine, out io.Writer) error {
	a, err := cistern.New(m.driver, cistern.Options{})
	if err != nil {
		return err
	}
	healthy, err := newSide(m, out, a, 0, 1)
	if err != nil {
		return err
	}
	bad, err := newSide(m, out, a, 1, 1)
	if err != nil {
		return err
	}
	var seed uint64
	kept, err := healthy.blocks(m, &seed)
	if err != nil {
		return err
	}
	lost, err := bad.blocks(m, &seed)
	if err != nil {
		return err
	}
	if err := m.Wrong(); err != nil {
		return err
	}

	stop, working := make(chan struct{}), make(chan error, 1)
	var once sync.Once
	began := make(chan struct{})
	go func() {
		for i := uint64(0); ; i++ {
			select {
			case <-stop:
				working <- nil
				return
			default:
			}
			if err := work(m, a, healthy, 1000+i); err != nil {
				once.Do(func() { close(began) })
				working <- err
				return
			}
			once.Do(func() { close(began) })
		}
	}()
	<-began
	damage := m.damage(1, bad.stream.Handle())
	refused := refuses(bad)
	close(stop)
	if err := errors.Join(damage, refused); err != nil {
		<-working
		return err
	}
	err = <-working
	both := poison(err) && poison(m.StreamSynchronize(0, healthy.stream.Handle())) // by the driver's own word
	if err != nil && !both {
		return fmt.Errorf("device 0, while device 1 broke: %w", err)
	}
	if err := down(a, bad, lost); err != nil {
		return err
	}
	if both {
		// What work was doing is out still; it did not outlive its error.
		if err := errors.Join(refuses(healthy), takesBack(a, healthy, kept)); err != nil {
			return err
		}
		healthy.dev.Trim() // fails, and says why; it must not hang
		fmt.Fprintln(out, "note: device 1 is broken, and the driver has device 0 down with it: both refuse, and took back what was out")
		return nil
	}

	for i := range uint64(50) {
		if err := work(m, a, healthy, 5000+i); err != nil {
			return fmt.Errorf("device 0, after device 1 broke: %w", err)
		}
	}
	for _, b := range kept {
		err := m.Check(0, healthy.stream.Handle(), b.p, b.size, b.seed)
		if err == nil {
			err = a.Free(b.p)
		}
		if err != nil {
			return fmt.Errorf("%s, after device 1 broke: %w", b.what, err)
		}
	}
	if err := m.Wrong(0); err != nil {
		return err
	}
	bad.dev.Trim() // fails, and says why; it must not hang
	if err := healthy.dev.Trim(); err != nil {
		return err
	}
	if err := balanced(healthy.dev); err != nil {
		return err
	}
	if s := healthy.dev.Stats(); s.Allocations.All.Current != 0 {
		return fmt.Errorf("device 0: %d blocks are left", s.Allocations.All.Current)
	}
	fmt.Fprintf(out, "note: device 1 is broken; device 0 has %d bytes left of what its pools cache\n", healthy.dev.Stats().Reserved.All.Current)
	return nil
}

// down is nil if a broken device takes back its blocks, has none left, and refuses.
func down(a *cistern.Allocator, s *side, out []block) error {
	if err := takesBack(a, s, out); err != nil {
		return err
	}
	if n := s.dev.Stats(); n.Allocations.All.Current != 0 || n.Allocated.All.Current != 0 {
		return fmt.Errorf("device %d: %d blocks of %d bytes are left after all was freed", s.dev.ID(), n.Allocations.All.Current,
			n.Allocated.All.Current)
	}
	return refuses(s)
}

// takesBack is nil if the blocks of a broken device can be freed, and its statistics add up then.
func takesBack(a *cistern.Allocator, s *side, out []block) error {
	for _, b := range out {
		if err := a.Free(b.p); err != nil {
			return fmt.Errorf("freeing %s after the device broke: %w", b.what, err)
		}
	}
	return balanced(s.dev)
}

// work is what a program does on a device that is well: memory of some sizes, written, compared and given back.
func work(m *machine, a *cistern.Allocator, s *side, seed uint64) error {
	id, st := s.dev.ID(), s.stream.Handle()
	for i := range uint64(8) {
		size := 1 + (seed+i)*2654435761%(m.large/4)
		p, err := s.dev.Alloc(size, s.stream)
		if err != nil {
			return err
		}
		if err := m.Fill(id, st, p, size, seed+i); err != nil {
			return err
		}
		if err := m.Check(id, st, p, size, seed+i); err != nil {
			return err
		}
		if err := a.Free(p); err != nil {
			return err
		}
	}
	return nil
}

// refuses is nil if the device is known to be broken, by the error that broke it, as soon as the driver was asked
// something that it answers so: on which of these calls it does differs between drivers.
func refuses(s *side) error {
	var found error
	for _, ask := range []func() error{
		func() error { _, err := s.dev.Stream(s.stream.Handle()); return err },
		func() error { _, err := s.dev.Alloc(256*mib, s.stream); return err },
		s.dev.Trim,
	} {
		if found = ask(); poison(found) {
			break
		}
		if found != nil {
			return fmt.Errorf("device %d is broken, and a request reports: %w", s.dev.ID(), found)
		}
	}
	if found == nil {
		return fmt.Errorf("device %d is broken, and does not know", s.dev.ID())
	}
	if _, err := s.dev.Alloc(256*mib, s.stream); !poison(err) {
		return fmt.Errorf("device %d is known to be broken (%w), and a request reports: %v", s.dev.ID(), found, err)
	}
	return nil
}

// poison reports whether an error is one after which a device's context is of no use.
func poison(err error) bool {
	var e *cuda.Error
	return errors.As(err, &e) && e.Code.Poisons()
}

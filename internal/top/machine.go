package top

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/nvml"
)

// What processes say of themselves.
type (
	Process = live.Process
	Device  = live.Device
	Details = live.Details
	Use     = live.Use
)

// Machine is the source that looks at this one. It belongs to one goroutine at a time.
type Machine struct {
	// Timeout is how long a look waits for NVML, which may take seconds to start and for ever where a GPU is broken. What
	// does not come in time is there at the next look.
	Timeout time.Duration

	// NVML, and where its answers come in; nil while it is not asked.
	library  string // its file, "" the installed one
	answer   chan cards
	asked    time.Time
	last     cards
	answered time.Time
	opened   *nvml.Library

	broker broker

	readers []*live.Reader
	failed  []error
	scanned time.Time
	took    time.Duration
}

// cards is an answer of NVML.
type cards struct {
	library *nvml.Library
	devices []nvml.Device
	err     error
}

const (
	// scanEvery is the time between two searches for pages, at least; a search takes no more than a twentieth of the
	// time.
	scanEvery = 2 * time.Second
	scanShare = 20
	// scanSeldom is how long a new process may stay unseen on a machine with very many.
	scanSeldom = 6 * time.Second
	// openEvery is the time after which NVML is opened again where that failed: a driver may be being installed.
	openEvery = 30 * time.Second
	// tooLong is when a question to NVML is given up.
	tooLong = time.Minute
	// mostTorn is how many pages that are never whole a look waits for, 10 ms each.
	mostTorn = 16
)

// NewMachine returns the source that looks at this machine, through the NVML in file library or, if that is empty, the
// installed one, and through the broker at the first of these sockets where one listens.
func NewMachine(library string, sockets ...string) *Machine {
	return &Machine{library: library, Timeout: 2 * time.Second, broker: broker{sockets: sockets}}
}

// Close lets go of the pages and of NVML, if it is not busy.
func (m *Machine) Close() {
	for _, r := range m.readers {
		r.Close()
	}
	m.readers = nil
	if m.opened != nil && m.answer == nil {
		_ = m.opened.Close() // the process ends anyway
	}
}

// Look reads all pages and asks NVML.
func (m *Machine) Look(ctx context.Context, wanted Wanted) Look {
	m.ask()
	m.broker.ask()
	var l Look
	m.pages(ctx, wanted, &l)
	m.wait(ctx, &l)
	m.broker.wait(ctx, &l)
	l.At = time.Now()
	m.programs(&l)
	return l
}

// ask has NVML asked in another goroutine, unless it still is.
func (m *Machine) ask() {
	failed := m.last.err != nil && m.opened == nil
	if m.answer != nil || failed && time.Since(m.answered) < openEvery {
		return
	}
	answer, opened, file := make(chan cards, 1), m.opened, m.library
	m.answer, m.asked = answer, time.Now()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), tooLong)
		defer cancel()
		a := cards{library: opened}
		if a.library == nil {
			a.library, a.err = nvml.Open(ctx, file)
		}
		if a.err == nil {
			a.devices, a.err = a.library.Devices(ctx)
		} else {
			a.library = nil
		}
		answer <- a
	}()
}

// wait takes NVML's answer if it comes in time; else the last one has to do.
func (m *Machine) wait(ctx context.Context, l *Look) {
	if m.answer != nil {
		wait, cancel := context.WithDeadline(ctx, m.asked.Add(m.Timeout))
		defer cancel()
		select {
		case a := <-m.answer:
			m.take(a)
		case <-wait.Done():
			l.NoCards = fmt.Sprintf("NVML has not answered for %v", time.Since(m.asked).Round(time.Second))
			if err := ctx.Err(); err != nil {
				l.NoCards = err.Error()
			}
		}
	}
	if m.answer != nil { // reading the pages may have taken longer than the answer: it counts if it is there
		select {
		case a := <-m.answer:
			m.take(a)
			l.NoCards = ""
		default:
		}
	}
	if m.last.err != nil && l.NoCards == "" {
		l.NoCards = m.last.err.Error()
	}
	for _, d := range m.last.devices {
		l.Cards = append(l.Cards, card(&d))
		if why := unasked(&d); why != "" {
			l.Problems = append(l.Problems, why)
		}
	}
	onceInParts(l.Cards)
}

func (m *Machine) take(a cards) {
	m.last, m.opened, m.answer, m.answered = a, a.library, nil, time.Now()
}

// card is a device of NVML's.
func card(d *nvml.Device) Card {
	c := Card{UUID: d.UUID, Index: d.Index, Name: d.Name, Total: d.Memory.Total, Used: d.Memory.Used, Free: d.Memory.Free,
		Known: d.Memory.Total > 0, Utilization: -1}
	if d.Utilization.Known {
		c.Utilization = d.Utilization.GPU
	}
	if d.MIG {
		c.Part = fmt.Sprintf("%d:%d", d.Index, d.GPUInstance)
	}
	for _, p := range d.Processes {
		c.Holders = append(c.Holders, Holder{PID: p.PID, Bytes: p.Bytes, Known: p.Known, Name: p.Name})
	}
	return c
}

// unasked says why a device's memory or processes are not known. Of what else NVML does not tell, many devices have
// nothing.
func unasked(d *nvml.Device) string {
	for _, err := range d.Errors {
		var e *nvml.Error
		if errors.As(err, &e) && (strings.Contains(e.Call, "Memory") || strings.Contains(e.Call, "Processes") || strings.Contains(e.Call, "Handle")) {
			return fmt.Sprintf("GPU %d: %v", d.Index, err)
		}
	}
	return ""
}

// onceInParts leaves out, on GPUs that are divided, the processes that are listed on their parts as well.
func onceInParts(all []Card) {
	for i := range all {
		if all[i].Part != "" {
			continue
		}
		all[i].Holders = slices.DeleteFunc(all[i].Holders, func(h Holder) bool {
			return slices.ContainsFunc(all, func(c Card) bool {
				return c.Part != "" && c.Index == all[i].Index && slices.ContainsFunc(c.Holders, func(o Holder) bool { return o.PID == h.PID })
			})
		})
	}
}

// pages reads what the processes publish. Those that ended since the last search are not there any more.
func (m *Machine) pages(ctx context.Context, wanted Wanted, l *Look) {
	if since := time.Since(m.scanned); m.scanned.IsZero() || since > max(scanEvery, min(scanShare*m.took, scanSeldom)) {
		begin := time.Now()
		m.readers, m.failed = live.List(ctx, m.readers...)
		m.scanned, m.took = time.Now(), time.Since(begin)
	}
	if len(m.readers) == 0 && len(m.failed) > 0 {
		l.NoPages = m.failed[0].Error()
	} else {
		for _, err := range m.failed {
			l.Problems = append(l.Problems, err.Error())
		}
	}
	torn := 0
	m.readers = slices.DeleteFunc(m.readers, func(r *live.Reader) bool {
		read := r.Read
		if torn >= mostTorn {
			read = r.ReadOnce
		}
		p, err := read(false)
		if err == nil && wanted.Of(p.PID) {
			p, err = read(true)
		}
		switch {
		case errors.Is(err, live.ErrEnded):
			r.Close()
			return true
		case err != nil:
			torn++
			l.Problems = append(l.Problems, err.Error())
		default:
			l.Processes = append(l.Processes, p)
		}
		return false
	})
}

// programs looks up the processes that only NVML names. In a container these may be others', of which nothing is known
// here.
func (m *Machine) programs(l *Look) {
	l.Programs = make(map[int]Program)
	for _, c := range l.Cards {
		for _, h := range c.Holders {
			if _, known := l.Programs[h.PID]; known || slices.ContainsFunc(l.Processes, func(p Process) bool { return p.PID == h.PID }) {
				continue
			}
			var p Program
			if of, err := live.Of(h.PID); err == nil {
				p = Program{Start: of.Start, Name: of.Name, Args: of.Args}
				if closed(h.PID) {
					l.Unreadable++
				}
			} else {
				l.Strange++
			}
			if p.Name == "" {
				p.Name = filepath.Base(h.Name) // "." where NVML has none either
			}
			if p.Name == "." {
				p.Name = "(not to be seen from here)"
			}
			l.Programs[h.PID] = p
		}
	}
}

// closed says whether a process may not be looked into: whether it uses Cistern is then not known.
func closed(pid int) bool {
	f, err := os.Open(fmt.Sprintf("/proc/%d/fd", pid))
	if err == nil {
		f.Close()
	}
	return errors.Is(err, fs.ErrPermission)
}

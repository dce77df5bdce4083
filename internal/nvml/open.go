//go:build linux && cgo

package nvml

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "library.h"
*/
import "C"

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"
)

// places are where the library is looked for: first wherever the dynamic linker finds it, then where containers, WSL and
// NixOS put it without telling the linker.
var places = []string{
	"libnvidia-ml.so.1",
	"/usr/local/nvidia/lib64/libnvidia-ml.so.1",
	"/usr/lib/wsl/lib/libnvidia-ml.so.1",
	"/run/opengl-driver/lib/libnvidia-ml.so.1",
}

// Library is NVML, opened and initialised. It may be used by several goroutines, one of which is served at a time.
type Library struct {
	// turn is held by the goroutine that asks: a call that hangs keeps it.
	turn chan struct{}

	mu sync.Mutex
	c  *C.nm_library // changed by the goroutine with the turn, under mu: nil once it is freed, which goroutines that waited in vain may see
}

// Open opens the library at path, or the installed one if path is empty, and initialises it, before ctx ends.
func Open(ctx context.Context, path string) (*Library, error) {
	var loaded atomic.Pointer[Library]
	return within(ctx, &loaded, func() (*Library, error) { return open(path, &loaded) })
}

// within has f, which makes calls of the library that it puts into loaded, run in a thread of its own, and waits for it until
// ctx ends.
func within[T any](ctx context.Context, loaded *atomic.Pointer[Library], f func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		var a answer
		a.value, a.err = f()
		done <- a
	}()
	if a, ok := await(done, ctx.Done()); ok {
		return a.value, a.err
	}
	var none T
	if l := loaded.Load(); l != nil {
		return none, l.late(context.Cause(ctx))
	}
	return none, fmt.Errorf("NVML cannot be loaded: %w", context.Cause(ctx))
}

// await waits for an answer until it is over. An answer that is there counts also when it is over: the goroutine may have been kept
// from running for longer than it wanted to wait.
func await[T any](answer <-chan T, over <-chan struct{}) (a T, ok bool) {
	select {
	case a = <-answer:
		return a, true
	case <-over:
	}
	select {
	case a = <-answer:
		return a, true
	default:
		return a, false
	}
}

func open(path string, loaded *atomic.Pointer[Library]) (*Library, error) {
	paths := places
	if path != "" {
		paths = []string{path}
	}
	c, err := load(paths)
	if err != nil {
		return nil, fmt.Errorf("NVML: %w", err)
	}
	l := &Library{c: c, turn: make(chan struct{}, 1)}
	loaded.Store(l)
	if err := l.failure(C.nm_init(c)); err != nil {
		loaded.Store(nil)
		l.free()
		return nil, err
	}
	return l, nil
}

// load opens the first of the libraries that exists. The error is about the first.
func load(paths []string) (*C.nm_library, error) {
	var first error
	for _, p := range paths {
		name := C.CString(p)
		var reason [512]C.char
		c := C.nm_open(name, &reason[0], C.size_t(len(reason)))
		C.free(unsafe.Pointer(name))
		if c != nil {
			return c, nil
		}
		if first == nil {
			first = errors.New(C.GoString(&reason[0]))
		}
	}
	return nil, first
}

// Close gives NVML back. Where a call hangs it stays, as that call needs it.
func (l *Library) Close() error {
	select {
	case l.turn <- struct{}{}: // for good
	default:
		return l.late(errors.New("it is not closed"))
	}
	err := l.failure(C.nm_shutdown(l.c))
	l.free()
	return err
}

func (l *Library) free() {
	l.mu.Lock()
	c := l.c
	l.c = nil
	l.mu.Unlock()
	C.nm_close(c) // which may hang as any call of the library's
}

// ask is within for an opened library, whose turn f has.
func ask[T any](ctx context.Context, l *Library, f func() (T, error)) (T, error) {
	var none T
	if ctx.Err() != nil {
		return none, context.Cause(ctx)
	}
	select {
	case l.turn <- struct{}{}:
	case <-ctx.Done():
		return none, l.late(context.Cause(ctx))
	}
	var loaded atomic.Pointer[Library]
	loaded.Store(l)
	return within(ctx, &loaded, func() (T, error) {
		defer func() { <-l.turn }()
		return f()
	})
}

// late is the error for NVML not having answered by the time that why says.
func (l *Library) late(why error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.c != nil {
		if call := C.nm_current(l.c); call >= 0 { // +checklocksignore: cgo makes function literals of calls
			return fmt.Errorf("%s does not return: %w", C.GoString(C.nm_call_name(call)), why)
		}
	}
	return fmt.Errorf("NVML is busy: %w", why)
}

// failure is the error for a result, nil for success.
func (l *Library) failure(r C.nm_result) error {
	if r == 0 {
		return nil
	}
	e := &Error{Call: C.GoString(C.nm_call_name(C.int(r >> 32))), Code: int(int32(uint32(r)))}
	if uint32(r) == C.NM_MISSING {
		e.Words = "the installed driver does not have it"
	} else if e.Words = C.GoString(C.nm_words(l.c, C.int(e.Code))); e.Words == "" {
		e.Words = fmt.Sprintf("error %d", e.Code)
	}
	return e
}

// text is what a call writes into a buffer.
func (l *Library) text(call func(*C.char, C.uint) C.nm_result) (string, error) {
	var buffer [256]C.char
	if err := l.failure(call(&buffer[0], C.uint(len(buffer)-1))); err != nil {
		return "", err
	}
	return C.GoString(&buffer[0]), nil
}

// Driver is the driver's version: "580.65.06".
func (l *Library) Driver(ctx context.Context) (string, error) {
	return ask(ctx, l, func() (string, error) {
		return l.text(func(s *C.char, n C.uint) C.nm_result { return C.nm_driver(l.c, s, n) })
	})
}

// Devices asks for everything of all devices. The error is that of a machine whose devices cannot be counted, or of ctx.
func (l *Library) Devices(ctx context.Context) ([]Device, error) {
	return ask(ctx, l, func() (devices []Device, err error) {
		err = l.each(func(h C.nvmlDevice_t, d Device) bool {
			l.measure(h, &d)
			devices = append(devices, d)
			return true
		})
		return devices, err
	})
}

// each calls f with every device, of which so far only what identifies it is known, until f says false. A GPU without a
// handle comes with a nil one.
func (l *Library) each(f func(C.nvmlDevice_t, Device) bool) error {
	var n C.uint
	if err := l.failure(C.nm_count(l.c, &n)); err != nil {
		return err
	}
	for i := range int(n) {
		d := Device{Index: i}
		var h C.nvmlDevice_t
		if d.note(l.failure(C.nm_handle(l.c, C.uint(i), &h))) {
			h = nil
		} else {
			l.identify(h, &d)
		}
		if !f(h, d) {
			return nil
		}
		if h != nil && !l.eachInstance(h, d, f) {
			return nil
		}
	}
	return nil
}

func (l *Library) eachInstance(gpu C.nvmlDevice_t, of Device, f func(C.nvmlDevice_t, Device) bool) bool {
	var most C.uint
	if C.nm_mig(l.c, gpu, &most) != 0 {
		return true // measure asks again, and notes it
	}
	for i := range most {
		var h C.nvmlDevice_t
		if C.nm_mig_handle(l.c, gpu, i, &h) != 0 || h == nil {
			continue
		}
		d := Device{Index: of.Index, MIG: true, BusID: of.BusID}
		var g, c C.uint
		if !d.note(l.failure(C.nm_mig_numbers(l.c, h, &g, &c))) {
			d.GPUInstance, d.ComputeInstance = int(g), int(c)
		}
		l.identify(h, &d)
		if !f(h, d) {
			return false
		}
	}
	return true
}

// note keeps an error, and says whether there was one.
func (d *Device) note(err error) bool {
	if err != nil {
		d.Errors = append(d.Errors, err)
	}
	return err != nil
}

// identify fills in what identifies a device.
func (l *Library) identify(h C.nvmlDevice_t, d *Device) {
	text, err := l.text(func(s *C.char, n C.uint) C.nm_result { return C.nm_uuid(l.c, h, s, n) })
	if err == nil {
		d.UUID, err = parseUUID(text)
	}
	d.note(err)
	d.Name, err = l.text(func(s *C.char, n C.uint) C.nm_result { return C.nm_name(l.c, h, s, n) })
	d.note(err)
	if !d.MIG {
		d.BusID, err = l.text(func(s *C.char, n C.uint) C.nm_result { return C.nm_bus(l.c, h, s, C.size_t(n)) })
		d.note(err)
	}
}

// parseUUID reads "GPU-" or "MIG-" and 16 bytes. An instance's UUID before driver 470 was made of its GPU's and two numbers,
// which CUDA's has nothing of.
func parseUUID(text string) (id [16]byte, err error) {
	_, digits, _ := strings.Cut(text, "-")
	b, err := hex.DecodeString(strings.ReplaceAll(digits, "-", ""))
	if err != nil || len(b) != len(id) {
		return id, fmt.Errorf("nvmlDeviceGetUUID: %q is not a UUID of 16 bytes", text)
	}
	return [16]byte(b), nil
}

// measure fills in what changes.
func (l *Library) measure(h C.nvmlDevice_t, d *Device) {
	if h == nil {
		return
	}
	var m C.nm_memory_info
	if !d.note(l.failure(C.nm_memory(l.c, h, &m))) {
		d.Memory = Memory{uint64(m.total), uint64(m.used), uint64(m.free), uint64(m.reserved)}
	}
	if !d.MIG {
		var gpu, memory, most C.uint
		if !d.note(l.failure(C.nm_utilization(l.c, h, &gpu, &memory))) {
			d.Utilization = Utilization{int(gpu), int(memory), true}
		}
		d.note(l.failure(C.nm_mig(l.c, h, &most)))
	}
	list, err := l.processes(h)
	d.Processes = list
	d.note(err)
}

// processes lists those that compute and those that draw. The error is about the first; one that knows nothing of graphics
// draws nothing.
func (l *Library) processes(h C.nvmlDevice_t) ([]Process, error) {
	var out []Process
	names := map[C.uint32_t]string{}
	for graphics := range 2 {
		var list *C.nm_process
		var n C.size_t
		if err := l.failure(C.nm_processes(l.c, h, C.int(graphics), &list, &n)); err != nil {
			if graphics == 0 {
				return nil, err
			}
			continue
		}
		for _, p := range unsafe.Slice(list, n) {
			name, ok := names[p.pid]
			if !ok {
				name, _ = l.text(func(s *C.char, n C.uint) C.nm_result { return C.nm_process_name(l.c, C.uint(p.pid), s, n) })
				names[p.pid] = name
			}
			q := Process{PID: int(p.pid), Name: name, Bytes: uint64(p.bytes), Known: true, Graphics: graphics == 1}
			if q.Bytes == ^uint64(0) { // NVML_VALUE_NOT_AVAILABLE
				q.Bytes, q.Known = 0, false
			}
			out = append(out, q)
		}
		C.free(unsafe.Pointer(list))
	}
	return out, nil
}

// asking is held while Neighbours asks, for as long as it takes: a process in which NVML hangs has one thread there.
var asking = make(chan struct{}, 1)

// Neighbours are the processes on the device with this UUID, the caller among them, as NVML lists them before ctx ends. It
// is for a process that has run into its device's end and may be about to die: NVML is opened, asked and closed again, in a
// thread of its own, and where that hangs Neighbours returns all the same.
func Neighbours(ctx context.Context, uuid [16]byte) ([]Process, error) {
	return neighbours(ctx, "", uuid)
}

func neighbours(ctx context.Context, path string, uuid [16]byte) ([]Process, error) {
	select {
	case asking <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("NVML has not answered an earlier call: %w", context.Cause(ctx))
	}
	var loaded atomic.Pointer[Library]
	return within(ctx, &loaded, func() ([]Process, error) {
		defer func() { <-asking }()
		l, err := open(path, &loaded)
		if err != nil {
			return nil, err
		}
		defer func() {
			loaded.Store(nil)
			_ = l.Close() // nothing follows from it
		}()
		return l.on(uuid)
	})
}

// on lists the processes on one device.
func (l *Library) on(uuid [16]byte) ([]Process, error) {
	var list []Process
	var failed error
	found := false
	err := l.each(func(h C.nvmlDevice_t, d Device) bool {
		if h != nil && d.UUID == uuid {
			found = true
			list, failed = l.processes(h)
		}
		return !found
	})
	switch {
	case err != nil:
		return nil, err
	case !found:
		return nil, errors.New("NVML knows no device with this UUID")
	}
	return list, failed
}

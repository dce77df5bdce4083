//go:build linux && cgo

package main

/*
#include <string.h>
#include "shim.h"
#include "stack.h"

#cgo noescape shim_getenv
#cgo nocallback shim_getenv
#cgo nocallback shim_thread_id
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	cudaopen "github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/dump"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/host"
	"github.com/cistern-gpu/cistern/internal/share"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/open"
)

func main() {} // never called: buildmode c-shared wants one

// library is the started library.
type library struct {
	*engine.Allocator
	devices    []device // by ordinal
	everywhere everywhere
	sharing    func() *share.Process
	showing    sync.Once
	connecting sync.Once
	node       atomic.Pointer[client.Client] // of the node's broker; nil: none
	consents   host.Consents                 // what the node may pause
	objects    nodeObjects
	reporter   *dump.Reporter // of requests that failed
	forReports reportHistory
	upstream   atomic.Pointer[string] // of pools that name none, as statistics show it; nil: none
	keeping    sync.Mutex             // held by keepStacks; comes before the engine's locks
}

// device is what is kept here for one device.
type device struct {
	streams  streams
	pools    pools
	hooks    hooks
	joining  sync.Once  // with the node's broker
	draining sync.Mutex // held while events are taken from the history and their streams and pools looked up
}

var (
	// current is the library once it has started, nil again after a panic.
	current atomic.Pointer[library]
	// starting is held while it starts.
	starting sync.Mutex
	// broken is the words of the panic that ended it.
	broken atomic.Pointer[string]
)

// started is the library, started with the settings of the environment if need be.
func started() (*library, error) {
	if l := current.Load(); l != nil {
		return l, nil
	}
	return start(conf(), "CISTERN_CONF: ")
}

// conf is the environment's settings as they are now.
func conf() string {
	name := []byte("CISTERN_CONF\x00")
	if c := C.shim_getenv((*C.char)(unsafe.Pointer(&name[0]))); c != nil {
		return goString(c)
	}
	return ""
}

// goString is C.GoString, which looks for the end of the string 32 bytes at a time, beyond it too: right, but not to
// valgrind.
func goString(s *C.char) string {
	if s == nil {
		return ""
	}
	return C.GoStringN(s, C.int(C.strnlen(s, 1<<30)))
}

// openDriver opens the driver that a setting names. A test puts another in its place, by a build tag.
var openDriver = cudaopen.Open

// simulated is what only the simulated device has.
type simulated interface {
	AdoptStreams()
	SetThread(func() uint64)
}

// start starts the library with these settings, unless it is started already. from begins the words about bad ones.
func start(conf, from string) (*library, error) {
	opts, err := config.Parse(conf)
	if err == nil && opts.Upstream != "" && current.Load() == nil {
		err = open.Load(opts.Upstream) // with no lock held: the constructor of a library may come back here
	}
	if err != nil {
		return nil, &failure{C.CISTERN_INVALID, from + err.Error()}
	}
	starting.Lock()
	defer starting.Unlock()
	if words := broken.Load(); words != nil {
		return nil, &failure{C.CISTERN_INTERNAL, *words}
	}
	if l := current.Load(); l != nil {
		return l, nil
	}
	keepThreads()
	drv, err := openDriver(opts.Driver)
	if err != nil {
		code := C.int(C.CISTERN_DRIVER)
		if opts.Driver != "" {
			code = C.CISTERN_INVALID
		}
		return nil, &failure{code, err.Error()}
	}
	if s, ok := drv.(simulated); ok {
		// A program in C or Python has no other way to make streams there.
		s.AdoptStreams()
		s.SetThread(func() uint64 { return uint64(C.shim_thread_id()) })
	}
	a, err := engine.New(drv, opts)
	if err != nil {
		return nil, err
	}
	a.Stacks.Catch(nil)                                                   // its callers are no Go code
	a.SetHistoryThread(func() uint32 { return uint32(syscall.Gettid()) }) // of the C caller, whose thread a call stays on
	limitHeap()
	l := &library{Allocator: a, devices: make([]device, a.DeviceCount()),
		sharing:  sync.OnceValue(func() *share.Process { return share.New(a, shareGuard{}) }),
		reporter: reporter(a)}
	l.everywhere.version.Store(1)
	if opts.Upstream != "" {
		if err := l.setUpstream(opts.Upstream, func(d cuda.Device) (resource.Resource, error) { return open.Parse(drv, d, opts.Upstream) }); err != nil {
			return nil, err
		}
	}
	if err := l.reportTo(opts.Report, opts.ReportChild); err != nil {
		return nil, err
	}
	if opts.History > 0 {
		for d := range l.devices {
			record(cuda.Device(d), true)
		}
	}
	l.stacksAsSet(opts)
	current.Store(l)
	C.stack_watch_set(C.WATCH_START, 0)
	return l, nil
}

//export coreInit
func coreInit(text *C.char) (code C.int) {
	defer caught(&code)
	want, from := conf(), "CISTERN_CONF: "
	if text != nil {
		want, from = goString(text), ""
	}
	l, err := start(want, from)
	if err != nil {
		return fail(err)
	}
	opts, err := config.Parse(want)
	if err != nil {
		return fail(&failure{C.CISTERN_INVALID, from + err.Error()})
	}
	if opts != l.Options() {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("the library is in use already, with the settings %q, not %q",
			l.Options().String(), opts.String())})
	}
	return C.CISTERN_OK
}

//export coreDeviceCount
func coreDeviceCount() (n C.int) {
	code := C.int(C.CISTERN_OK)
	defer func() {
		if code != C.CISTERN_OK {
			n = -1
		}
	}()
	defer caught(&code)
	l, err := started()
	if err != nil {
		code = fail(err)
		return -1
	}
	return C.int(l.DeviceCount())
}

// device is the engine of a device, started if need be.
func (l *library) device(d C.int) (*engine.Device, error) {
	dev, err := l.Device(cuda.Device(d))
	if errors.Is(err, cuda.ErrOutOfMemory) {
		dev, err = l.makeRoom(cuda.Device(d), err)
	}
	if err == nil && l.devices[d].hooks.version.Load() != l.everywhere.version.Load() {
		l.catchUp(d, dev)
	}
	return dev, err
}

// idle finds the engine of a device without starting it: nil where it is not in use.
func (l *library) idle(d C.int) (*engine.Device, error) {
	if d < 0 || int(d) >= len(l.devices) {
		return l.device(d) // fails, in the engine's words
	}
	dev, _ := l.Started(cuda.Device(d))
	return dev, nil
}

// inUse is the library, started if need be, and the engine of a device; ifUsed the same with nil for the engine of a device
// that is not in use.
func inUse(d C.int) (*library, *engine.Device, error) {
	l, err := started()
	if err != nil {
		return nil, nil, err
	}
	dev, err := l.device(d)
	return l, dev, err
}

func ifUsed(d C.int) (*library, *engine.Device, error) {
	l, err := started()
	if err != nil {
		return nil, nil, err
	}
	dev, err := l.idle(d)
	return l, dev, err
}

// The Go heap. Without a limit the collector would run whenever the heap has doubled, beside whatever the host program
// does; with one it runs when there is something to win. The limit follows what is live, so that a program with
// millions of blocks does not collect without end.
const heapLimit = 64 << 20

func limitHeap() {
	stopScavenger()
	debug.SetGCPercent(-1)
	reserveHeap()
	debug.SetMemoryLimit(heapLimit)
	watchHeap()
}

// reserveHeap takes the addresses that the heap needs below its limit. Go ends the process where it gets no more, as under a limit
// on address space (RLIMIT_AS), and never gives addresses back. It takes them in pieces smaller than one of the runtime's arenas
// (64 MiB), because under valgrind the runtime announces only the first arena of a larger piece.
func reserveHeap() {
	for i := range reserved {
		reserved[i] = make([]byte, heapLimit/2)
	}
	clear(reserved[:])
	debug.FreeOSMemory()
}

var reserved [4][]byte

// tidy has the collector run, beside all threads, once so much of the heap may be garbage: a program that pauses and resumes for
// days need not hold as much as the limit for it.
const heapSlack = 8 << 20

var tidying atomic.Bool

func tidy() {
	heap := [2]metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(heap[:])
	if heap[0].Value.Uint64() < heap[1].Value.Uint64()+heapSlack || !tidying.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer tidying.Store(false)
		debug.FreeOSMemory() // collects, and gives back what is free then
	}()
}

// watchHeap has the limit follow after each collection.
func watchHeap() {
	type sentinel struct{ _ *int }
	runtime.AddCleanup(&sentinel{}, func(int) {
		fitLimit()
		watchHeap()
	}, 0)
}

// stackStep is by how much the limit follows the stacks.
const stackStep = 8 << 20

// fitLimit makes the limit three times what was live after the last collection, and adds what stacks take: they count under
// it, but no collection wins them back.
func fitLimit() {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}}
	metrics.Read(sample)
	live, stacks := int64(sample[0].Value.Uint64()), int64(sample[1].Value.Uint64())
	if want := max(int64(heapLimit), 3*live) + stacks/stackStep*stackStep; want != debug.SetMemoryLimit(-1) {
		debug.SetMemoryLimit(want)
	}
}

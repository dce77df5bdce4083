//go:build linux && cgo

package nvml

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/nvml/standin"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

const (
	driver = "driver version=580.65.06"
	gpu0   = `gpu uuid=GPU-00010203-0405-0607-0809-0a0b0c0d0e0f name="NVIDIA H200" bus=00000000:0F:00.0 total=150000 reserved=600 used=4000 util=37 memutil=12`
	gpu1   = `gpu uuid=GPU-10010203-0405-0607-0809-0a0b0c0d0e0f name="NVIDIA H200" bus=00000000:2F:00.0 total=150000 used=70`
)

func uuid(first byte) [16]byte {
	id := [16]byte{first}
	for i := 1; i < 16; i++ {
		id[i] = byte(i)
	}
	return id
}

func opened(t *testing.T, missing ...string) *Library {
	t.Helper()
	l, err := Open(t.Context(), standin.Build(t, missing...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func devices(t *testing.T, l *Library) []Device {
	t.Helper()
	d, err := l.Devices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDevices(t *testing.T) {
	file := standin.Describe(t, driver, gpu0,
		"process pid=4711 bytes=1000 name=/usr/bin/python3", "process pid=4712 bytes=na", "process pid=4711 bytes=5 kind=graphics",
		gpu1)
	l := opened(t)
	want := []Device{
		{UUID: uuid(0), Name: "NVIDIA H200", BusID: "00000000:0F:00.0", Memory: Memory{150000, 4000, 145400, 600},
			Utilization: Utilization{37, 12, true}, Processes: []Process{
				{PID: 4711, Name: "/usr/bin/python3", Bytes: 1000, Known: true},
				{PID: 4712},
				{PID: 4711, Name: "/usr/bin/python3", Bytes: 5, Known: true, Graphics: true},
			}},
		{Index: 1, UUID: uuid(0x10), Name: "NVIDIA H200", BusID: "00000000:2F:00.0", Memory: Memory{150000, 70, 149930, 0},
			Utilization: Utilization{0, 0, true}},
	}
	if got := devices(t, l); !reflect.DeepEqual(got, want) {
		t.Errorf("devices are\n%+v; want\n%+v", got, want)
	}
	standin.Change(t, file, driver, gpu1)
	if got := devices(t, l); len(got) != 1 || got[0].Memory.Used != 70 || got[0].Index != 0 {
		t.Errorf("after the machine changed: %+v", got)
	}
	if v, err := l.Driver(t.Context()); v != "580.65.06" || err != nil {
		t.Errorf("driver %q, %v", v, err)
	}
}

// Drivers disagree about how long an entry in a list of processes is, and old ones lack the newer calls.
func TestProcessLists(t *testing.T) {
	const some = 150 // more than fit the first time
	lines := []string{driver, gpu0}
	for i := range some {
		lines = append(lines, fmt.Sprintf("process pid=%d bytes=%d", 1000+i, i<<30))
	}
	check := func(t *testing.T, l *Library) {
		t.Helper()
		d := devices(t, l)[0]
		if len(d.Processes) != some || len(d.Errors) != 0 {
			t.Fatalf("%d processes, %v", len(d.Processes), d.Errors)
		}
		for i, p := range d.Processes {
			if want := (Process{PID: 1000 + i, Bytes: uint64(i) << 30, Known: true}); p != want {
				t.Fatalf("process %d is %+v, want %+v", i, p, want)
			}
		}
	}
	for _, size := range []int{16, 24, 32} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			standin.Describe(t, append(lines, fmt.Sprintf("entries size=%d", size))...)
			check(t, opened(t))
		})
	}
	newest := []string{"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"}
	t.Run("version 2", func(t *testing.T) {
		standin.Describe(t, lines...)
		check(t, opened(t, newest...))
	})
	t.Run("no version", func(t *testing.T) {
		standin.Describe(t, append(lines, "entries size=32")...)
		check(t, opened(t, append(newest, "nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v2")...))
	})
	t.Run("none at all", func(t *testing.T) {
		standin.Describe(t, lines...)
		l := opened(t, append(newest, "nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses")...)
		d := devices(t, l)[0]
		wantError(t, d.Errors, "nvmlDeviceGetComputeRunningProcesses: the installed driver does not have it")
		if d.Memory.Total != 150000 || d.Processes != nil {
			t.Errorf("the rest is %+v", d)
		}
	})
}

func wantError(t *testing.T, errs []error, want string) {
	t.Helper()
	if len(errs) != 1 || errs[0].Error() != want {
		t.Errorf("errors %v, want one: %s", errs, want)
	}
}

func TestMemory(t *testing.T) {
	standin.Describe(t, driver, gpu0, "counts reserved=used")
	if m := devices(t, opened(t))[0].Memory; m != (Memory{150000, 4000, 145400, 600}) {
		t.Errorf("memory %+v where used includes what is reserved", m)
	}
	if m := devices(t, opened(t, "nvmlDeviceGetMemoryInfo_v2"))[0].Memory; m != (Memory{150000, 4600, 145400, 0}) {
		t.Errorf("memory %+v of a driver that knows nothing of reserved memory", m)
	}
}

// One GPU's trouble is its own, and in NVML's words.
func TestTrouble(t *testing.T) {
	standin.Describe(t, driver, gpu0, gpu1, "fail call=nvmlDeviceGetMemoryInfo code=15 device=0",
		"fail call=nvmlDeviceGetUtilizationRates code=3 device=1")
	d := devices(t, opened(t))
	wantError(t, d[0].Errors, "nvmlDeviceGetMemoryInfo_v2: GPU is lost")
	wantError(t, d[1].Errors, "nvmlDeviceGetUtilizationRates: Not Supported")
	if d[0].Memory != (Memory{}) || d[1].Memory.Used != 70 || d[1].Utilization.Known {
		t.Errorf("devices %+v", d)
	}
	standin.Describe(t, driver, gpu0, gpu1, "fail call=nvmlDeviceGetHandleByIndex code=15 device=0")
	d = devices(t, opened(t))
	wantError(t, d[0].Errors, "nvmlDeviceGetHandleByIndex_v2: GPU is lost")
	if len(d) != 2 || d[1].Index != 1 || d[1].Memory.Used != 70 {
		t.Errorf("devices %+v", d)
	}
	standin.Describe(t, driver, "fail call=nvmlDeviceGetCount code=999")
	_, err := opened(t).Devices(t.Context())
	var e *Error
	if !errors.As(err, &e) || e.Call != "nvmlDeviceGetCount_v2" || e.Code != 999 || e.Words != "Unknown Error" {
		t.Errorf("%v", err)
	}
}

func TestInstances(t *testing.T) {
	standin.Describe(t, driver, gpu1, gpu0,
		`mig gi=3 ci=0 uuid=MIG-20010203-0405-0607-0809-0a0b0c0d0e0f name="NVIDIA H200 MIG 1g.18gb" total=18000 reserved=20 used=100`,
		"process pid=77 bytes=90",
		`mig gi=4 ci=1 uuid=MIG-30010203-0405-0607-0809-0a0b0c0d0e0f name="NVIDIA H200 MIG 1g.18gb" total=18000 used=5`)
	d := devices(t, opened(t))
	if len(d) != 4 {
		t.Fatalf("%+v", d)
	}
	want := Device{Index: 1, MIG: true, GPUInstance: 3, UUID: uuid(0x20), Name: "NVIDIA H200 MIG 1g.18gb", BusID: "00000000:0F:00.0",
		Memory: Memory{18000, 100, 17880, 20}, Processes: []Process{{PID: 77, Bytes: 90, Known: true}}}
	if !reflect.DeepEqual(d[2], want) {
		t.Errorf("instance\n%+v; want\n%+v", d[2], want)
	}
	if d[0].MIG || d[1].MIG || d[3].UUID != uuid(0x30) || d[3].ComputeInstance != 1 {
		t.Errorf("%+v", d)
	}
	list, err := neighbours(t.Context(), standin.Build(t), uuid(0x20))
	if err != nil || len(list) != 1 || list[0].PID != 77 {
		t.Errorf("on the instance: %v, %v", list, err)
	}
}

func TestNoNVML(t *testing.T) {
	refuses := func(name, path, says string) {
		t.Helper()
		l, err := Open(t.Context(), path)
		if err == nil {
			t.Fatalf("%s: opened %v", name, l)
		}
		if s := err.Error(); !strings.Contains(s, says) || strings.Contains(s, "\n") {
			t.Errorf("%s: %q; want one line with %q", name, s, says)
		}
	}
	refuses("no library", "/nowhere/libnvidia-ml.so.1", "NVML: /nowhere/libnvidia-ml.so.1: cannot open")
	refuses("not NVML", standin.Build(t, "nvmlInit_v2"), "not NVIDIA's management library")
	t.Setenv("STANDIN_NVML", "")
	refuses("no driver", standin.Build(t), "nvmlInit_v2: Driver Not Loaded")
	standin.Describe(t, "fail call=nvmlInit code=18")
	refuses("another driver", standin.Build(t), "nvmlInit_v2: Driver/library version mismatch")
	if _, err := neighbours(t.Context(), "/nowhere/libnvidia-ml.so.1", uuid(0)); err == nil {
		t.Error("neighbours without a library")
	}
}

func TestNeighbours(t *testing.T) {
	standin.Describe(t, driver, gpu0, "process pid=1 bytes=10", gpu1, "process pid=2 bytes=20", "process pid=3 bytes=30 kind=graphics")
	library := standin.Build(t)
	list, err := neighbours(t.Context(), library, uuid(0x10))
	if want := []Process{{PID: 2, Bytes: 20, Known: true}, {PID: 3, Bytes: 30, Known: true, Graphics: true}}; err != nil || !reflect.DeepEqual(list, want) {
		t.Errorf("%+v, %v; want %+v", list, err, want)
	}
	if _, err := neighbours(t.Context(), library, uuid(0x99)); err == nil || !strings.Contains(err.Error(), "no device with this UUID") {
		t.Errorf("a device that is not there: %v", err)
	}
	standin.Describe(t, driver, gpu0, "fail call=nvmlDeviceGetComputeRunningProcesses code=4")
	if _, err := neighbours(t.Context(), library, uuid(0)); err == nil || err.Error() != "nvmlDeviceGetComputeRunningProcesses_v3: Insufficient Permissions" {
		t.Errorf("without permission: %v", err)
	}
}

// A caller gets on in time when NVML hangs, gets the name of the call, and leaves one thread behind, however often it asks.
func TestHang(t *testing.T) {
	file := standin.Describe(t, driver, gpu0, "hang call=nvmlDeviceGetName")
	library := standin.Build(t)
	within := func(d time.Duration) context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		t.Cleanup(cancel)
		return ctx
	}
	const name = "nvmlDeviceGetName does not return"
	// How long a busy machine takes until it has come to the call that hangs is not known: so more and more time is given.
	says := func(what, want string, ask func(context.Context) error, again func()) {
		t.Helper()
		for d := time.Second; ; d *= 2 {
			err := ask(within(d))
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("%s: %v", what, err)
			}
			if strings.Contains(err.Error(), want) {
				return
			}
			if d > time.Minute {
				t.Fatalf("%s: %v; want %s", what, err, want)
			}
			again()
		}
	}
	says("neighbours", name, func(ctx context.Context) error {
		_, err := neighbours(ctx, library, uuid(0))
		return err
	}, func() {
		standin.Change(t, file, driver, gpu0)
		if _, err := neighbours(t.Context(), library, uuid(0)); err != nil {
			t.Error(err)
		}
		standin.Change(t, file, driver, gpu0, "hang call=nvmlDeviceGetName")
	})
	before := runtime.NumGoroutine()
	took := time.Hour // the shortest
	for range 20 {
		begin := time.Now()
		if _, err := neighbours(within(50*time.Millisecond), library, uuid(0)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("neighbours again: %v", err)
		}
		took = min(took, time.Since(begin))
	}
	if took > time.Second {
		t.Errorf("a question of 50 ms took %v", took)
	}
	ends(t, before+5) // the timers' own come and go
	l, err := Open(t.Context(), library)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		says("devices", name, func(ctx context.Context) error {
			_, err := l.Devices(ctx)
			return err
		}, func() {})
	}
	if err := l.Close(); err == nil || !strings.Contains(err.Error(), name) {
		t.Errorf("closed in the middle of a call: %v", err)
	}
	// When it comes back everything is as before.
	standin.Change(t, file, driver, gpu0)
	if d := devices(t, l); len(d) != 1 || len(d[0].Errors) != 0 {
		t.Errorf("afterwards: %+v", d)
	}
	if list, err := neighbours(t.Context(), library, uuid(0)); err != nil || len(list) != 0 {
		t.Errorf("neighbours afterwards: %v, %v", list, err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	before = runtime.NumGoroutine()
	hung := standin.Describe(t, "hang call=nvmlInit")
	says("open", "nvmlInit_v2 does not return", func(ctx context.Context) error {
		_, err := Open(ctx, library)
		return err
	}, func() {})
	standin.Change(t, hung, driver)
	ends(t, before)
}

// ends waits until no more goroutines are left than so many.
func ends(t *testing.T, most int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > most; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines are left, want %d", runtime.NumGoroutine(), most)
		}
	}
}

// TestLate: a caller that sees only late that it has waited too long takes an answer that has come, and looks at nothing that was
// freed meanwhile.
func TestLate(t *testing.T) {
	over := make(chan struct{})
	close(over)
	for range 100 {
		answer := make(chan int, 1)
		answer <- 7
		if a, ok := await(answer, over); a != 7 || !ok {
			t.Fatal("an answer that was there was passed over")
		}
	}
	if a, ok := await(make(chan int), over); ok {
		t.Errorf("answer %d", a)
	}
	standin.Describe(t, driver, gpu0)
	l, err := Open(t.Context(), standin.Build(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.late(context.DeadlineExceeded); l.c != nil || err.Error() != "NVML is busy: context deadline exceeded" {
		t.Errorf("of what is closed: %v", err)
	}
}

// TestNoDescriptors: asking again and again keeps nothing open.
func TestNoDescriptors(t *testing.T) {
	standin.Describe(t, driver, gpu0)
	library := standin.Build(t)
	var before int
	for i := range 20 {
		if _, err := neighbours(t.Context(), library, uuid(0)); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			before = testkit.Descriptors(t)
		}
	}
	if after := testkit.Descriptors(t); after > before {
		t.Errorf("%d descriptors, %d after the first time", after, before)
	}
}

package sim

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"golang.org/x/sys/unix"
)

// TestMain is also the program of the other processes: it takes half of the device and waits for the end of its input, or takes and
// releases until it is killed.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && (os.Args[1] == "half" || os.Args[1] == "churn") {
		if err := otherProcess(os.Args[1] == "churn", os.Args[2]); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

const sharedGranules = 16 // of the devices of these tests

func sharedOptions(path string) Options {
	return Options{Capacity: sharedGranules * DefaultGranularity, Shared: path}
}

func otherProcess(churn bool, path string) error {
	d, err := Open(sharedOptions(path))
	if err != nil {
		return err
	}
	if churn {
		os.Stdout.WriteString("ready\n")
		for {
			h, err := d.MemCreate(rand.Uint64N(4)*DefaultGranularity+DefaultGranularity, cuda.MemProp{})
			if err == nil {
				err = d.MemRelease(h)
			} else if err.(*cuda.Error).Code == cuda.ErrOutOfMemory {
				err = nil
			}
			if err != nil {
				return err
			}
		}
	}
	if _, err = d.MemCreate(sharedGranules/2*DefaultGranularity, cuda.MemProp{}); err != nil {
		return err
	}
	os.Stdout.WriteString("ready\n")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// startOther starts another process, which has its memory once this returns.
func startOther(t *testing.T, what, path string) (cmd *exec.Cmd, end func()) {
	t.Helper()
	self, err := os.Executable()
	ok(t, err)
	cmd = exec.CommandContext(t.Context(), self, what, path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	ok(t, err)
	out, err := cmd.StdoutPipe()
	ok(t, err)
	ok(t, cmd.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}
	return cmd, func() {
		t.Helper()
		ok(t, in.Close())
		ok(t, cmd.Wait())
	}
}

func sharedDriver(t testing.TB, path string) *Driver {
	t.Helper()
	d, err := Open(sharedOptions(path))
	ok(t, err)
	ok(t, d.RetainContext(0))
	return d
}

func wantFree(t testing.TB, d *Driver, granules uint64) {
	t.Helper()
	free, total, err := d.MemInfo(0)
	ok(t, err)
	if free != granules*DefaultGranularity || total != sharedGranules*DefaultGranularity {
		t.Errorf("%d of %d bytes are free; want %d granules", free, total, granules)
	}
}

// Whatever takes device memory takes it from both drivers, and gives it back to both.
func TestSharedDevice(t *testing.T) {
	const g = DefaultGranularity
	path := filepath.Join(t.TempDir(), "gpu")
	a, b := sharedDriver(t, path), sharedDriver(t, path)
	h := must[cuda.Handle](t)(a.MemCreate(10*g, cuda.MemProp{}))
	wantFree(t, b, 6)
	_, err := b.MemCreate(7*g, cuda.MemProp{})
	wantCode(t, err, cuda.ErrOutOfMemory)
	_, err = b.MemAlloc(0, 7*g)
	wantCode(t, err, cuda.ErrOutOfMemory)
	p := must[cuda.Ptr](t)(b.MemAlloc(0, 6*g))
	_, err = a.MemAlloc(0, 1)
	wantCode(t, err, cuda.ErrOutOfMemory)
	wantFree(t, a, 0)
	ok(t, a.MemRelease(h))
	ok(t, b.MemFree(0, p))
	wantFree(t, a, sharedGranules)

	pool := must[cuda.MemPool](t)(a.MemPoolDefault(0))
	q := must[cuda.Ptr](t)(a.MemAllocAsync(0, g, pool, cuda.StreamLegacy)) // which takes the pool's grain, 16 granules
	wantFree(t, b, 0)
	_, err = b.MemAllocAsync(0, g, must[cuda.MemPool](t)(b.MemPoolDefault(0)), cuda.StreamLegacy)
	wantCode(t, err, cuda.ErrOutOfMemory)
	ok(t, a.MemFreeAsync(0, q, cuda.StreamLegacy))
	ok(t, a.StreamSynchronize(0, cuda.StreamLegacy))
	ok(t, a.MemPoolTrim(0, pool, 0))
	wantFree(t, b, sharedGranules)

	c := sharedDriver(t, path)
	small := must[cuda.Ptr](t)(c.MemAlloc(0, 1)) // in the record that a had
	h = must[cuda.Handle](t)(a.MemCreate(2*g, cuda.MemProp{}))
	a.SetOutside(0, 3*g)
	wantFree(t, a, sharedGranules-6)
	wantFree(t, b, sharedGranules-3)
	ok(t, c.MemFree(0, small))
	ok(t, a.MemRelease(h))
	must[cuda.Handle](t)(a.MemCreate(2*g, cuda.MemProp{Location: cuda.LocationHostNUMA}))
	wantFree(t, b, sharedGranules)
}

// Memory of one device is not that of another, and a record that is free is used again.
func TestSharedDevices(t *testing.T) {
	const g = DefaultGranularity
	opt := sharedOptions(filepath.Join(t.TempDir(), "gpu"))
	opt.Devices = 2
	a, b := must[*Driver](t)(Open(opt)), must[*Driver](t)(Open(opt))
	for range 3 {
		h := must[cuda.Handle](t)(a.MemCreate(16*g, cuda.MemProp{Device: 1}))
		k := must[cuda.Handle](t)(b.MemCreate(16*g, cuda.MemProp{Device: 0}))
		_, err := b.MemCreate(g, cuda.MemProp{Device: 1})
		wantCode(t, err, cuda.ErrOutOfMemory)
		ok(t, a.MemRelease(h))
		ok(t, b.MemRelease(k))
	}
	if st, err := os.Stat(opt.Shared); err != nil || st.Size() != 3*sharedBlock {
		t.Errorf("the file is %v, %v; want a header and two records", st, err)
	}
}

// A mapping keeps the memory of a released handle from the others too.
func TestSharedMapping(t *testing.T) {
	const g = DefaultGranularity
	path := filepath.Join(t.TempDir(), "gpu")
	a, b := sharedDriver(t, path), sharedDriver(t, path)
	p := must[cuda.Ptr](t)(a.AddressReserve(4*g, g, 0))
	h := chunkAt(t, a, p, 4*g)
	ok(t, a.MemRelease(h))
	wantFree(t, b, sharedGranules-4)
	ok(t, a.MemUnmap(p, 4*g))
	wantFree(t, b, sharedGranules)
}

func TestSharedClose(t *testing.T) {
	const g = DefaultGranularity
	path := filepath.Join(t.TempDir(), "gpu")
	before := testkit.Descriptors(t)
	a, b := sharedDriver(t, path), sharedDriver(t, path)
	h := must[cuda.Handle](t)(a.MemCreate(10*g, cuda.MemProp{}))
	ok(t, a.Close())
	ok(t, a.Close())
	wantFree(t, b, sharedGranules)
	ok(t, a.MemRelease(h)) // which gives nothing to the others once more
	_, err := a.MemCreate(g, cuda.MemProp{})
	wantCode(t, err, cuda.ErrDeinitialized)
	_, _, err = a.MemInfo(0)
	wantCode(t, err, cuda.ErrDeinitialized)
	wantFree(t, b, sharedGranules)
	ok(t, b.Close())
	if n := testkit.Descriptors(t); n != before {
		t.Errorf("%d descriptors, %d before", n, before)
	}
	ok(t, New(Options{}).Close())
}

// Memory of another process is free once it ends, however it ends, and before its parent waits for it.
func TestSharedProcesses(t *testing.T) {
	const g = DefaultGranularity
	path := filepath.Join(t.TempDir(), "gpu")
	d := sharedDriver(t, path)
	wantFree(t, d, sharedGranules)
	_, end := startOther(t, "half", path)
	wantFree(t, d, sharedGranules/2)
	_, err := d.MemCreate((sharedGranules/2+1)*g, cuda.MemProp{})
	wantCode(t, err, cuda.ErrOutOfMemory)
	end()
	ok(t, d.MemRelease(must[cuda.Handle](t)(d.MemCreate(sharedGranules*g, cuda.MemProp{}))))

	cmd, _ := startOther(t, "half", path)
	wantFree(t, d, sharedGranules/2)
	ok(t, cmd.Process.Kill())
	var info unix.Siginfo
	ok(t, unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil))
	wantFree(t, d, sharedGranules)
	if err := cmd.Wait(); err == nil {
		t.Error("the process was not killed")
	}

	cmd, _ = startOther(t, "half", path)
	ok(t, cmd.Process.Kill())
	if err := cmd.Wait(); err == nil {
		t.Error("the process was not killed")
	}
	h := must[cuda.Handle](t)(d.MemCreate(sharedGranules*g, cuda.MemProp{})) // without a look at what is free
	ok(t, d.MemRelease(h))
}

// A process that has the number of one that ended does not keep its memory.
func TestSharedStartTime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gpu")
	d := sharedDriver(t, path)
	r := d.shared.self
	r.driver++
	r.bytes = 4 * DefaultGranularity
	put := func(i int, r shareRecord) { ok(t, d.shared.locked(func() error { return d.shared.put(i, r) })) }
	put(0, r)
	wantFree(t, d, sharedGranules-4)
	r.driver++
	r.start++
	put(1, r)
	wantFree(t, d, sharedGranules-4)
	if got := d.shared.records; len(got) != 2 || got[1] != (shareRecord{}) {
		t.Errorf("records %v", got)
	}
	r.start = d.shared.self.start
	r.pid = 1 << 29
	put(1, r)
	wantFree(t, d, sharedGranules-4)
}

// Drivers of this process and of others take and release at once; no more than the capacity is ever taken, and a process that is
// killed at any moment leaves a sound file. The reader checks the sums at each call.
func TestSharedAtOnce(t *testing.T) {
	const g = DefaultGranularity
	path := filepath.Join(t.TempDir(), "gpu")
	var taken atomic.Int64
	var all sync.WaitGroup
	for range 4 {
		d := sharedDriver(t, path)
		all.Go(func() {
			var mine []cuda.Handle
			for range 2000 {
				h, err := d.MemCreate(g, cuda.MemProp{})
				if err == nil {
					mine = append(mine, h)
					if now := taken.Add(1); now > sharedGranules {
						t.Errorf("%d granules are taken of %d", now, sharedGranules)
					}
					continue
				}
				if code := err.(*cuda.Error).Code; code != cuda.ErrOutOfMemory {
					t.Errorf("create: %v", err)
					return
				}
				taken.Add(-int64(len(mine)))
				for _, h := range mine {
					if err := d.MemRelease(h); err != nil {
						t.Error(err)
					}
				}
				mine = mine[:0]
			}
			taken.Add(-int64(len(mine)))
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	for range 10 {
		cmd, _ := startOther(t, "churn", path)
		ok(t, cmd.Process.Kill())
		if err := cmd.Wait(); err == nil || err.Error() != "signal: killed" {
			t.Errorf("the process ended by itself: %v", err)
		}
	}
	all.Wait()
	wantFree(t, sharedDriver(t, path), sharedGranules)
}

// While a driver reads and writes the file no other does.
func TestSharedLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gpu")
	d := sharedDriver(t, path)
	other, err := openLocked(path)
	ok(t, err)
	defer other.close()
	try := func() error { return syscall.Flock(other.fd, syscall.LOCK_SH|syscall.LOCK_NB) }
	ok(t, d.shared.locked(func() error {
		if err := try(); err != syscall.EWOULDBLOCK {
			t.Errorf("a lock beside the driver's: %v", err)
		}
		return nil
	}))
	ok(t, try())
}

// A file that is damaged, of another program or of another machine is one line of error, and stays as it is.
func TestSharedBadFile(t *testing.T) {
	opt := sharedOptions("")
	m := machineID{1, opt.Capacity}
	head := m.block()
	full := shareRecord{pid: 1, bytes: opt.Capacity}.block()
	wrong := func(r shareRecord) string { b := r.block(); return string(head[:]) + string(b[:]) }
	other := machineID{2, 8 * gib}.block()
	flipped := bytes.Clone(head[:])
	flipped[20] ^= 1
	for says, contents := range map[string]string{
		"another program's file: expected an empty one":                             "a letter",
		"another program's file":                                                    strings.Repeat("x", 4096),
		"damaged: the header's checksum":                                            string(flipped),
		"(devices: 2, bytes each: 8589934592): expected devices: 1, bytes each: 33": string(other[:]),
		"damaged: 100 bytes: expected a multiple of 64":                             string(head[:]) + strings.Repeat("\x00", 36),
		"damaged: record 1 is none":                                                 wrong(shareRecord{pid: 1, bytes: 1}) + "x" + strings.Repeat("\x00", 63),
		"damaged: record 0 is none":                                                 wrong(shareRecord{pid: 1, device: 1, bytes: 1}),
		"the records of device 0 exceed its":                                        wrong(shareRecord{pid: 1, bytes: 1}) + string(full[:]),
	} {
		opt.Shared = filepath.Join(t.TempDir(), "file")
		ok(t, os.WriteFile(opt.Shared, []byte(contents), 0o600))
		_, err := Open(opt)
		if err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), opt.Shared) || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v; want one line with the path and %q", err, says)
		}
		if after, err := os.ReadFile(opt.Shared); err != nil || string(after) != contents {
			t.Errorf("%s: the file was changed: %q, %v", says, after, err)
		}
	}
	for path, says := range map[string]string{t.TempDir(): "is a directory", "/dev/null": "expected a regular file", "/nowhere/file": "no such file"} {
		opt.Shared = path
		if _, err := Open(opt); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: got %v, want %q", path, err, says)
		}
	}
}

// A file that is damaged while drivers use it fails their calls, and Close says why. So does a descriptor that the program closed.
func TestSharedDamagedLater(t *testing.T) {
	const g = DefaultGranularity
	path := filepath.Join(t.TempDir(), "gpu")
	a, b := sharedDriver(t, path), sharedDriver(t, path)
	must[cuda.Handle](t)(b.MemCreate(g, cuda.MemProp{}))
	ok(t, os.Truncate(path, 100))
	_, err := a.MemCreate(g, cuda.MemProp{})
	wantCode(t, err, cuda.ErrUnknown)
	_, err = a.MemAlloc(0, g)
	wantCode(t, err, cuda.ErrUnknown)
	_, err = a.MemAllocAsync(0, g, must[cuda.MemPool](t)(a.MemPoolDefault(0)), cuda.StreamLegacy)
	wantCode(t, err, cuda.ErrUnknown)
	_, _, err = a.MemInfo(0)
	wantCode(t, err, cuda.ErrUnknown)
	if l := a.Leaks(); l != (Live{}) || a.ReservedBytes(0) != 0 {
		t.Errorf("calls that failed left %+v, %d bytes", l, a.ReservedBytes(0))
	}
	if err := a.Close(); err == nil || !strings.Contains(err.Error(), "damaged: 100 bytes") {
		t.Errorf("Close: %v", err)
	}

	stranger, err := os.OpenFile(filepath.Join(t.TempDir(), "stranger"), os.O_RDWR|os.O_CREATE, 0o600)
	ok(t, err)
	ok(t, syscall.Dup3(int(stranger.Fd()), b.shared.file.fd, syscall.O_CLOEXEC)) // closes the file, and has its number
	defer syscall.Close(b.shared.file.fd)
	_, err = b.MemCreate(g, cuda.MemProp{})
	wantCode(t, err, cuda.ErrUnknown)
	if err := b.Close(); err == nil || !strings.Contains(err.Error(), "closed the file's descriptor") {
		t.Errorf("Close: %v", err)
	}
	if st, err := stranger.Stat(); err != nil || st.Size() != 0 {
		t.Errorf("another file was written, or closed: %v", err)
	}
	ok(t, stranger.Close())
}

// FuzzShared is the reader of the file: what it accepts is what drivers write, and no device has more than its capacity.
func FuzzShared(f *testing.F) {
	m := machineID{2, sharedGranules * DefaultGranularity}
	r := shareRecord{pid: 7, start: 8, driver: 9, device: 1, bytes: DefaultGranularity}.block()
	f.Add(r[:], true)
	f.Add(append(make([]byte, sharedBlock), r[:]...), true)
	f.Add([]byte("x"), false)
	f.Fuzz(func(t *testing.T, in []byte, whole bool) {
		if whole { // each block gets the checksum that the reader asks for, so that its other checks are reached
			in = bytes.Clone(in)
			for b := range slices.Chunk(in, sharedBlock) {
				if len(b) == sharedBlock && !bytes.Equal(b, make([]byte, sharedBlock)) {
					seal((*[sharedBlock]byte)(b))
				}
			}
		}
		head := m.block()
		if _, err := parseShared(in, m, nil); err == nil && !bytes.HasPrefix(in, []byte(sharedMagic)) {
			t.Error("a file without a header was accepted")
		}
		file := append(head[:], in...)
		records, err := parseShared(file, m, nil)
		if err != nil {
			return
		}
		back, taken := head[:], [2]uint64{}
		for _, r := range records {
			b := r.block()
			back = append(back, b[:]...)
			if r.bytes != 0 {
				taken[r.device] += r.bytes
			}
		}
		if !bytes.Equal(back, file) || taken[0] > m.capacity || taken[1] > m.capacity {
			t.Errorf("records %v, %d and %d bytes, of %x", records, taken[0], taken[1], file)
		}
	})
}

// BenchmarkShared is a chunk made and released beside a thousand other drivers that have memory.
func BenchmarkShared(b *testing.B) {
	opt := Options{Shared: filepath.Join(b.TempDir(), "gpu")}
	for range 1000 {
		d := must[*Driver](b)(Open(opt))
		must[cuda.Handle](b)(d.MemCreate(DefaultGranularity, cuda.MemProp{}))
		b.Cleanup(func() { ok(b, d.Close()) })
	}
	d := must[*Driver](b)(Open(opt))
	ok(b, d.RetainContext(0))
	b.Run("create and release", func(b *testing.B) {
		for b.Loop() {
			ok(b, d.MemRelease(must[cuda.Handle](b)(d.MemCreate(DefaultGranularity, cuda.MemProp{}))))
		}
	})
	b.Run("process ended", func(b *testing.B) {
		for b.Loop() {
			if processEnded(d.shared.self.pid, d.shared.self.start) {
				b.Fatal("this process has ended")
			}
		}
	})
}

// TestChunkContents: an exported chunk has one content for all who map it, which outlives the exporter, and then counts for an importer.
func TestChunkContents(t *testing.T) {
	const g = DefaultGranularity
	path := filepath.Join(t.TempDir(), "gpu")
	start := func() *Driver {
		d := New(Options{Shared: path, Capacity: 64 * g, Handles: Exportable, Check: CheckUse})
		ok(t, d.RetainContext(0))
		t.Cleanup(func() { ok(t, d.Close()) })
		return d
	}
	mapped := func(d *Driver, h cuda.Handle) cuda.Ptr {
		p := must[cuda.Ptr](t)(d.AddressReserve(4*g, g, 0))
		ok(t, d.MemMap(p, 4*g, h))
		return p
	}
	read := func(d *Driver, p cuda.Ptr) string {
		b := make([]byte, 8)
		ok(t, d.ReadBack(0, 0, p, b))
		return string(b)
	}
	a, b, c := start(), start(), start()
	h := must[cuda.Handle](t)(a.MemCreate(4*g, cuda.MemProp{Handles: Exportable}))
	p := mapped(a, h)
	ok(t, a.MemSetAccess(p, 4*g, []cuda.Device{0}))
	ok(t, a.Write(0, 0, p+g, []byte("before..")))
	fd := must[int](t)(a.MemExport(h))
	defer syscall.Close(fd)
	ok(t, a.Write(0, 0, p+2*g, []byte("after...")))
	k := must[cuda.Handle](t)(b.MemImport(0, fd))
	q := mapped(b, k)
	wantFault(t, b.Read(0, 0, q, g), FaultNoAccess)
	b = start() // that fault broke the context
	k = must[cuda.Handle](t)(b.MemImport(0, fd))
	q = mapped(b, k)
	ok(t, b.MemSetReadOnly(q, 4*g, []cuda.Device{0}))
	if x, y, z := read(b, q+g), read(b, q+2*g), read(b, q); x != "before.." || y != "after..." || z != strings.Repeat("\xdb", 8) {
		t.Errorf("%q, %q, %q", x, y, z)
	}
	if n := b.ReservedBytes(0); n != 0 {
		t.Errorf("the importer has %d bytes", n)
	}
	ok(t, a.MemUnmap(p, 4*g))
	ok(t, a.MemRelease(h))
	ok(t, a.Close())
	m := must[cuda.Handle](t)(c.MemImport(0, fd)) // the first importer after the exporter has the memory
	if n := c.ReservedBytes(0); n != 4*g {
		t.Errorf("the heir has %d bytes", n)
	}
	ok(t, c.MemRelease(m))
	if n := c.ReservedBytes(0); n != 0 {
		t.Errorf("%d bytes stay", n)
	}
	if x := read(b, q+g); x != "before.." {
		t.Errorf("after the exporter: %q", x)
	}
	wantFault(t, b.Write(0, 0, q, []byte("x")), FaultNoAccess)
	d := start()
	k = must[cuda.Handle](t)(d.MemImport(0, fd))
	q = mapped(d, k)
	ok(t, d.MemSetReadOnly(q, 4*g, []cuda.Device{0}))
	text := []byte("copied")
	err := d.MemcpyAsync(0, q, cuda.Ptr(uintptr(unsafe.Pointer(&text[0]))), 6, 0)
	wantFault(t, err, FaultNoAccess)
}

package share

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/memory"
)

// pair is two connected sockets, neither of which blocks.
func pair(t testing.TB) (a, b int) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	must(t, err)
	return fds[0], fds[1]
}

// dead is the handle of a process that has died: of its socket only the name is left.
func TestDeadExporter(t *testing.T) {
	from, to := newParty(t, config.Options{}), newParty(t, config.Options{})
	h, err := Parse(from.share(from.alloc(mib)))
	must(t, err)
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o700))
	path, fd, err := from.bind(dir)
	must(t, err)
	syscall.Close(fd)
	h.Socket = path
	to.refused(h.String(), "has ended")
	must(t, os.Remove(path))
	to.refused(h.String(), "has ended")
}

// A process that is stopped, or a forked child that has its socket, never answers.
func TestSilentExporter(t *testing.T) {
	from, to := newParty(t, config.Options{}), newParty(t, config.Options{})
	to.timeout = 200 * time.Millisecond
	h, err := Parse(from.share(from.alloc(mib)))
	must(t, err)
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o700))
	path, fd, err := from.bind(dir)
	must(t, err)
	defer syscall.Close(fd)
	h.Socket = path
	to.refusedSoon(h.String(), "did not answer for 200ms")
	for range maxPeers + 10 { // until no other can even queue
		s, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
		must(t, err)
		defer syscall.Close(s)
		if err := syscall.Connect(s, &syscall.SockaddrUnix{Name: path}); err != nil && err != syscall.EAGAIN {
			t.Fatal(err)
		}
	}
	to.refusedSoon(h.String(), "did not answer for 200ms")
}

// refusedSoon is refused, not long after the time that is waited. On a busy machine that may take a few tries.
func (p *party) refusedSoon(handle, words string) {
	p.t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		begin := time.Now()
		p.refused(handle, words)
		took := time.Since(begin)
		if took < p.timeout+2*time.Second {
			return
		}
		if time.Now().After(end) {
			p.t.Fatalf("that took %v", took)
		}
	}
}

// TestStopped: what has come counts also for one that was stopped for longer than it waits. A process that ends waits for nothing, and
// for nothing later either.
func TestStopped(t *testing.T) {
	ours, theirs := pair(t)
	defer syscall.Close(theirs)
	c, err := newConn(ours, noGuard{}, -time.Second) // all the time has passed
	must(t, err)
	defer c.close()
	_, err = syscall.Write(theirs, hello([16]byte{1}, 2))
	must(t, err)
	if k, b, err := c.next(nil, kindHello); k != kindHello || len(b) == 0 || err != nil {
		t.Errorf("what was there is kind %d, %d bytes, %v", k, len(b), err)
	}
	must(t, c.send(refusal("no")))
	if _, _, err := c.next(nil, kindHello); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("where nothing was: %v", err)
	}
	c.timeout = time.Hour
	c.hurry()
	if _, _, err := c.next(nil, kindHello); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one that is to end: %v", err)
	}
}

// exporter answers one importer with what it is given, descriptors of nothing included, and hangs up.
func exporter(t testing.TB, fd int, say ...[]byte) {
	c, err := newConn(fd, noGuard{}, time.Minute)
	if err != nil {
		t.Error(err)
		return
	}
	defer c.close()
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Error(err)
		return
	}
	defer null.Close()
	for i, b := range say {
		if _, _, err := c.next(nil, kindHello, kindWant); err != nil {
			return
		}
		var fds []int
		if i > 0 {
			fds = []int{int(null.Fd()), int(null.Fd())}
		}
		if c.send(b, fds...) != nil {
			return
		}
	}
}

func TestHostileExporter(t *testing.T) {
	chunks := memory.Shared{Size: 2 * mib, Chunks: []memory.SharedChunk{{Size: 2 * mib, Serial: 1}, {Size: 2 * mib, Serial: 2}}}
	good, err := offer(chunks)
	must(t, err)
	half := bytes.Clone(good[:len(good)-chunkSize/2])
	half[8] -= chunkSize / 2
	large := bytes.Clone(good)
	large[11] = 0xff
	other := bytes.Clone(good)
	other[4] = 9
	huge, err := offer(memory.Shared{Size: 1 << 60, Chunks: chunks.Chunks})
	must(t, err)
	for what, c := range map[string]struct {
		say  [][]byte
		says string
	}{
		"nothing":                   {nil, "ended or closed"},
		"half an offer":             {[][]byte{good[:len(good)-3]}, "ended or closed"},
		"an offer and no more":      {[][]byte{good}, "ended or closed"},
		"half a chunk":              {[][]byte{half}, "in the middle of a chunk"},
		"too long":                  {[][]byte{large}, "no such message"},
		"another language":          {[][]byte{[]byte("HTTP/1.1 200 OK\r\n\r\n")}, "does not use Cistern's protocol"},
		"another version":           {[][]byte{other}, "need the same version"},
		"the wrong message":         {[][]byte{span(kindBatch, 0, 1)}, "where none was due"},
		"impossible memory":         {[][]byte{huge}, "do not lie in memory of"},
		"descriptors of nothing":    {[][]byte{good, span(kindBatch, 0, 2)}, "cuMemImportFromShareableHandle"},
		"more descriptors than due": {[][]byte{good, span(kindBatch, 0, 1)}, "sent 2 descriptors for 1 chunks"},
		"chunks not asked for":      {[][]byte{good, span(kindBatch, 1, 1)}, "asked for 2 from 0 on"},
		"no, in many lines":         {[][]byte{refusal("no\nno")}, "refused: no no"},
		"no, later":                 {[][]byte{good, refusal("it is gone")}, "refused: it is gone"},
	} {
		t.Run(what, func(t *testing.T) {
			to := newParty(t, config.Options{})
			ours, theirs := pair(t)
			var wg sync.WaitGroup
			wg.Go(func() { exporter(t, theirs, c.say...) })
			_, err := to.converse(ours)
			wg.Wait()
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v; want one line with %q", err, c.says)
			}
			if now := to.drv.Leaks(); now != to.base {
				t.Errorf("left %+v", now)
			}
		})
	}
}

// converse is Open over a connection that is there already.
func (p *party) converse(fd int) (cuda.Ptr, error) {
	c, err := newConn(fd, p.guard, p.timeout)
	if err != nil {
		return 0, err
	}
	r := &request{h: Handle{PID: 4711}, c: c, given: -1}
	defer r.close()
	if err := r.greet(p.Process); err != nil {
		return 0, err
	}
	return p.a.Sharing.Open(0, "another", r.offered, r.descriptor)
}

// Importers that say nothing, or take nothing, hold up no other; too many get an error.
func TestStuckImporters(t *testing.T) {
	from, to := newParty(t, config.Options{ChunkMax: 2 * mib}), newParty(t, config.Options{})
	from.timeout = time.Hour
	h := from.share(from.alloc(400 * mib))
	const stuck = 20
	from.stick(to, h, stuck)
	to.uses(h, 400*mib)
	must(t, from.a.Free(from.alloc(5*mib)))
	from.answers(stuck) // that is, they are waited for all the time, and no other any more
	for end := time.Now().Add(2 * time.Minute); ; from.stick(to, h, 1) {
		ptr, err := to.Open(h, 0)
		if err != nil {
			if !strings.Contains(err.Error(), fmt.Sprintf("%d processes are being answered already", maxPeers)) {
				t.Error(err)
			}
			break
		}
		must(t, to.Close(ptr))
		if time.Now().After(end) {
			t.Fatal("all are answered")
		}
	}
}

// Importers that say nothing, or take nothing, are not waited for for ever.
func TestStuckImportersEnd(t *testing.T) {
	from, to := newParty(t, config.Options{ChunkMax: 2 * mib}), newParty(t, config.Options{})
	from.timeout = 200 * time.Millisecond
	h := from.share(from.alloc(mib))
	from.stick(to, h, maxPeers)
	for end := time.Now().Add(2 * time.Minute); ; { // on a busy machine one that speaks may take as long as well
		ptr, err := to.Open(h, 0)
		if err == nil {
			must(t, to.Close(ptr))
			break
		}
		if time.Now().After(end) {
			t.Fatalf("those that say nothing are still being answered: %v", err)
		}
	}
}

// stick has so many importers connect of which half say nothing, and the others want much and take nothing.
func (p *party) stick(to *party, handle string, many int) {
	p.t.Helper()
	at, err := Parse(handle)
	must(p.t, err)
	for i := range many {
		fd, err := to.dial(at)
		must(p.t, err)
		p.t.Cleanup(func() { syscall.Close(fd) })
		if i%2 == 0 {
			continue
		}
		for b := append(hello(at.Token, at.ID), bytes.Repeat(span(kindWant, 0, 1), 1000)...); len(b) > 0; {
			n, err := syscall.SendmsgN(fd, b, nil, nil, syscall.MSG_NOSIGNAL)
			if err != nil {
				break // as much as there is room for
			}
			b = b[n:]
		}
	}
}

// answers waits until so many importers are being answered.
func (p *party) answers(many int) {
	p.t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		p.server.mu.Lock()
		n := len(p.server.peers)
		p.server.mu.Unlock()
		if n == many {
			return
		}
		if time.Now().After(end) {
			p.t.Fatalf("%d importers are being answered, not %d", n, many)
		}
	}
}

func TestHostileImporter(t *testing.T) {
	from, to := newParty(t, config.Options{}), newParty(t, config.Options{})
	h := from.share(from.alloc(mib))
	at, err := Parse(h)
	must(t, err)
	greeting := hello(at.Token, at.ID)
	for what, c := range map[string]struct {
		say  []byte
		says string
	}{
		"another language":       {[]byte("GET / HTTP/1.1\r\n\r\n"), "does not use Cistern's protocol"},
		"the wrong message":      {span(kindWant, 0, 1), "where none was due"},
		"hello twice":            {append(bytes.Clone(greeting), greeting...), "where none was due"},
		"more chunks":            {append(bytes.Clone(greeting), span(kindWant, 0, 2)...), "2 descriptors from 0 on, of 1"},
		"later chunks":           {append(bytes.Clone(greeting), span(kindWant, 1, 1)...), "1 descriptors from 1 on, of 1"},
		"chunks that wrap":       {append(bytes.Clone(greeting), span(kindWant, -1, 5)...), "of 1"},
		"no chunk":               {append(bytes.Clone(greeting), span(kindWant, 0, 0)...), "0 descriptors"},
		"descriptors of its own": {append(bytes.Clone(greeting), span(kindWant, 0, 99)...), "99 descriptors"},
	} {
		fd, err := to.dial(at)
		must(t, err)
		if _, err := syscall.SendmsgN(fd, c.say, syscall.UnixRights(fd), nil, syscall.MSG_NOSIGNAL); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		must(t, syscall.SetNonblock(fd, false))
		f := os.NewFile(uintptr(fd), what)
		answer, err := io.ReadAll(f)
		if err != nil && !errors.Is(err, syscall.ECONNRESET) || !strings.Contains(string(answer), c.says) {
			t.Errorf("%s: answered %q, %v; want %q", what, answer, err, c.says)
		}
		f.Close()
	}
	to.uses(h, mib)
}

// world is what the fuzz targets share: making it takes longer than a conversation.
var world struct {
	sync.Once
	p  *Process
	id uint64
}

func fuzzWorld(f *testing.F) {
	world.Do(func() {
		a, err := engine.New(sim.New(sim.Options{Handles: sim.Exportable}), config.Options{ChunkMax: 2 * mib})
		must(f, err)
		dev, err := a.Device(0)
		must(f, err)
		st, err := dev.Stream(cuda.StreamLegacy)
		must(f, err)
		ptr, err := dev.Alloc(5*mib, st)
		must(f, err)
		e, err := a.Sharing.Export(ptr)
		must(f, err)
		world.p, world.id = New(a, nil), e.ID
		world.p.token, world.p.timeout = [16]byte{1}, time.Minute
	})
}

// FuzzExporter is whatever an importer may say: the exporter comes to an end, with no descriptors for one that did not
// know the secret.
func FuzzExporter(f *testing.F) {
	fuzzWorld(f)
	greeting := hello([16]byte{1}, world.id)
	f.Add([]byte{})
	f.Add(greeting)
	f.Add(append(bytes.Clone(greeting), span(kindWant, 0, 2)...))
	f.Add(append(append(bytes.Clone(greeting), span(kindWant, 1, 1)...), span(kindWant, 0, 3)...))
	f.Add(hello([16]byte{2}, world.id))
	f.Fuzz(func(t *testing.T, said []byte) {
		if len(said) > 64<<10 {
			return
		}
		ours, theirs := pair(t)
		c, err := newConn(ours, noGuard{}, world.p.timeout)
		must(t, err)
		peer, err := newConn(theirs, noGuard{}, world.p.timeout)
		must(t, err)
		var wg sync.WaitGroup
		wg.Go(func() {
			peer.send(said)
			syscall.Shutdown(peer.FD, syscall.SHUT_WR)
			var got []int
			for {
				if _, _, err := peer.next(&got, kindOffer, kindBatch, kindRefusal); err != nil {
					break
				}
			}
			for _, fd := range got {
				syscall.Close(fd)
			}
			if len(got) > 0 && !bytes.HasPrefix(said, greeting) {
				t.Errorf("%q was answered with %d descriptors", said, len(got))
			}
		})
		s := &server{p: world.p}
		if err := s.answer(c); err != nil {
			c.send(refusal(err.Error()))
			if strings.ContainsRune(oneLine(err.Error()), '\n') {
				t.Errorf("the reason is %q", err)
			}
		}
		c.close()
		wg.Wait()
		peer.close()
	})
}

// FuzzImporter is whatever an exporter may say, with descriptors of chunks: an opening that works, or an error in one
// line and nothing left.
func FuzzImporter(f *testing.F) {
	fuzzWorld(f)
	for _, m := range []memory.Shared{
		{Size: 512, Chunks: []memory.SharedChunk{{Size: 2 * mib, Serial: 1}}},
		{Size: 3 * mib, Offset: 512, Chunks: []memory.SharedChunk{{Size: 2 * mib, Serial: 1}, {Size: 2 * mib, Serial: 2}}},
		{Size: 512},
	} {
		b, err := offer(m)
		must(f, err)
		f.Add(b, span(kindBatch, 0, 1), span(kindBatch, 1, 1))
		f.Add(b, span(kindBatch, 0, 2), refusal("no"))
		f.Add(b, []byte{}, []byte{})
	}
	f.Add(refusal("no"), []byte{}, []byte{})
	maker := sim.New(sim.Options{Handles: sim.Exportable})
	chunk, err := maker.MemCreate(2*mib, cuda.MemProp{Handles: sim.Exportable})
	must(f, err)
	drv := sim.New(sim.Options{})
	a, err := engine.New(drv, config.Options{})
	must(f, err)
	p := New(a, nil)
	p.timeout = time.Minute
	_, err = a.Device(0)
	must(f, err)
	f.Fuzz(func(t *testing.T, first, second, third []byte) {
		ours, theirs := pair(t)
		c, err := newConn(ours, noGuard{}, p.timeout)
		must(t, err)
		var wg sync.WaitGroup
		wg.Go(func() {
			peer, err := newConn(theirs, noGuard{}, p.timeout)
			if err != nil {
				t.Error(err)
				return
			}
			defer peer.close()
			for i, b := range [][]byte{first, second, third} {
				var fds []int
				if i > 0 && len(b) > 0 {
					fd, err := maker.MemExport(chunk)
					if err != nil {
						t.Error(err)
						return
					}
					defer syscall.Close(fd)
					fds = []int{fd}
				}
				if peer.send(b, fds...) != nil {
					return
				}
			}
		})
		before := drv.Leaks()
		r := &request{h: Handle{PID: 1}, c: c, given: -1}
		var ptr cuda.Ptr
		if err = r.greet(p); err == nil {
			ptr, err = a.Sharing.Open(0, "another", r.offered, r.descriptor)
		}
		r.close()
		wg.Wait()
		if err != nil && strings.ContainsRune(err.Error(), '\n') {
			t.Errorf("the error is %q", err)
		}
		if err == nil {
			if err := a.Sharing.Close(ptr); err != nil {
				t.Error(err)
			}
		}
		if now := drv.Leaks(); now != before {
			t.Errorf("left %+v where %+v was", now, before)
		}
	})
}

// A name in the folder that is no socket does no harm.
func TestSweepLeavesOthersAlone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x.sock")
	must(t, os.Mkdir(path, 0o700))
	sweep(dir)
	sweep(filepath.Join(dir, "nowhere"))
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

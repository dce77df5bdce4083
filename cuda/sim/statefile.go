package sim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"

	"github.com/cistern-gpu/cistern/cuda"
)

// What drivers share beyond the existence of memory lies in files in memory, each with a lock: memory of exported pools with its
// contents and uses, events, and what the host of each driver has seen complete. The name of a file says in which process it is
// open, where others open it through /proc: so they must see that process, and it must be alive when they do.

// fileKind begins the name of a file.
type fileKind string

const (
	filePool  fileKind = "cistern-sim-pol1" // what a pool's descriptor is: its name, and nothing else
	fileBlock fileKind = "cistern-sim-blk1"
	fileEvent fileKind = "cistern-sim-evt1"
	fileHost  fileKind = "cistern-sim-hst1"
)

const (
	nameSize   = 64
	contentsAt = 16 << 20 // where the contents of memory begin; before them is the state
)

// fileName is what a file is known by.
type fileName struct {
	driver  uint64 // that made it
	serial  uint64 // within that driver
	pid, fd uint64 // where it is open
	size    uint64 // of memory, in bytes
	of      uint64 // the pool's serial, for memory; the device
}

func (n fileName) bytes(k fileKind) (b [nameSize]byte) {
	copy(b[:16], k)
	for i, v := range [...]uint64{n.driver, n.serial, n.pid, n.fd, n.size, n.of} {
		binary.LittleEndian.PutUint64(b[16+8*i:], v)
	}
	return b
}

func nameOf(b [nameSize]byte, k fileKind) (n fileName, ok bool) {
	v := func(i int) uint64 { return binary.LittleEndian.Uint64(b[16+8*i:]) }
	return fileName{v(0), v(1), v(2), v(3), v(4), v(5)}, fileKind(b[:16]) == k
}

// stateFile is an open file. Its state is read and written while it is locked; its contents are not locked.
type stateFile struct {
	file *lockedFile
	name fileName
	err  error // the first failure with the contents
}

// newStateFile makes a file with the given state.
func newStateFile(k fileKind, n fileName, state []byte) (*stateFile, error) {
	head := n.bytes(k)
	fd, err := memoryFile(head[:])
	if err != nil {
		return nil, err
	}
	s := &stateFile{name: n}
	if s.file, err = reopened(fd); err != nil {
		return nil, err
	}
	if s.name.pid, _, err = thisProcess(); err == nil {
		s.name.fd = s.file.number()
		err = s.store(state)
	}
	if err != nil {
		s.file.close()
		return nil, err
	}
	return s, nil
}

// openStateFile opens a file of another driver.
func openStateFile(k fileKind, n fileName) (*stateFile, error) {
	f, err := openLocked("/proc/" + strconv.FormatUint(n.pid, 10) + "/fd/" + strconv.FormatUint(n.fd, 10))
	if err != nil {
		return nil, err
	}
	var head [nameSize]byte
	if err = f.read(head[:], 0); err == nil {
		made := n
		made.pid, made.fd = 0, 0
		if got, ok := nameOf(head, k); !ok || got != made {
			err = errors.New("another file is there: its maker has closed it")
		}
	}
	if err != nil {
		f.close()
		return nil, err
	}
	return &stateFile{file: f, name: n}, nil
}

func (s *stateFile) locked(f func() error) error {
	if s.err != nil {
		return s.err
	}
	if err := s.file.lock(); err != nil {
		return err
	}
	err := f()
	if u := s.file.unlock(); err == nil {
		err = u
	}
	return err
}

func (s *stateFile) load() ([]byte, error) {
	var n [8]byte
	if err := s.file.read(n[:], nameSize); err != nil {
		return nil, err
	}
	size := binary.LittleEndian.Uint64(n[:])
	if size > contentsAt-nameSize-8 {
		return nil, fmt.Errorf("a state of %d bytes: damaged", size)
	}
	b := make([]byte, size)
	return b, s.file.read(b, nameSize+8)
}

func (s *stateFile) store(state []byte) error {
	if len(state) > contentsAt-nameSize-8 {
		return fmt.Errorf("a state of %d bytes: at most %d fit", len(state), contentsAt-nameSize-8)
	}
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 8+len(state)), uint64(len(state)))
	return s.file.write(append(b, state...), nameSize)
}

// put and get copy contents. They are kept such that what was never written reads as Poison.
func (s *stateFile) put(off uint64, b []byte) {
	var buf [contentPage]byte
	for len(b) > 0 {
		n := copy(buf[:], b)
		for i := range buf[:n] {
			buf[i] ^= Poison
		}
		s.failed(s.file.write(buf[:n], int64(contentsAt+off)))
		b, off = b[n:], off+uint64(n)
	}
}

func (s *stateFile) get(off uint64, b []byte) {
	clear(b)
	s.failed(s.file.read(b, int64(contentsAt+off)))
	for i := range b {
		b[i] ^= Poison
	}
}

func (s *stateFile) failed(err error) {
	if s.err == nil {
		s.err = err
	}
}

// encoder and decoder are the form of states: numbers of 8 bytes.
type encoder []byte

func (e *encoder) number(v uint64) { *e = binary.LittleEndian.AppendUint64(*e, v) }

type decoder struct {
	b   []byte
	bad bool
}

func (x *decoder) number() uint64 {
	if len(x.b) < 8 {
		x.bad, x.b = true, nil
		return 0
	}
	v := binary.LittleEndian.Uint64(x.b)
	x.b = x.b[8:]
	return v
}

// count is the number of entries of a list, of at least size numbers each.
func (x *decoder) count(size int) int {
	n := x.number()
	if n > uint64(len(x.b)/(8*size)) {
		x.bad, x.b = true, nil
		return 0
	}
	return int(n)
}

func (x *decoder) done() error {
	if x.bad || len(x.b) != 0 {
		return errors.New("a state that no driver writes: damaged")
	}
	return nil
}

// elsewhere is what a driver knows of others that it shares memory of pools or events with. Protected by Driver.mu.
type elsewhere struct {
	serial uint64 // of the last file
	board  *stateFile
	boards map[fileName]*stateFile // of others; nil where the process has ended
}

// newFile makes a file, and the one that says what the host has seen, if that is the first.
func (d *Driver) newFile(k fileKind, size, of uint64, state []byte) (*stateFile, error) {
	if err := d.meet(); err != nil {
		return nil, err
	}
	d.elsewhere.serial++
	return newStateFile(k, fileName{driver: d.identity, serial: d.elsewhere.serial, size: size, of: of}, state)
}

// meet begins to say what the host has seen.
func (d *Driver) meet() error {
	if d.elsewhere.board != nil {
		return nil
	}
	d.elsewhere.serial++
	s, err := newStateFile(fileHost, fileName{driver: d.identity, serial: d.elsewhere.serial}, d.encodeVector(nil, d.order.host))
	d.elsewhere.board = s
	return err
}

// hostSaw notes what the host has seen complete. Others learn it: what one host has seen comes before what any host does later.
func (d *Driver) hostSaw(v vector) {
	d.order.host.join(v)
	if b := d.elsewhere.board; b != nil {
		b.failed(b.locked(func() error { return b.store(d.encodeVector(nil, d.order.host)) }))
	}
}

// learn joins what the hosts of other drivers have seen. All work of a process that has ended is complete.
func (d *Driver) learn(others []fileName) {
	for _, n := range others {
		if n.driver == d.identity {
			continue
		}
		b, known := d.elsewhere.boards[n]
		if !known {
			b, _ = openStateFile(fileHost, n)
			if d.elsewhere.boards == nil {
				d.elsewhere.boards = map[fileName]*stateFile{}
			}
			d.elsewhere.boards[n] = b
		}
		if b == nil {
			d.order.endDriver(n.driver)
			continue
		}
		var v vector
		err := b.locked(func() error {
			state, err := b.load()
			if err != nil {
				return err
			}
			x := decoder{b: state}
			v = d.decodeVector(&x)
			return x.done()
		})
		if err == nil {
			d.order.host.join(v)
		}
	}
}

// closeFiles closes what learn and meet opened.
func (d *Driver) closeFiles() {
	for _, b := range d.elsewhere.boards {
		if b != nil {
			b.file.close()
		}
	}
	if d.elsewhere.board != nil {
		d.elsewhere.board.file.close()
	}
	d.elsewhere.board, d.elsewhere.boards = nil, nil
}

// remoteRank is a rank of another driver; the zero value is none.
type remoteRank struct{ driver, rank uint64 }

// endDriver makes all work of a driver complete.
func (o *order) endDriver(driver uint64) {
	for r, x := range o.remote {
		if x.driver == driver {
			o.host.set(r, ^uint64(0))
		}
	}
}

// name says whose rank it is.
func (o *order) name(rank int) string {
	if o.remote[rank].driver != 0 {
		return "a stream of another process"
	}
	return "stream " + itoa(o.owner[rank])
}

// encodeMark and decodeMark are the form in which drivers tell each other of work.
func (d *Driver) encodeMark(e *encoder, m mark) {
	r := remoteRank{}
	if m.n != 0 {
		if r = d.order.remote[m.rank]; r.driver == 0 {
			r = remoteRank{d.identity, uint64(m.rank)}
		}
	}
	e.number(r.driver)
	e.number(r.rank)
	e.number(m.n)
}

func (d *Driver) decodeMark(x *decoder) mark {
	r := remoteRank{x.number(), x.number()}
	m := mark{n: x.number()}
	o := &d.order
	switch {
	case m.n == 0 || x.bad:
		return mark{}
	case r.driver == 0:
		x.bad = true
		return mark{}
	case r.driver == d.identity:
		if r.rank >= uint64(len(o.count)) || o.remote[r.rank].driver != 0 {
			x.bad = true
			return mark{}
		}
		m.rank = int(r.rank)
		return m
	}
	rank, ok := o.ranks[r]
	if !ok {
		rank = o.add(0, r)
		if o.ranks == nil {
			o.ranks = map[remoteRank]int{}
		}
		o.ranks[r] = rank
	}
	m.rank = rank
	return m
}

func (d *Driver) encodeVector(e encoder, v vector) encoder {
	at := len(e)
	e.number(0)
	n := uint64(0)
	for rank, count := range v {
		if count != 0 {
			d.encodeMark(&e, mark{rank, count})
			n++
		}
	}
	binary.LittleEndian.PutUint64(e[at:], n)
	return e
}

func (d *Driver) decodeVector(x *decoder) (v vector) {
	for range x.count(3) {
		if m := d.decodeMark(x); m.n != 0 {
			v.set(m.rank, m.n)
		}
	}
	return v
}

// unusable is the code of a call whose file cannot be made or used.
const unusable = cuda.ErrUnknown

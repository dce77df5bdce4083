package audit

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cistern-gpu/cistern/internal/deadline"
	"golang.org/x/sys/unix"
)

// The layout of ring.h.
const (
	magic      = 0x3244554154534943
	slotBytes  = 256
	headBytes  = 4096
	slotWords  = slotBytes/8 - 2 // behind turn and check
	offNonce   = 8
	offSlots   = 16
	offFlags   = 20
	offClosed  = 24
	offHead    = 64
	offSpent   = 72
	offDropped = 128
	offTail    = 192
)

// Slots is how many records a ring holds by default: 16 MiB, of which only what is used is there.
const Slots = 1 << 16

// How long a slot that was taken may stay unpublished: what took it was killed in between, or is stopped. On a busy machine that
// may be for seconds, and to pass it loses a call: so the wait is longer while there is room for others.
const (
	slotTimeout     = 10 * time.Second
	slotTimeoutHalf = time.Second // when half of the ring is taken
)

// Ring is the reader's end of a ring. It belongs to one goroutine.
type Ring struct {
	file  *os.File
	mem   []byte
	nonce uint64
	slots uint64
	tail  uint64
	lost  uint64 // slots that were never published, or written over
	bad   bool   // what says which slots are taken is not what any producer leaves

	late deadline.Deadline // of the slot at tail, while it is taken and not published
}

// New makes a ring of that many slots, a power of two, for calls with stacks of these kinds.
func New(slots int, stacks Stacks) (*Ring, error) {
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return nil, ErrNotLinux
	}
	if slots <= 0 || slots&(slots-1) != 0 {
		return nil, fmt.Errorf("a ring of %d slots: expected a power of two", slots)
	}
	fd, err := unix.MemfdCreate(RingName, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memory for the events (memfd_create): %w", err)
	}
	f := os.NewFile(uintptr(fd), RingName)
	size := headBytes + slots*slotBytes
	if err := f.Truncate(int64(size)); err != nil {
		f.Close()
		return nil, fmt.Errorf("memory for the events: %w", err)
	}
	// No process that has it open can make it smaller, which would kill writers.
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		f.Close()
		return nil, fmt.Errorf("memory for the events: %w", err)
	}
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("memory for the events: %w", err)
	}
	r := &Ring{file: f, mem: mem, slots: uint64(slots)}
	var nonce [8]byte
	rand.Read(nonce[:])
	r.nonce = binary.LittleEndian.Uint64(nonce[:])
	binary.LittleEndian.PutUint64(mem, magic)
	binary.LittleEndian.PutUint64(mem[offNonce:], r.nonce)
	binary.LittleEndian.PutUint32(mem[offSlots:], uint32(slots))
	binary.LittleEndian.PutUint32(mem[offFlags:], uint32(stacks))
	return r, nil
}

// Value of the environment's variable: processes open the ring through this one's table of files, so that it needs no
// name and is gone with the last process that uses it.
func (r *Ring) Value() string {
	return fmt.Sprintf("%016x:/proc/%d/fd/%d", r.nonce, os.Getpid(), r.file.Fd())
}

func (r *Ring) word(off uint64) *uint64 { return (*uint64)(unsafe.Pointer(&r.mem[off])) }

// Dropped is how many records found no room.
func (r *Ring) Dropped() uint64 { return atomic.LoadUint64(r.word(offDropped)) }

// Spent is how long threads of the traced processes were kept by recording: from the return of the driver's call to the
// return to the program. What comes before the call is a look at the clock.
func (r *Ring) Spent() time.Duration { return time.Duration(atomic.LoadUint64(r.word(offSpent))) }

// Lost is how many records were begun and never finished, because their process was killed or stopped for long.
func (r *Ring) Lost() uint64 { return r.lost }

// Spoiled reports whether a program wrote over the ring's own numbers, which all that are traced can: what came after that
// cannot be distinguished from what was there before, and is not read.
func (r *Ring) Spoiled() bool { return r.bad }

// Stop makes all writers of the ring stop; what is in it can be read.
func (r *Ring) Stop() { atomic.StoreUint64(r.word(offClosed), 1) }

// Close ends the ring.
func (r *Ring) Close() error {
	r.Stop()
	err := unix.Munmap(r.mem)
	if cerr := r.file.Close(); err == nil {
		err = cerr
	}
	return err
}

// Drain hands up to most records that are there to f, in their order, and returns how many. Where a record was begun and
// not finished it waits for a while, over as many calls as that takes, or not at all when no writer is left. The
// ring's numbers are believed only as far as they can be so: the memory is the programs' as well.
func (r *Ring) Drain(most int, last bool, f func(*Record)) int {
	var rec Record
	words := (*[slotWords]uint64)(unsafe.Pointer(&rec))
	n := 0
	for n < most && !r.bad {
		off := headBytes + r.tail%r.slots*slotBytes
		turn := r.word(off)
		lap := r.tail / r.slots * 2
		switch now := atomic.LoadUint64(turn); now {
		case lap + 1:
			for i := range words {
				words[i] = atomic.LoadUint64(r.word(off + 16 + uint64(i)*8))
			}
			good := checksum(words, r.tail) == atomic.LoadUint64(r.word(off+8))
			atomic.StoreUint64(turn, lap+2)
			if good {
				f(&rec)
				n++
			} else {
				r.lost++
			}
		default:
			taken := atomic.LoadUint64(r.word(offHead)) - r.tail
			if now != lap || taken > r.slots {
				r.bad = true
				r.Stop()
				return n
			}
			if taken == 0 {
				return n
			}
			if !last && r.wait(time.Now(), taken) {
				return n
			}
			if !atomic.CompareAndSwapUint64(turn, lap, lap+2) {
				continue // it was published just now
			}
			r.lost++
		}
		r.late = deadline.Deadline{}
		r.tail++
		atomic.StoreUint64(r.word(offTail), r.tail)
	}
	return n
}

// Waits reports whether the last Drain ended at a record that was begun and not finished: there may be others behind it.
func (r *Ring) Waits() bool { return r.late.Begun() }

// wait says whether the writer of the slot at tail is still waited for. taken is how many slots are.
func (r *Ring) wait(now time.Time, taken uint64) bool {
	r.late.Limit = slotTimeout
	if taken > r.slots/2 {
		r.late.Limit = slotTimeoutHalf
	}
	return r.late.Left(now) > 0
}

func checksum(words *[slotWords]uint64, number uint64) uint64 {
	const k = 0x9e3779b97f4a7c15
	h := number * k
	for _, w := range words {
		h = (h ^ w) * k
		h ^= h >> 29
	}
	return h
}

package live

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Segment is the page of a process that sent its descriptor. It is one goroutine's at a time.
type Segment struct {
	fd      int
	buffers [2][segmentBuffer]byte // for the two slots
	p       Process
}

// segmentBuffer has room for two devices.
const segmentBuffer = head + gaugesHead + 2*recordBytes

// NewSegment takes the descriptor, which it closes if it is not one of a page. A file that its sender could shrink, or whose reading
// could wait, is none.
func NewSegment(fd int) (*Segment, error) {
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err == nil && seals&sealed != sealed {
		err = errors.New("expected a sealed file")
	}
	if err == nil {
		_, err = decodeIdentity(file0(fd))
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("a status segment: %w", err)
	}
	return &Segment{fd: fd}, nil
}

// Read is the figures as they were written last: Updated, Dropped and Devices of a Process, which are the segment's until the next
// Read. It does not wait; where no figures are whole it returns those of before.
func (s *Segment) Read() (*Process, error) {
	var newest uint64
	var contents []byte
	for i := range s.buffers {
		n, c, err := get(file0(s.fd), gaugesAt+int64(i)*gaugesStep, gaugesMax, s.buffers[i][:])
		if err != nil {
			return nil, err
		}
		if n > newest {
			newest, contents = n, c
		}
	}
	if newest == 0 {
		return &s.p, nil
	}
	s.p.Devices = s.p.Devices[:0]
	return &s.p, decodeGauges(contents, &s.p)
}

// Close ends the reading.
func (s *Segment) Close() { unix.Close(s.fd) }

package live

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Segment is the page of a process that sent its descriptor. It is one goroutine's at a time.
type Segment struct {
	fd      int
	number  [8]byte
	buffer  [segmentBuffer]byte
	p       Process
	decoded uint64 // the number of the part that p has
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
// Read. It does not wait; where no newer figures are whole it returns those of before.
func (s *Segment) Read() (*Process, error) {
	var numbers [2]uint64
	for i := range numbers { // a broker reads thousands, most of which have nothing new
		if err := readFull(file0(s.fd), s.number[:], gaugesAt+int64(i)*gaugesStep); err != nil {
			return nil, err
		}
		numbers[i] = le.Uint64(s.number[:])
	}
	newer := 0
	if numbers[1] > numbers[0] {
		newer = 1
	}
	for _, i := range [2]int{newer, 1 - newer} {
		if numbers[i] <= s.decoded {
			break
		}
		n, contents, err := get(file0(s.fd), gaugesAt+int64(i)*gaugesStep, gaugesMax, s.buffer[:])
		if err != nil {
			return nil, err
		}
		if n <= s.decoded { // it is being written
			continue
		}
		s.p.Devices = s.p.Devices[:0]
		if err := decodeGauges(contents, &s.p); err != nil {
			return nil, err
		}
		s.decoded = n
		break
	}
	return &s.p, nil
}

// Close ends the reading.
func (s *Segment) Close() { unix.Close(s.fd) }

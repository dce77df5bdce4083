package offload

import (
	"bytes"
	"errors"
	"hash/crc32"
	"io"
	"sync"
)

// fileSums are checksums of what was written to a file, by which contents are known that are another file's: the program may
// have closed the descriptor and opened another file under its number. The unit is small, so that little beside what is wanted
// is read, and divides partSize.
type fileSums struct {
	mu    sync.Mutex
	units []unitSum // +checklocks:mu
}

// unitSum is the checksum of the first bytes of a unit, which were written in order.
type unitSum struct{ sum, bytes uint32 }

const (
	sumUnit    = 64 << 10
	sumUnknown = ^uint32(0) // bytes, where the unit was not written in order
)

var errChanged = errors.New("the file does not have the contents that were written: another file has its descriptor, or another program changed it")

// eachUnit calls f with the parts of data, which is for the file from at on, by unit.
func eachUnit(data []byte, at uint64, f func(unit int, from uint32, part []byte) error) error {
	for len(data) > 0 {
		from := at % sumUnit
		n := min(uint64(len(data)), sumUnit-from)
		if err := f(int(at/sumUnit), uint32(from), data[:n]); err != nil {
			return err
		}
		data, at = data[n:], at+n
	}
	return nil
}

// add notes what is written at a place of the file.
func (s *fileSums) add(data []byte, at uint64) {
	s.mu.Lock()
	if n := int((at+uint64(len(data))-1)/sumUnit) + 1; n > len(s.units) {
		s.units = append(s.units, make([]unitSum, n-len(s.units))...)
	}
	s.mu.Unlock()
	_ = eachUnit(data, at, func(unit int, from uint32, part []byte) error {
		s.mu.Lock()
		u := s.units[unit]
		s.mu.Unlock()
		switch {
		case from == 0:
			u = unitSum{crc32.ChecksumIEEE(part), uint32(len(part))}
		case from == u.bytes:
			u = unitSum{crc32.Update(u.sum, crc32.IEEETable, part), from + uint32(len(part))}
		default:
			u.bytes = sumUnknown
		}
		s.mu.Lock()
		s.units[unit] = u
		s.mu.Unlock()
		return nil
	})
}

// check compares what was read from a place of the file, and reads what is missing of the units there.
func (s *fileSums) check(data []byte, at uint64, file io.ReaderAt) error {
	var whole []byte
	return eachUnit(data, at, func(unit int, from uint32, part []byte) error {
		s.mu.Lock()
		u := s.units[unit]
		s.mu.Unlock()
		if u.bytes == sumUnknown {
			return nil
		}
		if from > 0 || uint32(len(part)) != u.bytes {
			if whole == nil {
				whole = make([]byte, sumUnit)
			}
			all := whole[:u.bytes]
			if _, err := file.ReadAt(all, int64(unit)*sumUnit); err != nil {
				return err
			}
			if !bytes.Equal(all[from:from+uint32(len(part))], part) {
				return errChanged
			}
			part = all
		}
		if crc32.ChecksumIEEE(part) != u.sum {
			return errChanged
		}
		return nil
	})
}

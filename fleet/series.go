package fleet

import (
	"cmp"
	"fmt"
	"math"

	"github.com/cistern-gpu/cistern/event"
)

// MostRows is how many rows a series has at most. When there are more steps, each row stands for twice as many.
const MostRows = 1024

// Series is what a device held step by step, in columns of equal length. A row covers Every steps and is at the end of its
// last one; the last row may cover fewer.
type Series struct {
	Every  int64    `json:"every"` // a power of two
	Step   []int64  `json:"step"`  // the last of the row, counted from 1
	TimeUS []int64  `json:"time_us"`
	Now    []uint64 `json:"allocated_bytes"` // at the end of the row
	// Peak is the most that was allocated within the row. Under PyTorch's own allocator it is known where the peak of the run
	// rose, else it is the larger of the values at both ends.
	Peak     []uint64 `json:"peak_allocated_bytes"`
	Reserved []uint64 `json:"reserved_bytes"` // the most that was seen
	Outside  []uint64 `json:"outside_bytes"`  // the newest measurement
	// Requests and Requested are the number and the bytes of the requests of the row.
	Requests  []uint64 `json:"requests"`
	Requested []uint64 `json:"requested_bytes"`
	// Hash is over the sizes of the requests of the row in their order; 0 is unknown. A process on Cistern with a
	// history computes it; else `cistern fleet collect` does from the recording.
	Hash []uint64 `json:"hash,omitempty"`
}

// Row is one row of a Series. HashSum is what Mix makes of the sizes for Series.Add, and what the series has for Series.Row.
type Row struct {
	Step                                                       int64
	TimeUS                                                     int64
	Now, Peak, Reserved, Outside, Requests, Requested, HashSum uint64
}

// Len is the number of rows.
func (s *Series) Len() int { return len(s.Step) }

// columns are those of bytes and counts, which are never shorter than Step but for Hash.
func (s *Series) columns() []*[]uint64 {
	return []*[]uint64{&s.Now, &s.Peak, &s.Reserved, &s.Outside, &s.Requests, &s.Requested}
}

// Row is the row i.
func (s *Series) Row(i int) Row {
	r := Row{Step: s.Step[i], TimeUS: s.TimeUS[i], Now: s.Now[i], Peak: s.Peak[i], Reserved: s.Reserved[i], Outside: s.Outside[i],
		Requests: s.Requests[i], Requested: s.Requested[i]}
	if len(s.Hash) > i {
		r.HashSum = s.Hash[i]
	}
	return r
}

func (s *Series) check() error {
	n := len(s.Step)
	if n > MostRows {
		return fmt.Errorf("%d rows; expected at most %d", n, MostRows)
	}
	if n > 0 && (s.Every < 1 || s.Every&(s.Every-1) != 0 || s.Every > mostNumber) {
		return fmt.Errorf("%d steps a row; expected a power of two", s.Every)
	}
	for _, c := range s.columns() {
		if len(*c) != n {
			return fmt.Errorf("columns of %d and %d rows", n, len(*c))
		}
	}
	if len(s.TimeUS) != n || len(s.Hash) != 0 && len(s.Hash) != n {
		return fmt.Errorf("columns of %d, %d and %d rows", n, len(s.TimeUS), len(s.Hash))
	}
	for i := 1; i < n; i++ {
		if s.Step[i] <= s.Step[i-1] {
			return fmt.Errorf("step %d after step %d", s.Step[i], s.Step[i-1])
		}
	}
	if n > 0 && s.Step[0] < 1 {
		return fmt.Errorf("step %d; expected 1 or more", s.Step[0])
	}
	for i := range n {
		r := s.Row(i)
		if err := cmp.Or(checkNumber("step", r.Step), checkNumber("time_us", r.TimeUS), checkNumber("allocated_bytes", r.Now), checkNumber("peak_allocated_bytes", r.Peak),
			checkNumber("reserved_bytes", r.Reserved), checkNumber("outside_bytes", r.Outside)); err != nil {
			return err
		}
		if max(r.Requests, r.Requested) > math.MaxInt64 {
			return fmt.Errorf("%d requests of %d bytes in a row; expected at most %d", r.Requests, r.Requested, math.MaxInt64)
		}
	}
	return nil
}

// Add adds the next step.
func (s *Series) Add(r Row) {
	s.Every = max(1, s.Every)
	if r.HashSum != 0 {
		r.HashSum = event.Mix(r.HashSum, uint64(r.Step))
	}
	s.join(r)
	for len(s.Step) > MostRows {
		s.double()
	}
}

// join adds a row, to the last one where both are of one group.
func (s *Series) join(r Row) {
	if n := len(s.Step); n > 0 && s.group(s.Step[n-1]) == s.group(r.Step) {
		last := s.Row(n - 1)
		s.truncate(n - 1)
		r = merge(last, r)
	}
	s.push(r)
}

// group is the number of the row that a step belongs to.
func (s *Series) group(step int64) int64 { return (step - 1) / s.Every }

// double has each row cover twice as many steps.
func (s *Series) double() {
	rows := make([]Row, 0, len(s.Step))
	for i := range s.Step {
		rows = append(rows, s.Row(i))
	}
	s.truncate(0)
	s.Every *= 2
	for _, r := range rows {
		s.join(r)
	}
}

// At has the rows cover so many steps, a power of two that is not smaller than Every.
func (s *Series) At(every int64) {
	for s.Every > 0 && s.Every < every {
		s.double()
	}
}

func (s *Series) truncate(n int) {
	s.Step, s.TimeUS = s.Step[:n], s.TimeUS[:n]
	for _, c := range s.columns() {
		*c = (*c)[:n]
	}
	s.Hash = s.Hash[:min(n, len(s.Hash))]
}

func (s *Series) push(r Row) {
	hashed := r.HashSum != 0 || len(s.Hash) > 0
	for hashed && len(s.Hash) < len(s.Step) {
		s.Hash = append(s.Hash, 0)
	}
	s.Step, s.TimeUS = append(s.Step, r.Step), append(s.TimeUS, r.TimeUS)
	for i, v := range []uint64{r.Now, r.Peak, r.Reserved, r.Outside, r.Requests, r.Requested} {
		c := s.columns()[i]
		*c = append(*c, v)
	}
	if hashed {
		s.Hash = append(s.Hash, r.HashSum)
	}
}

// merge is one row of two, of which b is later.
func merge(a, b Row) Row {
	b.Peak, b.Reserved = max(a.Peak, b.Peak), max(a.Reserved, b.Reserved)
	b.Outside = max(a.Outside, b.Outside)
	b.Requests = min(b.Requests+a.Requests, math.MaxInt64)
	b.Requested = min(b.Requested+a.Requested, math.MaxInt64)
	if a.HashSum == 0 || b.HashSum == 0 {
		b.HashSum = 0
	} else {
		b.HashSum = max(1, a.HashSum+b.HashSum) // in whatever order rows are merged
	}
	return b
}

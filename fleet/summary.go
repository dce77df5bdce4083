// Package fleet answers for a job of many processes from a small file that each of them wrote: its Summary, which says who
// it is, what it held at its peak and after each step, and what failed. format.md describes the file. Recordings of every
// event lie beside it, and are read only when a question needs them.
//
// summary.go has the file, series.go its steps; job.go puts processes together to jobs, findings.go says what stands
// out, generate.go makes summaries of recorded runs.
package fleet

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"github.com/cistern-gpu/cistern/internal/outfile"
	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/identity"
)

// Ending is how the names of summaries end.
const Ending = ".summary.json"

// Version is that of the format.
const Version = 1

// MostBytes is the size of a summary at most; a reader refuses larger ones.
const MostBytes = 8 << 20

// Allocators that a summary is of.
const (
	AllocatorPyTorch = "pytorch"
	AllocatorCistern = "cistern"
)

// Ends of a process, as it saw its own.
const (
	EndExit = "exit" // Python ended
	EndNone = ""     // it goes on, or was killed
)

// Summary is what one process writes of itself. Sizes are bytes, times microseconds since 1970 by the clock of its node.
type Summary struct {
	Path   string `json:"-"` // the file that it was read from
	Folder string `json:"-"` // the folder that was searched for it, "" none

	Format    int    `json:"cistern_summary"` // Version
	Version   string `json:"cistern"`
	Allocator string `json:"allocator"`
	// Variables are those of identity.Variables that the process had, Coordinates what it said of itself.
	Variables   map[string]string `json:"variables"`
	Coordinates map[string]int    `json:"coordinates,omitempty"`
	Host        string            `json:"host"`
	PID         int               `json:"pid"`
	Program     string            `json:"program"`

	PyTorch  string `json:"pytorch,omitempty"`
	CUDA     string `json:"cuda,omitempty"`
	Driver   string `json:"driver,omitempty"`
	Settings string `json:"settings,omitempty"` // of the allocator: CISTERN_CONF or PYTORCH_ALLOC_CONF

	StartedUS int64  `json:"started_us"`
	UpdatedUS int64  `json:"updated_us"` // when this was written
	Ended     string `json:"ended"`
	Status    int    `json:"status,omitempty"` // with which it failed, negative for a signal, as its launcher says; 0: unknown, or none
	Marks     string `json:"marks"`            // what marked the steps: "cistern.step", "optimizer", "" where there are none
	Steps     int64  `json:"steps"`            // marked so far
	SpentUS   int64  `json:"spent_us"`

	Recordings []string `json:"recordings,omitempty"` // files beside this one
	Devices    []Device `json:"devices"`
}

// Device is what a process did on one GPU.
type Device struct {
	Ordinal int    `json:"device"`
	UUID    string `json:"uuid,omitempty"`
	Name    string `json:"name,omitempty"`
	Total   uint64 `json:"total_bytes"`
	Limit   uint64 `json:"limit_bytes"` // of the process; 0: none

	PeakAllocated Peak `json:"peak_allocated"`
	PeakReserved  Peak `json:"peak_reserved"`
	// PeakOutside is the most that was in use on the device beside what this allocator had reserved: the CUDA context,
	// libraries such as NCCL, and other processes.
	PeakOutside Peak `json:"peak_outside"`

	Retries  int64     `json:"retries"`
	OOMs     int64     `json:"ooms"`
	Failures []Failure `json:"failures,omitempty"` // the first MostFailures - 1, and the newest

	Series Series `json:"steps"`
}

// MostFailures is how many failures a device keeps.
const MostFailures = 5

// Peak is the highest value of something, and the memory when it was seen: at the end of its step.
type Peak struct {
	Bytes     uint64 `json:"bytes"`
	Step      int64  `json:"step"`
	TimeUS    int64  `json:"time_us"`
	Allocated uint64 `json:"allocated_bytes"`
	Reserved  uint64 `json:"reserved_bytes"`
	// Split is what was free inside segments in use, which PyTorch cannot return to the driver (inactive_split_bytes).
	Split   uint64 `json:"split_bytes"`
	Outside uint64 `json:"outside_bytes"`
}

// Failure is a request that failed.
type Failure struct {
	TimeUS    int64  `json:"time_us"`
	Step      int64  `json:"step"`
	Requested uint64 `json:"requested_bytes"`
	Allocated uint64 `json:"allocated_bytes"`
	Reserved  uint64 `json:"reserved_bytes"`
	Split     uint64 `json:"split_bytes"`
	Free      uint64 `json:"free_bytes"` // of the device
	Recording string `json:"recording,omitempty"`
}

// gone reports whether the process is known to have ended.
func (s *Summary) gone() bool { return s.Ended != EndNone || s.Status != 0 }

// Identity is the process that the summary is of.
func (s *Summary) Identity() recording.Identity {
	id := identity.Of(func(name string) string { return s.Variables[name] }, s.Host, s.PID)
	if len(s.Coordinates) > 0 {
		id.Coordinates = s.Coordinates
	}
	return id
}

// Read reads a summary. The error of one that is cut off is ErrTruncated.
func Read(path string) (*Summary, error) {
	if st, err := os.Stat(path); err != nil {
		return nil, err
	} else if !st.Mode().IsRegular() { // opening a pipe would wait
		return nil, fmt.Errorf("%s: not a file; expected a summary", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s, err := Decode(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	s.Path = path
	return s, nil
}

// ErrTruncated is of a summary that ends early.
var ErrTruncated = errors.New("the summary is truncated")

// Decode is Read from memory or a stream.
func Decode(r io.Reader) (*Summary, error) {
	limited := &io.LimitedReader{R: r, N: MostBytes + 1}
	data, err := io.ReadAll(limited)
	switch {
	case err != nil:
		return nil, err
	case limited.N == 0:
		return nil, fmt.Errorf("more than %d bytes; expected a summary", MostBytes)
	}
	s := &Summary{}
	if err := json.Unmarshal(data, s); err != nil {
		var bad *json.SyntaxError
		if errors.As(err, &bad) && bad.Offset >= int64(len(data)) {
			return nil, ErrTruncated
		}
		return nil, fmt.Errorf("not a summary: %w", err)
	}
	switch {
	case s.Format == 0:
		return nil, errors.New(`not a summary: "cistern_summary" is missing`)
	case s.Format != Version:
		return nil, fmt.Errorf("format %d of a summary; expected %d", s.Format, Version)
	}
	s.clean()
	return s, s.check()
}

// Write writes a summary, whole or not at all.
func (s *Summary) Write(path string) error {
	f, err := outfile.Create(path, outfile.Private)
	if err != nil {
		return err
	}
	defer f.Abandon()
	if err := json.NewEncoder(f).Encode(s); err != nil {
		return err
	}
	return f.Commit()
}

// mostText is the most bytes of a text.
const mostText = 4 << 10

func clean(s *string) { *s = text.Clean((*s)[:min(len(*s), mostText)]) }

// clean makes text of what was read. Variables are cleaned where they are used.
func (s *Summary) clean() {
	for _, t := range []*string{&s.Version, &s.Allocator, &s.Host, &s.Program, &s.PyTorch, &s.CUDA, &s.Driver, &s.Settings, &s.Ended, &s.Marks} {
		clean(t)
	}
	for i := range s.Recordings {
		clean(&s.Recordings[i])
	}
	coordinates := make(map[string]int, len(s.Coordinates))
	for name, n := range s.Coordinates {
		clean(&name)
		coordinates[name] = n
	}
	s.Coordinates = coordinates
	for i := range s.Devices {
		d := &s.Devices[i]
		clean(&d.UUID)
		clean(&d.Name)
		for k := range d.Failures {
			clean(&d.Failures[k].Recording)
		}
	}
}

// check refuses what no recorder writes: other programs may write to the folder as well.
func (s *Summary) check() error {
	if len(s.Devices) > recording.MaxDevices {
		return fmt.Errorf("%d devices; expected at most %d", len(s.Devices), recording.MaxDevices)
	}
	for _, name := range s.Recordings {
		if err := checkName(name); err != nil {
			return err
		}
	}
	if err := cmp.Or(checkNumber("pid", s.PID), checkNumber("started_us", s.StartedUS), checkNumber("updated_us", s.UpdatedUS),
		checkNumber("steps", s.Steps), checkNumber("spent_us", s.SpentUS)); err != nil {
		return err
	}
	if s.Status < -mostSignal || s.Status > math.MaxInt32 {
		return fmt.Errorf("status %d; expected %d to %d", s.Status, -mostSignal, math.MaxInt32)
	}
	for name, n := range s.Coordinates {
		if n < 0 || n > math.MaxInt32 {
			return fmt.Errorf("%d for the coordinate %s; expected 0 to %d", n, name, math.MaxInt32)
		}
	}
	seen := map[int]bool{}
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.Ordinal < 0 || d.Ordinal >= recording.MaxDevices || seen[d.Ordinal] {
			return fmt.Errorf("device %d; expected each once, from 0 to %d", d.Ordinal, recording.MaxDevices-1)
		}
		seen[d.Ordinal] = true
		if err := d.check(); err != nil {
			return fmt.Errorf("device %d: %w", d.Ordinal, err)
		}
	}
	return nil
}

func (d *Device) check() error {
	err := cmp.Or(checkNumber("total_bytes", d.Total), checkNumber("limit_bytes", d.Limit), checkNumber("retries", d.Retries), checkNumber("ooms", d.OOMs))
	for _, p := range []*Peak{&d.PeakAllocated, &d.PeakReserved, &d.PeakOutside} {
		err = cmp.Or(err, checkNumber("bytes", p.Bytes), checkNumber("step", p.Step), checkNumber("time_us", p.TimeUS), checkNumber("allocated_bytes", p.Allocated),
			checkNumber("reserved_bytes", p.Reserved), checkNumber("split_bytes", p.Split), checkNumber("outside_bytes", p.Outside))
	}
	if len(d.Failures) > MostFailures {
		return fmt.Errorf("%d failures; expected at most %d", len(d.Failures), MostFailures)
	}
	for i := range d.Failures {
		f := &d.Failures[i]
		err = cmp.Or(err, checkNumber("step", f.Step), checkNumber("time_us", f.TimeUS), checkNumber("requested_bytes", f.Requested),
			checkNumber("allocated_bytes", f.Allocated), checkNumber("reserved_bytes", f.Reserved), checkNumber("split_bytes", f.Split), checkNumber("free_bytes", f.Free))
		if f.Recording != "" {
			err = cmp.Or(err, checkName(f.Recording))
		}
	}
	return cmp.Or(err, d.Series.check())
}

// mostNumber is the largest number of a summary, of bytes 8 PiB, of microseconds 285 years: sums and differences of a few do not overflow,
// and every reader of JSON has them exactly.
const mostNumber = 1 << 53

// mostSignal is more than the number of any signal.
const mostSignal = 128

func checkNumber[T int | int64 | uint64](key string, n T) error {
	if n < 0 || uint64(n) > mostNumber {
		return fmt.Errorf("%s %d; expected 0 to %d", key, n, uint64(mostNumber))
	}
	return nil
}

// checkName refuses what is no name of a recording beside the summary.
func checkName(name string) error {
	if name == "" || name[0] == '.' || strings.ContainsAny(name, `/\:`) || strings.HasSuffix(name, Ending) {
		return fmt.Errorf("recording %q; expected a file beside it", name)
	}
	return nil
}

// Package top is what `cistern top` knows: the GPUs of this machine and the processes that hold memory on them, from
// two sources. The driver's management library (NVML) knows every process and its bytes, whatever they are for; the
// page that a process shares knows what Cistern, or a trace, knows of it: reserved, allocated, peaks, driver calls.
//
// A Source looks once; the result, a Look, is what was read, unchanged. A State takes one look after the other: it puts
// the two together by the device's UUID and the process's number, and remembers what only several looks can tell, rates
// and trends. A Table is a State as one wants to see it: filtered, sorted, of one GPU or all. Nothing here is drawn.
//
// Two numbers meet in one line: what the driver says that a process holds (Used), and what the process's page says it
// reserved. The difference (Other) is what the context itself costs, code, and what other allocators of the process got.
// Nothing locks: a State belongs to one goroutine; the goroutine that a look is made in shares nothing with it.
package top

import (
	"context"
	"time"

	"github.com/cistern-gpu/cistern/internal/latency"
	"github.com/cistern-gpu/cistern/internal/live"
)

// StaleAfter is the age from which on a page counts as stale: three times what a process lets pass at most between two
// refreshes. A process that was stopped, or is starved, is still there but says nothing.
const StaleAfter = 3 * time.Second

// Source looks at the machine.
type Source interface {
	// Look reads everything once. Details are asked for only of those processes, which makes them work.
	Look(ctx context.Context, details Wanted) Look
	Close()
}

// Wanted names the processes whose details are asked for.
type Wanted struct {
	All bool
	PID int // where not all: of this one, 0 none
}

// Of says whether details of a process are wanted.
func (w Wanted) Of(pid int) bool { return w.All || pid != 0 && w.PID == pid }

// Look is what was read at one moment.
type Look struct {
	At         time.Time
	Cards      []Card          // by NVML
	NoCards    string          // why NVML says nothing; "" where it does
	Processes  []Process       // by their pages
	NoPages    string          // why no page can be found at all; "" where they can
	Unreadable int             // processes on the cards whose page, if any, may not be read
	Strange    int             // processes on the cards that are not in /proc: their numbers may be those of the host
	Problems   []string        // what else went wrong, a line each
	Node       *Node           // by the node's broker; nil: none answers
	Programs   map[int]Program // of the processes that only NVML knows, where they can be looked up
}

// Card is a GPU as NVML describes it.
type Card struct {
	UUID              [16]byte
	Index             int
	Part              string // "0:1": of a GPU that is divided (MIG), this part
	Name              string
	Total, Used, Free uint64 // bytes
	Known             bool   // these three are
	Utilization       int    // percent of time in which a kernel ran, -1 where the device does not say
	Holders           []Holder
}

// Holder is a process that holds memory on a card.
type Holder struct {
	PID   int
	Bytes uint64
	Known bool // false: the driver does not say how much
	Name  string
}

// Program is what the system says of a process.
type Program struct {
	Start uint64 // when it started, in the kernel's ticks: tells apart two processes of one number
	Name  string
	Args  []string
}

// The kinds of processes.
const (
	Cistern  = live.KindCistern // uses it
	Traced   = live.KindTraced  // runs under cistern trace
	Untraced = "other"          // holds GPU memory, and neither
)

// GPU is a device with what is known of it.
type GPU struct {
	UUID        [16]byte
	Index       int    // NVML's, or the ordinal in the processes that see it
	Part        string // of a divided GPU, which instance: "0:1"
	Name        string
	Total       uint64
	Used, Free  uint64 // what the driver says; 0 where it is not known
	Known       bool   // the driver said it
	Utilization int    // percent, -1 unknown
	Reserved    uint64 // by processes on Cistern
	Allocated   uint64 // by processes on Cistern, also where it is paused
	Cached      uint64 // of Reserved, what is free for reuse
	Traced      uint64 // by traced processes
	Processes   int
	Simulated   bool // each process has one of its own; Total is of all of these
	Trend       *Trend
}

// Unnamed says that it is not known which device it is: a process knows its own number of it only.
func (g *GPU) Unnamed() bool { return g.UUID == [16]byte{} }

// Memory is what a process holds, on one device or in sum.
type Memory struct {
	Reserved, Allocated, Active, Cached, Paused uint64
	PeakReserved, PeakAllocated                 uint64
	Limit                                       uint64 // 0 none
	DriverCalls, Retries, OOMs                  uint64
	Used                                        uint64 // what the driver says the process holds
	UsedKnown                                   bool
	Page                                        bool // the process's page says the rest
	Rate                                        float64
	RateKnown                                   bool // driver calls a second
	Requests                                    Requests
	// What the driver counts and the process's page does not: the context, its code, other allocators.
	Other      uint64
	OtherKnown bool
}

// Requests is how long a process's requests took.
type Requests struct {
	Met  uint64            // 0: not known
	Slow latency.Histogram // in us, of those that took longer than a lookup
}

// Quantile is the time in us that a part of the requests did not exceed; 0 is less than one.
func (r *Requests) Quantile(q float64) uint64 {
	return r.Slow.Quantile(q, r.Met-min(r.Met, r.Slow.Count()))
}

// numbers are those of a Memory that add up.
var numbers = map[Key]func(*Memory) *uint64{
	"used":           func(m *Memory) *uint64 { return &m.Used },
	"other":          func(m *Memory) *uint64 { return &m.Other },
	"reserved":       func(m *Memory) *uint64 { return &m.Reserved },
	"allocated":      func(m *Memory) *uint64 { return &m.Allocated },
	"active":         func(m *Memory) *uint64 { return &m.Active },
	"cached":         func(m *Memory) *uint64 { return &m.Cached },
	"paused":         func(m *Memory) *uint64 { return &m.Paused },
	"peak":           func(m *Memory) *uint64 { return &m.PeakReserved },
	"peak-allocated": func(m *Memory) *uint64 { return &m.PeakAllocated },
	"limit":          func(m *Memory) *uint64 { return &m.Limit },
	"calls":          func(m *Memory) *uint64 { return &m.DriverCalls },
	"retries":        func(m *Memory) *uint64 { return &m.Retries },
	"ooms":           func(m *Memory) *uint64 { return &m.OOMs },
}

// Number is one of the numbers, by its name.
func (m *Memory) Number(name Key) uint64 { return *numbers[name](m) }

// Holding is a process's memory on one GPU.
type Holding struct {
	GPU     int // place in Table.GPUs
	Ordinal int // the process's number of the device, -1 where only the driver says that it is used
	Memory
	Trend   *Trend
	Details *Details // where asked for
}

// Row is a process.
type Row struct {
	PID           int
	Start         uint64
	Kind          string
	Name          string // the program's
	Args          []string
	Title         string // what tells programs apart best, for a line
	Version, Conf string
	Place         live.Place
	Dropped       uint64        // traced: events that found no room
	Age           time.Duration // of its page
	Stale         bool
	Holdings      []Holding
	Sum           Memory // over Holdings
	Trend         *Trend
}

// On lists the indices of the GPUs on which the process holds memory.
func (r *Row) On(gpus []GPU) []int {
	var on []int
	for _, h := range r.Holdings {
		on = append(on, gpus[h.GPU].Index)
	}
	return on
}

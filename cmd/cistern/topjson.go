package main

import (
	"encoding/hex"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/top"
)

// topDocument is what `cistern top --json` prints; docs/top-json.md describes it. What is not known is null.
type topDocument struct {
	Time       time.Time    `json:"time"`
	Seconds    float64      `json:"interval_s"` // over which rates were measured, at least
	GPUs       []topGPU     `json:"gpus"`
	Processes  []topProcess `json:"processes"`
	Unreadable int          `json:"unreadable_processes"` // of other users
	Notes      []string     `json:"notes"`                // what is missing, and why
	Node       *topNode     `json:"node"`                 // null: no broker answers
}

type topGPU struct {
	UUID        string  `json:"uuid"`
	Index       int     `json:"index"`          // NVML's; without NVML the processes' own number
	Part        string  `json:"part,omitempty"` // of a divided GPU: "0:1"
	Name        string  `json:"name"`
	Simulated   bool    `json:"simulated"` // each process has one of its own; total_bytes is of all
	Total       *uint64 `json:"total_bytes"`
	Used        *uint64 `json:"used_bytes"`
	Free        *uint64 `json:"free_bytes"`
	Utilization *int    `json:"utilization_percent"`
	Reserved    uint64  `json:"reserved_bytes"`  // by the processes on Cistern
	Allocated   uint64  `json:"allocated_bytes"` // by the processes on Cistern
	Cached      uint64  `json:"cached_bytes"`    // by the processes on Cistern
	Traced      uint64  `json:"traced_bytes"`    // by traced processes
}

type topProcess struct {
	PID       int      `json:"pid"`
	Kind      string   `json:"kind"` // cistern, traced, other
	Program   string   `json:"program"`
	Arguments []string `json:"arguments"`
	Version   string   `json:"version"`
	Settings  string   `json:"settings"`
	live.Place
	Age     *float64 `json:"age_s"` // since the process last said something
	Stale   bool     `json:"stale"`
	Dropped uint64   `json:"events_dropped"` // of a traced process
	topMemory
	Devices []topDevice `json:"devices"`
}

type topDevice struct {
	UUID    string `json:"uuid"`
	Ordinal *int   `json:"ordinal"` // the process's number of the device
	topMemory
	Details *topDetails `json:"details,omitempty"`
}

// topMemory is null but for used_bytes where a process shares no page.
type topMemory struct {
	Used          *uint64  `json:"used_bytes"`  // what the driver says the process holds
	Other         *uint64  `json:"other_bytes"` // used less reserved
	Reserved      *uint64  `json:"reserved_bytes"`
	Allocated     *uint64  `json:"allocated_bytes"`
	Active        *uint64  `json:"active_bytes"`
	Cached        *uint64  `json:"cached_bytes"`
	Paused        *uint64  `json:"paused_bytes"`
	PeakReserved  *uint64  `json:"peak_reserved_bytes"`
	PeakAllocated *uint64  `json:"peak_allocated_bytes"`
	Limit         *uint64  `json:"limit_bytes"` // null: none
	DriverCalls   *uint64  `json:"driver_calls"`
	Rate          *float64 `json:"driver_calls_per_s"`
	Retries       *uint64  `json:"retries"`
	OOMs          *uint64  `json:"ooms"`
	Requests      *uint64  `json:"requests"` // null: of a traced process
	RequestUS     *topTime `json:"request_us"`
}

// topTime is how long requests took, in microseconds; 0 is less than one.
type topTime struct {
	P50  uint64 `json:"p50"`
	P99  uint64 `json:"p99"`
	P999 uint64 `json:"p999"`
	Max  uint64 `json:"max"`
}

type topDetails struct {
	Tags      []topUse   `json:"tags"`
	Libraries []topUse   `json:"libraries"`
	Pools     []topUse   `json:"pools"`
	Stacks    []topStack `json:"stacks"`
	Calls     []topUse   `json:"calls"` // of a traced process: by the driver's function
}

type topUse struct {
	Name   string `json:"name"`
	Blocks int64  `json:"blocks"`
	Bytes  uint64 `json:"bytes"`
}

type topStack struct {
	Frames []string `json:"frames"` // the innermost first; none: taken without a stack
	Blocks int64    `json:"blocks"`
	Bytes  uint64   `json:"bytes"`
}

// newTopDocument is a table as it is printed.
func newTopDocument(t top.Table, l *top.Look, interval time.Duration) topDocument {
	d := topDocument{Time: l.At.UTC().Truncate(time.Millisecond), Seconds: interval.Seconds(), GPUs: []topGPU{}, Processes: []topProcess{},
		Unreadable: l.Unreadable, Notes: append([]string{}, notesOf(l)...), Node: newTopNode(l.Node)}
	for _, g := range t.GPUs {
		d.GPUs = append(d.GPUs, topGPU{UUID: uuidText(g.UUID), Index: g.Index, Part: g.Part, Name: g.Name, Simulated: g.Simulated,
			Total: where(g.Total > 0, g.Total), Used: where(g.Known, g.Used), Free: where(g.Known, g.Free),
			Utilization: where(g.Utilization >= 0, g.Utilization), Reserved: g.Reserved, Allocated: g.Allocated, Cached: g.Cached, Traced: g.Traced})
	}
	for _, r := range t.Rows {
		p := topProcess{PID: r.PID, Kind: r.Kind, Program: r.Name, Arguments: append([]string{}, r.Args...), Version: r.Version,
			Settings: r.Conf, Place: r.Place, Age: where(r.Sum.Page, r.Age.Truncate(time.Millisecond).Seconds()), Stale: r.Stale, Dropped: r.Dropped,
			topMemory: newTopMemory(&r.Sum), Devices: []topDevice{}}
		for _, h := range r.Holdings {
			v := topDevice{UUID: uuidText(t.GPUs[h.GPU].UUID), Ordinal: where(h.Ordinal >= 0, h.Ordinal), topMemory: newTopMemory(&h.Memory)}
			if h.Details != nil {
				v.Details = &topDetails{topUses(h.Details.Tags), topUses(h.Details.Libraries), topUses(h.Details.Pools), topStacks(h.Details.Stacks), topUses(h.Details.Kinds)}
			}
			p.Devices = append(p.Devices, v)
		}
		d.Processes = append(d.Processes, p)
	}
	return d
}

func newTopMemory(m *top.Memory) topMemory {
	page := func(n uint64) *uint64 { return where(m.Page, n) }
	return topMemory{Used: where(m.UsedKnown, m.Used), Other: where(m.OtherKnown, m.Other), Reserved: page(m.Reserved),
		Allocated: page(m.Allocated), Active: page(m.Active), Cached: page(m.Cached), Paused: page(m.Paused),
		PeakReserved: page(m.PeakReserved), PeakAllocated: page(m.PeakAllocated), Limit: where(m.Limit > 0, m.Limit),
		DriverCalls: page(m.DriverCalls), Rate: where(m.RateKnown, m.Rate), Retries: page(m.Retries), OOMs: page(m.OOMs),
		Requests: where(m.Requests.Met > 0, m.Requests.Met), RequestUS: where(m.Requests.Met > 0, topTime{m.Requests.Quantile(0.5),
			m.Requests.Quantile(0.99), m.Requests.Quantile(0.999), m.Requests.Slow.Max})}
}

func topUses(uses []top.Use) []topUse {
	all := make([]topUse, len(uses))
	for i, u := range uses {
		all[i] = topUse{u.Name, u.Blocks, u.Bytes}
	}
	return all
}

func topStacks(uses []top.Use) []topStack {
	all := make([]topStack, len(uses))
	for i, u := range uses {
		all[i] = topStack{[]string{}, u.Blocks, u.Bytes}
		if u.Name != "" {
			all[i].Frames = strings.Split(u.Name, "\n")
		}
	}
	return all
}

func where[T any](known bool, v T) *T {
	if !known {
		return nil
	}
	return &v
}

// uuidText writes an identity as nvidia-smi does, "" where it is not known.
func uuidText(u [16]byte) string {
	if u == [16]byte{} {
		return ""
	}
	h := hex.EncodeToString(u[:])
	return "GPU-" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

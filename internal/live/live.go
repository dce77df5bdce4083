// Package live is a status segment: memory in which a process keeps current what it holds of its GPUs, for readers such
// as cistern top. The process that publishes does nothing of it on its hot path, and takes nothing from readers. The
// segment is a page below.
//
// # How it goes
//
// Publish makes a file in memory (memfd) and keeps it open; there is no name in any file system, no socket, and nothing
// is left behind when the process ends, however it does. Readers find the file among those that /proc says the process
// has open (/proc/PID/fd), so they see the processes whose /proc entries they may read: their own user's, or with root
// all of them. The file is sealed: its size is fixed, and only the mapping that its process already has may write.
//
// A goroutine refreshes the page once a second, and four times a second while a reader watches. Allocations by
// label (Details) need a look at every block: they are made only while a reader asks, and no more than a twentieth of the time is spent
// on it. A reader asks by holding a read lock on a byte of the file whose place tells the present second, and the
// publisher looks whether there is a lock on the last three: so a reader needs no right to write, and one that was killed
// or stopped asks no more.
//
// # What a reader may rely on
//
// What it reads is not trusted. The figures lie in two slots that are written in turn, each under a checksum over its
// number and its contents: a reader takes the newest that is whole, never waits for the writer, and finds one whatever
// the writer was doing when it was stopped or killed. Sizes are bounded by the reader, text is stripped of what a
// terminal would obey. The reader copies (pread) and maps nothing.
//
// # Which process it is
//
// A child of fork has its parent's files. The page says which process made it and when that started, so a page is its
// maker's alone; exec closes it. A process that stopped still has its page, whose Updated falls behind. cistern trace
// publishes a page for each process that it follows; that page says whose it is.
//
// # Containers
//
// A reader outside a container sees the processes inside, under the PIDs that it knows them by. One inside sees what its
// own /proc shows.
//
// Linux has all of this (3.17 and later); elsewhere Publish and List fail.
package live

import (
	"errors"
	"strings"
	"time"
	"unicode"

	"github.com/cistern-gpu/cistern/internal/latency"
)

// Process is one that publishes, or that is traced.
type Process struct {
	PID     int    // as the reader's /proc numbers it
	Start   uint64 // when it started, in the kernel's ticks since boot; 0 unknown
	Name    string
	Args    []string // its command line
	Kind    string   // KindCistern or KindTraced
	Version string   // of Cistern
	Conf    string   // the settings in force, in CISTERN_CONF's syntax
	Place   Place

	Updated time.Time // when the figures were taken: long ago where the process is stopped; zero before the first time
	Dropped uint64    // traced: events of all traced processes that found no room
	Devices []Device  // in use
}

// Place is a process's place in its job, as far as it is known. The rank is known where World is not 0.
type Place struct {
	Job   string `json:"job,omitempty"`
	Rank  int    `json:"rank,omitempty"`
	World int    `json:"world_size,omitempty"`
}

// The kinds of processes.
const (
	KindCistern = "cistern" // its memory is Cistern's
	KindTraced  = "traced"  // cistern trace sees its driver calls: reserved and allocated are what they got
)

// Device is what a process holds of one. Sizes are bytes, counts are since the process started.
type Device struct {
	Ordinal       int
	UUID          [16]byte // zero: unknown
	Name          string
	Total         uint64
	Reserved      uint64
	Allocated     uint64
	Active        uint64
	Cached        uint64
	Paused        uint64
	PeakReserved  uint64
	PeakAllocated uint64
	Limit         uint64 // 0: none
	DriverCalls   uint64
	Retries       uint64
	OOMs          uint64
	Pinned        uint64          // of Cached: captured graphs use it
	Recent        [Windows]uint64 // the most that was active with physical memory in the last Window, and in twice as long each

	Requests uint64            // that were met; 0: unknown
	Slow     latency.Histogram // in us: times of those that took longer than a lookup

	Details *Details // nil unless asked for, and for the first moments
}

// Details are a device's allocations by label, the most bytes first. Where there are more than fit, the last one sums up the
// others and is named MoreName.
type Details struct {
	Tags      []Use `json:"tags,omitempty"`
	Libraries []Use `json:"libraries,omitempty"`
	Pools     []Use `json:"pools,omitempty"`
	Stacks    []Use `json:"stacks,omitempty"` // a name is frames, innermost first, one a line
	Kinds     []Use `json:"kinds,omitempty"`  // traced: by the driver's function
}

// Use is what the live blocks of one holder add up to.
type Use struct {
	Name   string `json:"name"` // "" is that of callers without one
	Blocks int64  `json:"blocks"`
	Bytes  uint64 `json:"bytes"`
}

// MoreName is the name of the rest of a list that is cut short.
const MoreName = "(others)"

// ErrEnded is the failure to read the page of a process that has ended.
var ErrEnded = errors.New("the process has ended")

// Windows is the number of windows of Device.Recent, Window the length of the first.
const (
	Windows = 5
	Window  = 250 * time.Millisecond
)

// How often a page is refreshed, and how long a question is good for.
const (
	Every        = time.Second
	EveryWatched = 250 * time.Millisecond
	askedFor     = 3 // seconds
	// detailsShare: making details takes no more than one part of so many of the time.
	detailsShare = 20
)

// clean makes text of what may be anything: at most so many bytes of valid UTF-8, without what a terminal would obey. Lines
// stay where they are wanted.
func clean(s string, most int, lines bool) string {
	if len(s) > most {
		s = s[:most]
	}
	return strings.Map(func(r rune) rune {
		if r == '\n' && lines || unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, strings.ToValidUTF8(s, ""))
}

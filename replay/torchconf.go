package replay

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/internal/suggest"
	"github.com/cistern-gpu/cistern/recording"
)

// roundupIntervals is the number of size intervals of roundup_power2_divisions: one for each power of two from 1 MiB
// to 32 GiB; sizes below and above use the first and the last.
const roundupIntervals = 16

// noMaxSplit is the max_split_size of an allocator without one.
const noMaxSplit = math.MaxUint64

// TorchConf is what PYTORCH_ALLOC_CONF sets of PyTorch's CUDA caching allocator (c10/core/AllocatorConfig.cpp,
// c10/cuda/CUDAAllocatorConfig.cpp, torch 2.11). DefaultTorchConf is PyTorch's default; the zero value is not.
type TorchConf struct {
	MaxSplit         uint64  // bytes; blocks of this size or more are never split. math.MaxUint64 is none
	MaxNonSplitRound uint64  // bytes that a request of MaxSplit or more may waste in a cached block
	GCThreshold      float64 // fraction of the capacity above which old cached blocks are freed; 0 is off
	LargeSegment     uint64  // bytes of a segment for requests above 1 MiB and below 10 MiB
	Expandable       bool
	// Fraction is per_process_memory_fraction: the part of the capacity that the process may reserve.
	Fraction float64
	// Roundup holds the divisions between powers of two for each interval; 0 and 1 round to 512 bytes only.
	Roundup [roundupIntervals]uint64

	// inert are settings that PyTorch knows and that change nothing in device memory, in PYTORCH_ALLOC_CONF syntax.
	inert []string
}

// DefaultTorchConf is the allocator as PyTorch starts it when nothing is set.
func DefaultTorchConf() TorchConf {
	return TorchConf{MaxSplit: noMaxSplit, MaxNonSplitRound: 20 * mib, LargeSegment: 20 * mib, Fraction: 1}
}

// torchKeys are the keys that ParseTorchConf accepts, for its error messages.
var torchKeys = []string{"backend", "expandable_segments", "garbage_collection_threshold",
	"graph_capture_record_stream_reuse", "large_segment_size_mb", "max_non_split_rounding_mb", "max_split_size_mb",
	"per_process_memory_fraction", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
	"pinned_use_background_threads", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc",
	"roundup_power2_divisions"}

// ParseTorchConf reads PYTORCH_ALLOC_CONF's syntax, key:value,key:value. "" and "default" are PyTorch's defaults.
// Unknown keys, repeated keys and values that PyTorch would refuse are errors that name the key and the choices.
func ParseTorchConf(s string) (TorchConf, error) {
	c := DefaultTorchConf()
	s = strings.Map(func(r rune) rune {
		if strings.ContainsRune(" \t\n\r", r) {
			return -1 // PyTorch's tokenizer ignores white space
		}
		return r
	}, s)
	if s == "" || s == "default" {
		return c, nil
	}
	seen := map[string]bool{}
	for rest := s; rest != ""; {
		var item string
		item, rest = cutItem(rest)
		key, value, ok := strings.Cut(item, ":")
		if !ok || key == "" || value == "" {
			return c, fmt.Errorf("torch settings: %q: expected key:value", item)
		}
		if seen[key] {
			return c, fmt.Errorf("torch settings: %s: set twice", key)
		}
		seen[key] = true
		if err := c.set(key, value); err != nil {
			return c, err
		}
	}
	if c.MaxSplit < c.LargeSegment {
		return c, fmt.Errorf("torch settings: max_split_size_mb: %d: expected at least large_segment_size_mb, %d",
			c.MaxSplit/mib, c.LargeSegment/mib)
	}
	return c, nil
}

// cutItem splits off the part before the first comma that stands outside brackets.
func cutItem(s string) (item, rest string) {
	depth := 0
	for i, r := range s {
		switch r {
		case '[':
			depth++
		case ']':
			depth--
		case ',':
			if depth <= 0 {
				return s[:i], s[i+1:]
			}
		}
	}
	return s, ""
}

func (c *TorchConf) set(key, value string) error {
	bad := func(want string) error {
		return fmt.Errorf("torch settings: %s: %q: expected %s", key, value, want)
	}
	number := func(least uint64) (uint64, bool) {
		n, err := strconv.ParseUint(value, 10, 43) // in MiB; more than 43 bits of them are no memory size
		return n, err == nil && n >= least
	}
	switch key {
	case "backend":
		if value == "cudaMallocAsync" {
			return bad("native (the policy torch-async models cudaMallocAsync)")
		}
		if value != "native" {
			return bad("native")
		}
	case "expandable_segments":
		if value != "True" && value != "False" {
			return bad("True or False")
		}
		c.Expandable = value == "True"
	case "garbage_collection_threshold":
		f, err := strconv.ParseFloat(value, 64)
		if err != nil || !(f > 0 && f < 1) {
			return bad("a number above 0 and below 1")
		}
		c.GCThreshold = f
	case "per_process_memory_fraction":
		f, err := strconv.ParseFloat(value, 64)
		if err != nil || !(f > 0 && f <= 1) {
			return bad("a number above 0, at most 1")
		}
		c.Fraction = f
	case "max_split_size_mb":
		n, ok := number(20)
		if !ok {
			return bad("a whole number of MiB, at least 20")
		}
		c.MaxSplit = n * mib
	case "max_non_split_rounding_mb":
		n, ok := number(20)
		if !ok {
			return bad("a whole number of MiB, at least 20")
		}
		c.MaxNonSplitRound = n * mib
	case "large_segment_size_mb":
		// A request of up to 10 MiB is given such a segment, and expandable segments make them of 2 MiB pages.
		n, ok := number(10)
		if !ok || n%2 != 0 {
			return bad("an even number of MiB, at least 10")
		}
		c.LargeSegment = n * mib
	case "roundup_power2_divisions":
		return c.setRoundup(value)
	case "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse", "pinned_use_cuda_host_register",
		"pinned_use_background_threads":
		if value != "True" && value != "False" {
			return bad("True or False")
		}
		c.inert = append(c.inert, key+":"+value)
	case "pinned_num_register_threads":
		n, ok := number(1)
		if !ok || n > 128 || n&(n-1) != 0 {
			return bad("a power of two, at most 128")
		}
		c.inert = append(c.inert, key+":"+value)
	case "pinned_reserve_segment_size_mb":
		if _, ok := number(1); !ok {
			return bad("a whole number of MiB, at least 1")
		}
		c.inert = append(c.inert, key+":"+value)
	default:
		if hint := suggest.Question(key, "", torchKeys); hint != "" {
			return fmt.Errorf("torch settings: unknown key %q: %s", key, hint)
		}
		return fmt.Errorf("torch settings: unknown key %q: the keys are %s", key, strings.Join(torchKeys, ", "))
	}
	return nil
}

// setRoundup reads the value of roundup_power2_divisions: a power of two, or a list such as [256:1,512:2,>:8], whose
// keys are interval starts in MiB; the first also fills what lies below it, ">" fills what lies above the one before.
func (c *TorchConf) setRoundup(value string) error {
	bad := func(part, want string) error {
		return fmt.Errorf("torch settings: roundup_power2_divisions: %q: expected %s", part, want)
	}
	if !strings.HasPrefix(value, "[") {
		n, err := strconv.ParseUint(value, 10, 32)
		if err != nil || bits.OnesCount64(n) != 1 {
			return bad(value, "a power of two, or a list such as [256:1,512:2,>:8]")
		}
		for i := range c.Roundup {
			c.Roundup[i] = n
		}
		return nil
	}
	if !strings.HasSuffix(value, "]") {
		return bad(value, "a closing bracket")
	}
	last := -1
	for i, part := range strings.Split(value[1:len(value)-1], ",") {
		bound, text, _ := strings.Cut(part, ":")
		div, err := strconv.ParseUint(text, 10, 32)
		if err != nil || bits.OnesCount64(div) > 1 {
			return bad(part, "size:divisions with divisions 0 or a power of two")
		}
		if bound == ">" {
			for j := last + 1; j < roundupIntervals; j++ {
				c.Roundup[j] = div
			}
			continue
		}
		mb, err := strconv.ParseUint(bound, 10, 64)
		if err != nil || bits.OnesCount64(mb) != 1 {
			return bad(part, "a size in MiB that is a power of two, or >")
		}
		last = min(bits.TrailingZeros64(mb), roundupIntervals-1)
		if i == 0 {
			for j := range last {
				c.Roundup[j] = div
			}
		}
		c.Roundup[last] = div
	}
	return nil
}

// String is the settings in PYTORCH_ALLOC_CONF's syntax, only what differs from the defaults; "default" where nothing
// does. ParseTorchConf reads it back.
func (c TorchConf) String() string {
	var parts []string
	if c.Expandable {
		parts = append(parts, "expandable_segments:True")
	}
	if c.MaxSplit != noMaxSplit {
		parts = append(parts, fmt.Sprintf("max_split_size_mb:%d", c.MaxSplit/mib))
	}
	if c.MaxNonSplitRound != 20*mib {
		parts = append(parts, fmt.Sprintf("max_non_split_rounding_mb:%d", c.MaxNonSplitRound/mib))
	}
	if c.LargeSegment != 20*mib {
		parts = append(parts, fmt.Sprintf("large_segment_size_mb:%d", c.LargeSegment/mib))
	}
	if c.GCThreshold != 0 {
		parts = append(parts, "garbage_collection_threshold:"+strconv.FormatFloat(c.GCThreshold, 'g', -1, 64))
	}
	if c.Fraction != 1 {
		parts = append(parts, "per_process_memory_fraction:"+strconv.FormatFloat(c.Fraction, 'g', -1, 64))
	}
	if c.Roundup != [roundupIntervals]uint64{} {
		parts = append(parts, "roundup_power2_divisions:"+c.roundupString())
	}
	parts = append(parts, c.inert...)
	if len(parts) == 0 {
		return "default"
	}
	return strings.Join(parts, ",")
}

func (c TorchConf) roundupString() string {
	if !slices.ContainsFunc(c.Roundup[1:], func(n uint64) bool { return n != c.Roundup[0] }) {
		return strconv.FormatUint(c.Roundup[0], 10)
	}
	var b strings.Builder
	for i, n := range c.Roundup {
		if i > 0 && n == c.Roundup[i-1] && !slices.ContainsFunc(c.Roundup[i:], func(m uint64) bool { return m != n }) {
			fmt.Fprintf(&b, ",>:%d", n)
			break
		}
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%d:%d", 1<<i, n)
	}
	return "[" + b.String() + "]"
}

// TorchConfOf is the settings a trace was recorded with, as far as the file says. What PyTorch noted as parsed wins
// over the text, since a program may change settings as it runs. note is not empty where something was assumed.
func TorchConfOf(s recording.Settings) (c TorchConf, note string) {
	if !s.Known {
		return DefaultTorchConf(), "the file does not say the allocator's settings: PyTorch's defaults are assumed"
	}
	c, err := ParseTorchConf(s.Conf)
	if err != nil {
		c = DefaultTorchConf()
		note = fmt.Sprintf("recorded settings %q: %v: the values that the recorder noted are used", s.Conf, err)
	}
	c.Expandable = s.Expandable
	c.MaxSplit = noMaxSplit
	if s.MaxSplitSize > 0 {
		c.MaxSplit = uint64(s.MaxSplitSize)
	}
	c.GCThreshold = s.GCThreshold
	if s.RoundupPow2 != nil {
		c.Roundup = [roundupIntervals]uint64{}
		for mb, div := range s.RoundupPow2 {
			if mb != 0 {
				c.Roundup[min(bits.Len64(mb)-1, roundupIntervals-1)] = div
			}
		}
	}
	return c, note
}

// BlockSize is the size of the block that a request of size bytes gets (DeviceCachingAllocator::round_size).
func (c *TorchConf) BlockSize(size uint64) uint64 {
	if size < minBlock {
		return minBlock
	}
	i := min(max(bits.Len64(size)-1-20, 0), roundupIntervals-1)
	if div := c.Roundup[i]; div > 1 && size > minBlock*div {
		return roundPower2(size, div)
	}
	return (size + minBlock - 1) / minBlock * minBlock
}

// roundPower2 rounds up to the next of div equal steps between two powers of two.
func roundPower2(size, div uint64) uint64 {
	if size&(size-1) == 0 {
		return size
	}
	floor := uint64(1) << (bits.Len64(size) - 1)
	step := floor >> (bits.Len64(div) - 1)
	if step == 0 {
		return floor << 1
	}
	return (size + step - 1) &^ (step - 1)
}

// SegmentSize is the size of the segment that is got from the driver for a block of size bytes.
func (c *TorchConf) SegmentSize(size uint64) uint64 {
	switch {
	case size <= smallSize:
		return smallSegment
	case size < minLargeAlloc:
		return c.LargeSegment
	}
	return (size + roundLarge - 1) / roundLarge * roundLarge
}

// settings is the configuration as PyTorch's recorder would note it.
func (c TorchConf) settings() recording.Settings {
	s := recording.Settings{Known: true, Expandable: c.Expandable, MaxSplitSize: -1, GCThreshold: c.GCThreshold}
	if text := c.String(); text != "default" {
		s.Conf = text
	}
	if c.MaxSplit != noMaxSplit {
		s.MaxSplitSize = int64(c.MaxSplit)
	}
	if c.Roundup != [roundupIntervals]uint64{} {
		s.RoundupPow2 = map[uint64]uint64{}
		for i, divisions := range c.Roundup {
			s.RoundupPow2[1<<i] = divisions
		}
	}
	return s
}

package gpu

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// machine runs the PTX in kernels.go on the host, one thread after the other: as much of PTX as the kernels use. It
// knows every instruction by its meaning in the PTX ISA document, so that a kernel that does not fill with the pattern
// of pattern.go, or checks wrongly, is found without a GPU.
type machine struct {
	t      *testing.T
	memory []byte // at address base
	steps  int
}

const memoryBase = 0x7f0000000000

var (
	entryRE = regexp.MustCompile(`(?s)\.visible \.entry (\w+)\((.*?)\)\s*\{(.*?)\n\}`)
	paramRE = regexp.MustCompile(`\.param \.u64 (\w+)`)
	regRE   = regexp.MustCompile(`\.reg \.\w+\s+([^;]+);`)
	lineRE  = regexp.MustCompile(`^(?:@(%\w+) )?([\w.]+)\s*(.*);$`)
)

type kernel struct {
	params []string
	code   []string
	labels map[string]int
	regs   map[string]bool
}

func parse(t *testing.T, name string) *kernel {
	t.Helper()
	for _, m := range entryRE.FindAllStringSubmatch(ptx, -1) {
		if m[1] != name {
			continue
		}
		k := &kernel{labels: map[string]int{}, regs: map[string]bool{}}
		for _, p := range paramRE.FindAllStringSubmatch(m[2], -1) {
			k.params = append(k.params, p[1])
		}
		for line := range strings.Lines(m[3]) {
			line = strings.Join(strings.Fields(line), " ")
			if r := regRE.FindStringSubmatch(line); r != nil {
				for reg := range strings.SplitSeq(r[1], ",") {
					k.regs[strings.TrimSpace(reg)] = true
				}
			} else if label, ok := strings.CutSuffix(line, ":"); ok {
				k.labels[label] = len(k.code)
			} else if line != "" {
				k.code = append(k.code, line)
			}
		}
		return k
	}
	t.Fatalf("no kernel %s", name)
	return nil
}

// launch runs a kernel over a grid.
func (m *machine) launch(name string, grid, block int, args ...uint64) {
	m.t.Helper()
	k := parse(m.t, name)
	if len(args) != len(k.params) {
		m.t.Fatalf("%s takes %v, got %d arguments", name, k.params, len(args))
	}
	for b := range grid {
		for thread := range block {
			m.thread(k, args, map[string]uint64{"%ctaid.x": uint64(b), "%tid.x": uint64(thread), "%nctaid.x": uint64(grid),
				"%ntid.x": uint64(block)})
		}
	}
}

func (m *machine) thread(k *kernel, args []uint64, special map[string]uint64) {
	regs := map[string]uint64{}
	value := func(s string) uint64 {
		if v, ok := special[s]; ok {
			return v
		}
		if s == "%globaltimer" {
			m.steps++
			return uint64(m.steps) * 1000
		}
		if strings.HasPrefix(s, "%") {
			v, ok := regs[s]
			if !ok {
				m.t.Fatalf("%s is read before it is written", s)
			}
			return v
		}
		v, err := strconv.ParseUint(s, 0, 64)
		if err != nil {
			m.t.Fatalf("operand %q", s)
		}
		return v
	}
	truth := map[bool]uint64{true: 1}
	for pc := 0; pc < len(k.code); pc++ {
		p := lineRE.FindStringSubmatch(k.code[pc])
		if p == nil {
			m.t.Fatalf("instruction %q", k.code[pc])
		}
		if p[1] != "" && value(p[1]) == 0 {
			continue
		}
		var o []string
		for operand := range strings.SplitSeq(p[3], ",") {
			o = append(o, strings.Trim(strings.TrimSpace(operand), "[]"))
		}
		set := func(v uint64) {
			if !k.regs[o[0]] {
				m.t.Fatalf("%s is not declared", o[0])
			}
			regs[o[0]] = v
		}
		switch p[2] {
		case "ld.param.u64":
			for i, name := range k.params {
				if name == o[1] {
					set(args[i])
				}
			}
		case "mov.u32", "mov.u64", "cvt.u64.u32", "cvta.to.global.u64":
			set(value(o[1]))
		case "add.u64":
			set(value(o[1]) + value(o[2]))
		case "sub.u64":
			set(value(o[1]) - value(o[2]))
		case "mul.lo.u64", "mul.wide.u32":
			set(value(o[1]) * value(o[2]))
		case "mad.wide.u32":
			set(value(o[1])*value(o[2]) + value(o[3]))
		case "shr.u64":
			set(value(o[1]) >> value(o[2]))
		case "shl.b64":
			set(value(o[1]) << value(o[2]))
		case "xor.b64":
			set(value(o[1]) ^ value(o[2]))
		case "and.b64":
			set(value(o[1]) & value(o[2]))
		case "setp.ge.u64":
			set(truth[value(o[1]) >= value(o[2])])
		case "setp.lt.u64":
			set(truth[value(o[1]) < value(o[2])])
		case "setp.eq.u64":
			set(truth[value(o[1]) == value(o[2])])
		case "setp.ne.u64":
			set(truth[value(o[1]) != value(o[2])])
		case "st.global.u64":
			m.store(value(o[0]), value(o[1]), 8)
		case "st.global.u8":
			m.store(value(o[0]), value(o[1]), 1)
		case "ld.global.u64":
			set(m.load(value(o[1]), 8))
		case "ld.global.u8":
			set(m.load(value(o[1]), 1))
		case "red.global.add.u64":
			m.store(value(o[0]), m.load(value(o[0]), 8)+value(o[1]), 8)
		case "nanosleep.u32":
		case "bra":
			at, ok := k.labels[o[0]]
			if !ok {
				m.t.Fatalf("no label %s", o[0])
			}
			pc = at - 1
		case "ret":
			return
		default:
			m.t.Fatalf("instruction %q is unknown here", k.code[pc])
		}
	}
	m.t.Fatal("the kernel runs off its end")
}

func (m *machine) at(address uint64, n int) []byte {
	if address%uint64(n) != 0 || address < memoryBase || address+uint64(n) > memoryBase+uint64(len(m.memory)) {
		m.t.Fatalf("access to %d bytes at %#x, memory is %d bytes at %#x", n, address, len(m.memory), uint64(memoryBase))
	}
	return m.memory[address-memoryBase:][:n]
}

func (m *machine) store(address, v uint64, n int) {
	for i, p := 0, m.at(address, n); i < n; i++ {
		p[i] = byte(v >> (8 * i))
	}
}

func (m *machine) load(address uint64, n int) (v uint64) {
	for i, b := range m.at(address, n) {
		v |= uint64(b) << (8 * i)
	}
	return v
}

// The fill kernel writes the host's pattern, every byte of it and none beyond; the check kernel finds nothing wrong
// with it, and counts what is.
func TestKernelsInWords(t *testing.T) {
	for _, bytes := range []int{1, 7, 8, 9, 64, 100, 511, 512, 1000, 4099} {
		for _, grid := range [][2]int{{1, 1}, {1, 32}, {3, 64}} {
			t.Run(fmt.Sprintf("%d bytes on %d x %d threads", bytes, grid[0], grid[1]), func(t *testing.T) {
				const seed = 12345
				m := &machine{t: t, memory: make([]byte, 16+bytes+8)}
				counter, p := uint64(memoryBase), uint64(memoryBase+16)
				for i := range m.memory[16:] {
					m.memory[16+i] = 0xEE
				}
				m.launch("fill", grid[0], grid[1], p, uint64(bytes), mix(seed))
				want := make([]byte, bytes)
				Pattern(want, seed)
				if string(m.memory[16:16+bytes]) != string(want) {
					t.Error("the kernel's pattern is not the host's")
				}
				if string(m.memory[16+bytes:]) != "\xEE\xEE\xEE\xEE\xEE\xEE\xEE\xEE" {
					t.Error("bytes behind the range were written")
				}
				check := func(want uint64) {
					t.Helper()
					m.store(counter, 0, 8)
					m.launch("check", grid[0], grid[1], p, uint64(bytes), mix(seed), counter)
					if got := m.load(counter, 8); got != want {
						t.Errorf("check counts %d; want %d", got, want)
					}
				}
				check(0)
				m.memory[16] ^= 1
				check(1)
				m.memory[16+bytes-1] ^= 0x80
				if bytes == 1 || bytes == 8 {
					check(1)
				} else if bytes == 7 || bytes > 8 {
					check(2)
				}
				for i := range bytes {
					m.memory[16+i] = ^want[i]
				}
				check(uint64(bytes/8 + bytes%8))
			})
		}
	}
}

// The spin kernel ends when the clock says so.
func TestSpinInWords(t *testing.T) {
	m := &machine{t: t}
	m.launch("spin", 1, 1, 100_000)
	if m.steps != 101 {
		t.Errorf("the clock was read %d times at 1 us a step; want 101", m.steps)
	}
}

// Seeds that lie close make patterns that share nothing, also when shifted.
func TestPattern(t *testing.T) {
	seen := map[uint64]string{}
	for seed := range uint64(64) {
		for i := range uint64(1024) {
			w := Word(seed, i)
			where := fmt.Sprintf("word %d of seed %d", i, seed)
			if other, ok := seen[w]; ok {
				t.Fatalf("%s is %s", where, other)
			}
			seen[w] = where
		}
	}
}

// Package units reads and writes byte sizes as people write them: "80GiB", "80G", "1.5 GiB", "512MiB", "4096".
// Binary units (KiB to EiB) are powers of 1024, decimal ones (KB to PB) powers of 1000. A letter alone (K to P) is the
// binary unit, as Slurm, Docker and the JVM read it.
package units

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
)

var suffixes = []struct {
	name  string // in lower case
	bytes uint64
}{
	{"", 1}, {"b", 1}, {"byte", 1}, {"bytes", 1},
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40}, {"pib", 1 << 50}, {"eib", 1 << 60},
	{"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40}, {"p", 1 << 50},
	{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12}, {"pb", 1e15},
}

// maxFraction is the number of digits kept behind the point: 15 decide every byte of a PB, and 10^15 fits a word.
const maxFraction = 15

// ParseBytes reads a size: a decimal number, optionally with a fraction, then an optional unit in any case, with or
// without a space between. A fraction of a byte is dropped. It fails on anything else, negative numbers and sizes of
// 16 EiB or more included.
func ParseBytes(s string) (uint64, error) {
	t := strings.TrimSpace(s)
	end := strings.IndexFunc(t, func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
	if end < 0 {
		end = len(t)
	}
	number, unit := t[:end], strings.ToLower(strings.TrimSpace(t[end:]))
	whole, fraction, point := strings.Cut(number, ".")
	if whole == "" || point && fraction == "" || strings.Contains(fraction, ".") {
		return 0, badSize(s)
	}
	var scale uint64
	for _, u := range suffixes {
		if u.name == unit {
			scale = u.bytes
		}
	}
	if scale == 0 || point && scale == 1 {
		return 0, badSize(s)
	}
	n, err := strconv.ParseUint(whole, 10, 64)
	if err != nil {
		return 0, tooLarge(s)
	}
	hi, lo := bits.Mul64(n, scale)
	if hi != 0 {
		return 0, tooLarge(s)
	}
	part, err := fractionOf(fraction, scale)
	if err != nil {
		return 0, badSize(s)
	}
	sum, carry := bits.Add64(lo, part, 0)
	if carry != 0 {
		return 0, tooLarge(s)
	}
	return sum, nil
}

// fractionOf is 0.digits × scale, rounded down.
func fractionOf(digits string, scale uint64) (uint64, error) {
	if len(digits) > maxFraction {
		digits = digits[:maxFraction]
	}
	if digits == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return 0, err
	}
	divisor := uint64(1)
	for range len(digits) {
		divisor *= 10
	}
	hi, lo := bits.Mul64(n, scale) // n < divisor, so the quotient below is less than scale
	quotient, _ := bits.Div64(hi, lo, divisor)
	return quotient, nil
}

func badSize(s string) error {
	return fmt.Errorf("%q is not a size in bytes: write 80G or 80GiB, 1.5GiB, 512MiB, 80GB or a plain number", s)
}

func tooLarge(s string) error {
	return fmt.Errorf("%q is too large: sizes stay below 16 EiB", s)
}

// FormatBytes writes a size as PyTorch's reports do, with two decimals and the largest binary unit that leaves at
// least 1.00: "20.05 GiB", "512 bytes". ParseBytes reads it back, up to the rounding.
func FormatBytes(n uint64) string { return formatBytes(n, decimals) }

// decimals is how many FormatBytes writes.
const decimals = 2

func formatBytes(n uint64, decimals int) string {
	if n < 1<<10 {
		return exactBytes(n)
	}
	names := []string{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	value, i := float64(n)/(1<<10), 0
	// 1023.995 would be printed as 1024.00.
	for value >= 1024-math.Pow10(-decimals)/2 && i < len(names)-1 {
		value /= 1 << 10
		i++
	}
	return strconv.FormatFloat(value, 'f', decimals, 64) + " " + names[i]
}

func exactBytes(n uint64) string {
	if n == 1 {
		return "1 byte"
	}
	return strconv.FormatUint(n, 10) + " bytes"
}

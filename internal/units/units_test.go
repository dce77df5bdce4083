package units

import (
	"math"
	"strings"
	"testing"
)

func TestParseBytes(t *testing.T) {
	for s, want := range map[string]uint64{
		"0": 0, "4096": 4096, "80GiB": 80 << 30, "512MiB": 512 << 20, "24G": 24 << 30, "24g": 24 << 30, "24GB": 24e9, "1.5G": 3 << 29,
		"4K": 4 << 10, "2 M": 2 << 20, "1T": 1 << 40, "1p": 1 << 50, "1.5GiB": 3 << 29, "2 mib": 2 << 20,
		" 80 GiB ": 80 << 30, "1KB": 1000, "1.25gb": 1_250_000_000, "3B": 3, "17 bytes": 17, "0.1KiB": 102,
		"20.05 GiB": 21528523571, "18446744073709551615": math.MaxUint64, "64TiB": 64 << 40, "0.0GiB": 0,
		"1.123456789123456789PB": 1123456789123456,
	} {
		got, err := ParseBytes(s)
		if err != nil || got != want {
			t.Errorf("ParseBytes(%q) = %d, %v; want %d", s, got, err, want)
		}
	}
}

func TestParseBytesRefuses(t *testing.T) {
	for _, s := range []string{"", "GiB", "-1", "1E", "80Gi", "16384P", "1.GiB", ".5GiB", "1.2.3GiB", "1e9", "80GiB80", "1.5", "1.5B", "0x10",
		"18446744073709551616", "16EiB", "17179869184GiB", "15.9999999999999999999999EiBs", "٣GiB"} {
		got, err := ParseBytes(s)
		if err == nil {
			t.Errorf("ParseBytes(%q) = %d; want an error", s, got)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("ParseBytes(%q): error of several lines: %q", s, err)
		}
	}
}

func TestFormatBytes(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0 bytes", 1: "1 byte", 512: "512 bytes", 1023: "1023 bytes", 1024: "1.00 KiB", 1<<20 - 1: "1.00 MiB", 2 << 20: "2.00 MiB",
		21528523571: "20.05 GiB", 80 << 30: "80.00 GiB", 64 << 40: "64.00 TiB", math.MaxUint64: "16.00 EiB",
	} {
		if got := FormatBytes(n); got != want {
			t.Errorf("FormatBytes(%d) = %q; want %q", n, got, want)
		}
	}
}

func FuzzParseBytes(f *testing.F) {
	f.Add("80GiB")
	f.Add("1.5 gb")
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseBytes(s)
		if err != nil {
			return
		}
		// What FormatBytes makes of it is read back within the rounding of two decimals.
		back, err := ParseBytes(FormatBytes(n))
		if n >= math.MaxUint64-1<<53 {
			return // printed as 16.00 EiB, which is out of range
		}
		if err != nil || math.Abs(float64(back)-float64(n)) > 0.006*float64(n)+1 {
			t.Fatalf("%q = %d, formatted %q, read back as %d, %v", s, n, FormatBytes(n), back, err)
		}
	})
}

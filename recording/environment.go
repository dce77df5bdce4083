package recording

import (
	"strings"
	"unicode/utf8"

	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/internal/units"
)

// Environment is what a run was recorded with, as far as its recorder noted it; `cistern record` does. "" and 0 are
// unknown.
type Environment struct {
	PyTorch     string `json:"pytorch,omitempty"` // torch.__version__
	CUDA        string `json:"cuda,omitempty"`    // the version that PyTorch was built for
	Driver      string `json:"driver,omitempty"`
	Device      string `json:"device_name,omitempty"`
	DeviceTotal uint64 `json:"device_total_bytes,omitempty"`
}

// environmentMax is the most bytes of a text in an Environment. CUDA's names of GPUs have at most 255.
const environmentMax = 256

// EnvironmentText makes text of a file fit for an Environment: one line of at most 256 bytes.
func EnvironmentText(s string) string {
	s = text.Clean(s[:min(len(s), environmentMax)])
	for len(s) > environmentMax { // U+FFFD is longer than the byte that it replaces
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	return s
}

// String is all of it in one line, "" where nothing is known.
func (e Environment) String() string {
	var parts []string
	for _, p := range []struct{ before, value string }{{"PyTorch ", e.PyTorch}, {"CUDA ", e.CUDA}, {"driver ", e.Driver}, {"", e.Device}} {
		if p.value != "" {
			parts = append(parts, p.before+p.value)
		}
	}
	if e.DeviceTotal > 0 {
		parts = append(parts, units.FormatBytes(e.DeviceTotal)+" of memory")
	}
	return strings.Join(parts, ", ")
}

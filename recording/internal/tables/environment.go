package tables

import (
	"unicode/utf8"

	"github.com/cistern-gpu/cistern/internal/text"
)

// environmentMax is the most bytes of a text in a recording.Environment. CUDA's names of GPUs have at most 255.
const environmentMax = 256

// EnvironmentText makes text of a file fit for a recording.Environment: one line of at most 256 bytes.
func EnvironmentText(s string) string {
	s = text.Clean(s[:min(len(s), environmentMax)])
	for len(s) > environmentMax { // U+FFFD is longer than the byte that it replaces
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	return s
}

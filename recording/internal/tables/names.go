package tables

import (
	"strings"

	"github.com/cistern-gpu/cistern/internal/symbols"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// NameSize is the bytes of a name in memory beside its text, as an entry of a map.
const NameSize = 96

// NativeNames makes names of native functions readable, each once: those of C++ and Rust as they are written there. Files
// keep what the tables of symbols say.
type NativeNames struct {
	known map[string]string
}

// Demangle makes the name of a frame readable that has no line: other frames are of languages whose names are. b
// is charged with what that takes.
func (n *NativeNames) Demangle(f *recording.Frame, b *input.Budget) error {
	if f.Line != 0 || !strings.HasPrefix(f.Func, "_Z") && !strings.HasPrefix(f.Func, "_R") {
		return nil
	}
	plain, ok := n.known[f.Func]
	if !ok {
		plain = symbols.Demangled(f.Func)
		if err := b.Take(int64(len(plain)) + 64); err != nil {
			return err
		}
		if n.known == nil {
			n.known = map[string]string{}
		}
		n.known[f.Func] = plain
	}
	f.Func = plain
	return nil
}

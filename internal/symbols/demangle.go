package symbols

import (
	"strings"

	"github.com/ianlancetaylor/demangle"
)

// Of a name that is longer than longestMangled nothing is made out; what is made of one has at most 2^longestPlain bytes, as
// short names can stand for long ones.
const (
	longestMangled = 1 << 14
	longestPlain   = 13
)

// Demangled is the name of a function as people write it, of C++ and Rust; any other name as it is. It is slow: who
// asks often keeps what it says.
func Demangled(name string) string {
	if !strings.HasPrefix(name, "_Z") && !strings.HasPrefix(name, "_R") || len(name) > longestMangled {
		return name
	}
	plain, err := demangle.ToString(name, demangle.MaxLength(longestPlain))
	if err != nil {
		return name
	}
	return plain
}

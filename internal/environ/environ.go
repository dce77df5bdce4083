// Package environ reads environment variables for the libraries, and lists all that Cistern reads.
//
// A program may have more rights than its user: setuid, setgid, file capabilities. The kernel says so (AT_SECURE),
// and in such a program the libraries take no variable's word: that of a file, a program or a library would be used with the
// program's rights. The program's own settings, as of cistern_init, hold.
package environ

import (
	"os"
	"sync"
)

// Get is a variable's value, "" where the program must not rely on it.
func Get(name string) string {
	if Secure() {
		return ""
	}
	return os.Getenv(name)
}

// TempDir is os.TempDir where the program may rely on TMPDIR.
func TempDir() string {
	if Secure() {
		return "/tmp"
	}
	return os.TempDir()
}

// Secure reports whether the program has more rights than its user.
var Secure = sync.OnceValue(secure)

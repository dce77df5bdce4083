package analyze

import (
	"path"
	"regexp"
	"strings"

	"github.com/cistern-gpu/cistern/trace"
)

// What stands for code that is in no library: the program's own, and that of which no frame says a file.
const (
	OwnCode        = "the program"
	UnknownLibrary = "unknown"
)

var (
	sharedObject = regexp.MustCompile(`^(?:lib)?(.+?)\.so(?:\.[0-9.]+)?$`)
	pythonsOwn   = regexp.MustCompile(`/lib(?:64)?/python3(?:\.\d+)?/`)
)

// LibraryOf is the library whose code a frame is of: the package that an installed Python file belongs to, "python" for
// what comes with Python, a shared object without "lib" and version, OwnCode for any other file; "" where the frame
// has no file.
func LibraryOf(f trace.Frame) string {
	file := strings.ReplaceAll(f.File, `\`, "/")
	if file == "" || file == "??" {
		return ""
	}
	for _, folder := range []string{"/site-packages/", "/dist-packages/"} {
		if i := strings.LastIndex(file, folder); i >= 0 {
			name, _, inFolder := strings.Cut(file[i+len(folder):], "/")
			if !inFolder {
				name = strings.TrimSuffix(name, ".py")
			}
			return name
		}
	}
	if pythonsOwn.MatchString(file) || strings.HasPrefix(file, "<frozen ") {
		return "python" // its modules in C too
	}
	if m := sharedObject.FindStringSubmatch(path.Base(file)); m != nil {
		return m[1]
	}
	return OwnCode
}

// BlockLibrary is the library that asked for a block: the one that said so, else StackLibrary's.
func BlockLibrary(t *trace.Trace, library uint8, stack uint32) string {
	if library != 0 {
		return t.LibraryName(library)
	}
	return StackLibrary(t, stack)
}

// StackLibrary is the library that allocated: that of a stack's innermost frame with a file.
func StackLibrary(t *trace.Trace, stack uint32) string {
	if int(stack) < len(t.Stacks) {
		for _, f := range t.Stacks[stack] {
			if int(f) < len(t.Frames) {
				if name := LibraryOf(t.Frames[f]); name != "" {
					return name
				}
			}
		}
	}
	return UnknownLibrary
}

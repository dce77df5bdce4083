package analyze

import "github.com/cistern-gpu/cistern/recording"

// What stands for code that is in no library: the program's own, and that of which no frame says a file.
const (
	OwnCode        = recording.OwnCode
	UnknownLibrary = "unknown"
)

// BlockLibrary is the library that asked for a block: the one that said so, else StackLibrary's.
func BlockLibrary(t *recording.Trace, library uint8, stack uint32) string {
	if library != 0 {
		return t.LibraryName(library)
	}
	return StackLibrary(t, stack)
}

// StackLibrary is the library that allocated: that of a stack's innermost frame with a file.
func StackLibrary(t *recording.Trace, stack uint32) string {
	for _, f := range t.FramesOf(stack) {
		if name := f.Library(); name != "" {
			return name
		}
	}
	return UnknownLibrary
}

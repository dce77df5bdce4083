package config

// Keep says what a pause does with the contents of memory.
type Keep uint8

const (
	KeepHost Keep = iota // copied to page-locked host memory, and back by resume
	KeepDisk             // copied to a file, and back
	KeepNone             // dropped: undefined after resume, and after a pause that failed
)

// PauseOptions say how memory is paused. The zero value keeps contents in host memory.
type PauseOptions struct {
	Keep Keep
	// Dir is where KeepDisk creates its file, which is unlinked at once; empty is the system's folder for temporary files.
	Dir string
	// Captured allows to pause memory that a captured graph uses. The program promises not to launch the graph until resume.
	Captured bool
}

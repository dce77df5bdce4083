package recording

// File is what one file holds.
type File struct {
	Path   string // as named; "-" is standard input
	Format string // "pytorch-snapshot", "rmm-csv", "cistern"
	Traces []*Trace
	// Driver is what a driver trace says beside; nil elsewhere. Such a file may have no Traces: the program that it is of
	// got no memory on a device.
	Driver *Driver
	// DecodedBytes is the size of the file after decompression.
	DecodedBytes int64
}

// Names of the formats, as in Trace.Format.
const (
	FormatPyTorch = "pytorch-snapshot"
	FormatRMM     = "rmm-csv"
	FormatCistern = "cistern"
	// FormatDriver is the Source of the traces in a driver trace, which is a file of Cistern's format.
	FormatDriver = "driver-trace"
)
